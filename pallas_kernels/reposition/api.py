"""Reposition by copy: turned copies of keys, and copies of values, in new pages of the pool (DESIGN C2, C8, R1).

Shapes: L layers, P pages in the pool, G KV heads, D head_dim, N rows of a rotary table, r pairs of dimensions turned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from pallas_kernels.backends import find
from pallas_kernels.rotary import Style

#: A backend may read the lists of moves in blocks of up to this many.
MOVE_PADDING = 256


class MoveBatch(NamedTuple):
    """Move i copies page `source[i]` to page `target[i]`, its key turned by `shift[i]`.

    All int32: three of [C], with at least `MOVE_PADDING` entries after the last move, and `num` []. Moves from `num` on
    are padding; their source and target must be pages of the pool that nobody reads (the scratch page), their shift 0.
    No target is listed twice, and none is a source (the planner's promise, R1). A shift is a difference of two
    positions, of either sign and smaller than the rows of the table.
    """

    source: Array
    target: Array
    shift: Array
    num: Array


@dataclass(frozen=True, slots=True)
class Rotation:
    """What is fixed for the layers of one call."""

    num_kv_heads: int
    head_dim: int
    rotary_style: Style = "half"
    #: Which table each layer uses, where there are several (L numbers); one table is everybody's.
    tables: tuple[int, ...] = ()


#: (k_pool, v_pool, moves, cos [N, r], sin [N, r], rotation) -> (k_pool, v_pool).
#: Pools are [P, G*D], one layer, or [L, P, G*D], all layers in one call; float32, bfloat16, or uint16 holding bfloat16
#: bits. The tables hold angles of positions 0..N-1 without magnitude (L7: it is part of K already), or are [K, N, r]
#: for K kinds of layer. Dimensions from 2*r on are copied. Rotation is in float32 (C3), from what is stored, and
#: rounded once. Only target pages change: under jit, with both pools donated, in place.
Reposition = Callable[[Array, Array, MoveBatch, Array, Array, Rotation], tuple[Array, Array]]


#: Ours, as "module:function". reference is the oracle, pallas_triton_interpret is pallas_triton without a GPU.
_KNOWN = {
    "xla": "pallas_kernels.reposition.xla:reposition",
    "pallas_triton": "pallas_kernels.reposition.triton:reposition",
    "pallas_triton_interpret": "pallas_kernels.reposition.triton:interpreted",
    "reference": "pallas_kernels.reposition.reference:reposition",
}
BACKENDS = tuple(_KNOWN)


def backend(name: str) -> Reposition:
    """The implementation of that name (DESIGN R4), or `reposition` of anybody's module; see `segment_attention.api`."""
    return find("reposition", name, _KNOWN)
