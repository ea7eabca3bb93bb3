"""Cases of segment-batch attention that every backend must get right; tests and benchmarks share them (DESIGN §7).

    case = cases()["shifts"]
    inputs = make(case)
    out = segment_attention(*inputs)

A case is small enough for the oracle, and together they meet every branch that a kernel is likely to have: page lists
of no entry to several blocks, segments of one query to several tiles, rows and tiles in one launch, padding. The *core*
ones are quick, and few enough executables between them to be tested every time; the others are for long test runs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.segment_attention.api import LIST_PADDING, Attention, Lists, SegmentBatch

#: "bits" is bfloat16 queries over a pool of uint16 that holds bfloat16 bits.
Kind = Literal["float32", "bfloat16", "bits"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries of one view: the last `queries` entries of a page list of `entries` are their own."""

    entries: int
    queries: int
    #: Positions left out between entries, at random, as drops without a reposition leave them.
    gaps: bool = False
    #: False: the queries come after all entries, and are not in the list.
    listed: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """Everything but the numbers. Segments of at most `short` queries are single rows, others are cut into tiles."""

    segments: tuple[Segment, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    #: How many of the head's dimensions are rotated; None is all of them.
    rotary_dim: int | None = None
    style: Literal["half", "interleaved"] = "half"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    #: The share of entries whose key is stored at another position, in runs of one shift of up to `run` entries.
    shifted: float = 0.0
    run: int = 40
    #: What the kernel is told; False only without any shift.
    shifts: bool = True
    tile: int = 32
    short: int = 4
    #: Query rows, those in use and padding; None is no padding. The same for most, so that they share an executable.
    rows: int | None = 640
    kind: Kind = "float32"
    seed: int = 0
    #: Whether it is tested every time.
    core: bool = False


class Inputs(NamedTuple):
    """The arguments of an `api.SegmentAttention`, NumPy."""

    q: np.ndarray
    k_pool: np.ndarray
    v_pool: np.ndarray
    batch: SegmentBatch
    cos: np.ndarray
    sin: np.ndarray
    sinks: np.ndarray | None
    attention: Attention


#: Room in the page lists, and pages in the pool: more than most cases list, for the same reason as `Case.rows`.
_ENTRIES, _PAGES = 2600, 4000
_MIXED = (Segment(300, 90), Segment(1, 1), Segment(40, 3), Segment(700, 1), Segment(64, 64), Segment(257, 33))
_SMALL = (Segment(70, 40), Segment(30, 1), Segment(9, 9))
_UNLISTED = (Segment(0, 1, listed=False), Segment(0, 40, listed=False), Segment(300, 20, listed=False), Segment(9, 9))
_ROWS = tuple(Segment(entries, 1) for entries in (1, 2, 255, 256, 257, 769, 1025))


def cases() -> dict[str, Case]:
    """Every case by name."""
    return {**_plain(), **_windows(), **_heads(), **_shifted(), **_dtypes(), **_large()}


def _plain() -> dict[str, Case]:
    """How queries and lists are cut up."""
    return {
        "mixed": Case(_MIXED, core=True),
        "rows_only": Case(_ROWS, core=True),
        "tiles_only": Case((Segment(600, 300), Segment(256, 256), Segment(5, 5)), short=0, core=True),
        "one_query": Case((Segment(1, 1),), core=True),
        "one_query_alone": Case((Segment(1, 1),), rows=None),
        "nothing": Case((), core=True),
        "no_padding": Case(_SMALL, rows=None),
        "exact_blocks": Case((Segment(512, 64), Segment(256, 32), Segment(256, 1)), core=True),
        "empty_lists": Case(_UNLISTED, core=True),
        "gaps": Case((Segment(300, 50, gaps=True), Segment(400, 1, gaps=True)), core=True),
        "large_tiles": Case((Segment(900, 300), Segment(200, 128), Segment(129, 129)), tile=128),
    }


def _windows() -> dict[str, Case]:
    gaps = (Segment(600, 100, gaps=True), Segment(600, 2, gaps=True))
    return {
        "window": Case(_MIXED, window=37, core=True),
        "window_and_gaps": Case(gaps, window=37, core=True),
        "window_and_shifts": Case(_MIXED, shifted=0.5, window=37, core=True),
        "window_and_empty_lists": Case(_UNLISTED, window=37, core=True),
        "window_1": Case(_SMALL, window=1),
        "window_of_blocks": Case((Segment(900, 40), Segment(900, 1, gaps=True)), window=300),
        "window_longer_than_all": Case(_MIXED, window=5000),
    }


def _heads() -> dict[str, Case]:
    """Heads, and what is done to their scores."""
    return {
        "one_kv_head": Case(_MIXED, num_heads=6, num_kv_heads=1, shifted=0.8, run=600),
        "three_a_head": Case(_SMALL, num_heads=9, num_kv_heads=3),
        "no_sharing": Case(_SMALL, num_heads=3, num_kv_heads=3, tile=64),
        "thirty_a_head": Case(_SMALL, num_heads=30, num_kv_heads=1),
        "head_16": Case(_SMALL, head_dim=16),
        "head_96": Case(_SMALL, head_dim=96),
        "head_128": Case(_SMALL, head_dim=128, num_heads=8),
        "sinks": Case(_MIXED, sinks=True),
        "sinks_and_empty_lists": Case(_UNLISTED, sinks=True),
        "sinks_and_window": Case(_SMALL, sinks=True, window=7, num_heads=6),
        "softcap": Case(_SMALL, softcap=2.0),
    }


def _shifted() -> dict[str, Case]:
    everything = Case(
        _MIXED,
        num_heads=6,
        head_dim=96,
        rotary_dim=48,
        style="interleaved",
        window=100,
        softcap=5.0,
        sinks=True,
        shifted=0.5,
        core=True,
    )
    return {
        "shifts": Case(_MIXED, shifted=0.5, core=True),
        "all_shifted": Case(_SMALL, shifted=1.0, core=True),
        "long_shifts": Case((*_MIXED, *(Segment(n, 1) for n in (300, 600, 250))), shifted=0.9, run=900, core=True),
        "short_runs": Case(_MIXED, shifted=0.9, run=3, core=True),
        "no_shifts_promised": Case(_MIXED, shifts=False, core=True),
        "partial": Case(_SMALL, rotary_dim=32, shifted=0.7),
        "interleaved": Case(_SMALL, style="interleaved", shifted=0.7),
        "partial_interleaved": Case(_SMALL, head_dim=96, rotary_dim=24, style="interleaved", shifted=0.7),
        "everything": everything,
    }


def _dtypes() -> dict[str, Case]:
    return {
        "bfloat16": Case(_MIXED, kind="bfloat16", shifted=0.3),
        "bits": Case(_MIXED, kind="bits", shifted=0.3),
        "bits_of_smollm2": Case(_SMALL, kind="bits", num_heads=9, num_kv_heads=3, shifted=0.3, core=True),
        "rows_of_bits": Case(_ROWS, kind="bits", softcap=5.0, sinks=True, core=True),
        "bits_head_96": Case(_SMALL, kind="bits", head_dim=96, sinks=True),
    }


def _large() -> dict[str, Case]:
    """The sizes and head shapes that the kernels are for: a quarter of the heads is one device's share of four."""
    decode = tuple(Segment(entries, 1) for entries in (96_000, 1, 4000, 33_000))
    beside = (Segment(1, 1), Segment(5000, 4096), Segment(4096, 1), Segment(4100, 4096, gaps=True), Segment(20, 1))
    turns = (Segment(1500, 200), Segment(2000, 1), Segment(700, 500), Segment(900, 1))
    turned: Any = {"tile": 128, "rows": None, "kind": "bfloat16", "shifted": 0.5, "run": 400}
    gpt_oss = Case(turns, num_heads=16, num_kv_heads=2, sinks=True, **turned)
    qwen3 = Case(turns, num_heads=8, num_kv_heads=1, head_dim=128, **turned)
    return {
        "gpt_oss": dataclasses.replace(gpt_oss, num_heads=64, num_kv_heads=8),
        "gpt_oss_quarter": gpt_oss,
        "gpt_oss_quarter_window": dataclasses.replace(gpt_oss, window=128),
        "qwen3": dataclasses.replace(qwen3, num_heads=32, num_kv_heads=4),
        "qwen3_quarter": qwen3,
        "qwen3_quarter_copy": dataclasses.replace(qwen3, shifted=0.0, shifts=False),
        "llama_interleaved": dataclasses.replace(qwen3, num_kv_heads=2, style="interleaved"),
        "gemma": dataclasses.replace(qwen3, num_kv_heads=4, window=500, softcap=50.0),
        "phi": dataclasses.replace(qwen3, head_dim=96, num_kv_heads=8),
        "decode_96k": Case(decode, rows=16),
        "decode_96k_bfloat16": Case(decode, kind="bfloat16", shifted=0.5, run=20_000, rows=16),
        "decode_96k_window": Case(decode, window=128, rows=16),
        "one_query_beside_4096": Case(beside, num_heads=2, num_kv_heads=1, tile=128, rows=8200),
        "one_query_beside_4096_window": Case(beside, num_heads=2, num_kv_heads=1, tile=128, rows=8200, window=128),
    }


def make(case: Case) -> Inputs:
    """Random unit-variance numbers for a case, and the arrays of its launch.

    The pool has more pages than are listed. Page 0 is the scratch page: it holds finite numbers that nobody may count.
    """
    generator = np.random.default_rng(case.seed)
    sizes = _sizes(case)
    batch = _batch(case, sizes, generator)
    # Keys may be turned by any distance between two positions.
    cos, sin = _table(case.rotary_dim or case.head_dim, sizes.pages)
    dtype = np.dtype(np.float32 if case.kind == "float32" else ml_dtypes.bfloat16)
    q = _normal(generator, (sizes.rows, case.num_heads, case.head_dim)).astype(dtype)
    shape = sizes.pages, case.num_kv_heads * case.head_dim
    k, v = (_normal(generator, shape).astype(dtype) for _ in range(2))
    if case.kind == "bits":
        k, v = k.view(np.uint16), v.view(np.uint16)
    sinks = _normal(generator, (case.num_heads,)) if case.sinks else None
    return Inputs(q, k, v, batch, cos, sin, sinks, _attention(case))


def abstract(case: Case) -> Inputs:
    """Shapes and dtypes of `make(case)`, as `jax.ShapeDtypeStruct`s: enough to lower or compile a backend for it.

    `bits` stand for bfloat16, which is what a device with that dtype has in its pool.
    """
    sizes, dtype = _sizes(case), jnp.float32 if case.kind == "float32" else jnp.bfloat16

    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    tasks = Lists(*(array(sizes.rows) for _ in range(5)), num=array())
    entries = (array(sizes.entries) for _ in range(4))
    batch = SegmentBatch(*entries, query_positions=array(sizes.rows), rows=tasks, tiles=tasks)
    pool = array(sizes.pages, case.num_kv_heads * case.head_dim, dtype=dtype)
    table = array(sizes.pages, (case.rotary_dim or case.head_dim) // 2, dtype=jnp.float32)
    sinks = array(case.num_heads, dtype=jnp.float32) if case.sinks else None
    q = array(sizes.rows, case.num_heads, case.head_dim, dtype=dtype)
    return Inputs(q, pool, pool, batch, table, table, sinks, _attention(case))


def rows_in_use(case: Case) -> int:
    """How many query rows some task computes: the first ones."""
    return sum(segment.queries for segment in case.segments)


class _Sizes(NamedTuple):
    rows: int
    entries: int
    pages: int


def _sizes(case: Case) -> _Sizes:
    total = sum(segment.entries for segment in case.segments)
    rows = rows_in_use(case) if case.rows is None else case.rows
    return _Sizes(rows, max(total, _ENTRIES) + LIST_PADDING, max(3 * total // 2, _PAGES))


def _attention(case: Case) -> Attention:
    return Attention(
        case.num_heads,
        case.num_kv_heads,
        case.head_dim,
        scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        rotary_style=case.style,
        tile=case.tile,
        shifts=case.shifts,
    )


def _batch(case: Case, sizes: _Sizes, generator: np.random.Generator) -> SegmentBatch:
    total = sum(segment.entries for segment in case.segments)
    pages, positions, shifts, run_stops = (_garbage(generator, sizes.entries) for _ in range(4))
    pages[:total] = 1 + generator.permutation(sizes.pages - 1)[:total]
    query_positions: Any = np.zeros(sizes.rows, np.int32)
    single, tiles = list[tuple[int, ...]](), list[tuple[int, ...]]()
    first = row = 0
    for segment in case.segments:
        view = slice(first, first + segment.entries)
        all_positions = _positions(generator, segment)
        positions[view] = all_positions[: segment.entries]
        shifts[view] = _shifts(generator, positions[view], case)
        own = all_positions[len(all_positions) - segment.queries :]
        query_positions[row : row + segment.queries] = own
        size, tasks = (1, single) if segment.queries <= case.short else (case.tile, tiles)
        for start in range(0, segment.queries, size):
            count = min(size, segment.queries - start)
            shared, length = np.searchsorted(positions[view], own[[start, start + count - 1]], side="right").tolist()
            tasks.append((row + start, count, first, length, shared))
        first, row = first + segment.entries, row + segment.queries
    stops = np.append(np.flatnonzero(np.diff(shifts[:total])) + 1, total)
    run_stops[:total] = stops[np.searchsorted(stops, np.arange(total), side="right")]
    return SegmentBatch(
        *(pages, positions, shifts, run_stops, query_positions), _tasks(single, sizes.rows), _tasks(tiles, sizes.rows)
    )


def _positions(generator: np.random.Generator, segment: Segment) -> np.ndarray:
    """Of all entries, and of queries that are none."""
    count = segment.entries + (0 if segment.listed else segment.queries)
    steps = generator.integers(1, 4, count) if segment.gaps else np.ones(count, np.int64)
    return (np.cumsum(steps) - 1).astype(np.int32)


def _shifts(generator: np.random.Generator, positions: np.ndarray, case: Case) -> np.ndarray:
    """Runs of one shift, each key stored at its present position or later: never positive."""
    shifts = np.zeros(len(positions), np.int32)
    start = 0
    while start < len(positions):
        stop = start + int(generator.integers(1, case.run + 1))
        if generator.random() < case.shifted:
            shifts[start:stop] = -int(generator.integers(1, len(positions) + 2))
        start = stop
    return shifts


def _table(dim: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(rows)[:, None] * 10_000.0 ** (-np.arange(0, dim, 2) / dim)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _tasks(tasks: list[tuple[int, ...]], capacity: int) -> Lists:
    columns: Any = np.zeros((5, capacity), np.int32)
    for index, task in enumerate(tasks):
        columns[:, index] = task
    num: Any = np.int32(len(tasks))
    return Lists(*columns, num=num)


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)


def _garbage(generator: np.random.Generator, size: int) -> Any:
    """What padding holds must not matter."""
    return generator.integers(-(2**31), 2**31, size, dtype=np.int64).astype(np.int32)
