"""Segment-batch attention: many queries, each reading its own list of pages, in one call (DESIGN R1-R4).

Shapes: T query rows, H query heads, G KV heads, D head_dim, P pages in the pool, F entries of all page lists together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from pallas_kernels.backends import find
from pallas_kernels.rotary import Style

#: A backend may read lists in blocks of up to this many entries.
LIST_PADDING = 256


class Lists(NamedTuple):
    """Attention tasks of one kind: task i computes queries `query[i] .. query[i] + count[i] - 1`.

    Positions of its queries increase. Its page list starts at `first[i]`; `length[i]` is how many of the entries are at
    positions that its last query has reached, and `shared[i]` how many its first query has. Tasks from `num` on are
    padding. All int32 [capacity], `num` int32 [].
    """

    query: Array
    count: Array
    first: Array
    length: Array
    shared: Array
    num: Array


class SegmentBatch(NamedTuple):
    """Which query reads which entries of the pool (DESIGN R1).

    A page list is in logical order, so its positions increase. The query at position q reads an entry of its list at
    position p iff p <= q, and q - p < window where there is one. Keys are stored rotated to position - shift.
    """

    #: int32 [F], at least `LIST_PADDING` of them after the last list (their values are never used): page, present
    #: position and shift (position - position the page's key is rotated to; never positive).
    pages: Array
    positions: Array
    shifts: Array
    #: int32 [F]: one past the run of one shift that the entry is in, as an index into these arrays. It may lie beyond
    #: the list, where the next one begins with the same shift. So there is room for any number of runs.
    run_stops: Array
    #: int32 [T].
    query_positions: Array
    #: Tasks of one query each.
    rows: Lists
    #: Tasks of up to `Attention.tile` consecutive queries; capacity 0 where a batch has none.
    tiles: Lists


@dataclass(frozen=True, slots=True)
class Attention:
    """What is fixed for one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    rotary_style: Style = "half"
    #: Most queries of one tile.
    tile: int = 128
    #: False promises that every shift is 0 (copy mode), and costs nothing for them.
    shifts: bool = True


#: (q [T, H, D], k_pool [P, G*D], v_pool [P, G*D], batch, cos [N, r], sin [N, r], sinks [H] | None, attention)
#: -> [T, H, D].
#: Pools are float32, bfloat16, or uint16 holding bfloat16 bits. The tables hold angles of positions 0..N-1 without
#: magnitude. Rows of no task, and queries that read nothing, come back as zeros. The result has q's dtype.
SegmentAttention = Callable[[Array, Array, Array, SegmentBatch, Array, Array, Array | None, Attention], Array]


#: Ours, as "module:function". reference is the oracle, pallas_triton_interpret is pallas_triton without a GPU.
_KNOWN = {
    "xla": "pallas_kernels.segment_attention.xla:segment_attention",
    "pallas_triton": "pallas_kernels.segment_attention.triton:segment_attention",
    "pallas_triton_interpret": "pallas_kernels.segment_attention.triton:interpreted",
    "reference": "pallas_kernels.segment_attention.reference:segment_attention",
}
BACKENDS = tuple(_KNOWN)


def backend(name: str) -> SegmentAttention:
    """The implementation of that name (DESIGN R4): one of `BACKENDS`, or anybody's module by its dotted name.

    A file `mine.py` that defines `segment_attention`, as `SegmentAttention` says, is the backend "mine" wherever Python
    finds it (in the working directory with `python -m`), and "my_package.my_kernel" one in a package. ValueError if
    there is no such name or module, or no such function in the module.
    """
    return find("segment_attention", name, _KNOWN)
