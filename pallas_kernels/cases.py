"""Cases of segment-batch attention that every backend must get right; tests and benchmarks share them (DESIGN §7).

    case = cases()["shifts"]
    inputs = make(case)
    out = segment_attention(*inputs)

A case is small enough for the oracle, and together they meet every branch that a kernel is likely to have: page lists
of one entry to several blocks, segments of one query to several tiles, rows and tiles in one launch, padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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


#: Room in the page lists, and pages in the pool: more than any case lists.
_ENTRIES, _PAGES = 2500, 4000
_MIXED = (Segment(300, 90), Segment(1, 1), Segment(40, 3), Segment(700, 1), Segment(64, 64), Segment(257, 33))
_SMALL = (Segment(70, 40), Segment(30, 1), Segment(9, 9))


def cases() -> dict[str, Case]:
    """Every case by name."""
    return {
        "mixed": Case(_MIXED),
        "rows_only": Case(tuple(Segment(entries, 1) for entries in (1, 2, 255, 256, 257, 512, 600))),
        "tiles_only": Case((Segment(600, 300), Segment(256, 256), Segment(5, 5)), short=0),
        "one_query": Case((Segment(1, 1),)),
        "one_query_alone": Case((Segment(1, 1),), rows=None),
        "nothing": Case(()),
        "no_padding": Case(_SMALL, rows=None),
        "exact_blocks": Case((Segment(512, 64), Segment(256, 32), Segment(256, 1)), tile=32),
        "one_kv_head": Case(_MIXED, num_heads=6, num_kv_heads=1, shifted=0.8, run=600),
        "three_a_head": Case(_SMALL, num_heads=9, num_kv_heads=3),
        "no_sharing": Case(_SMALL, num_heads=3, num_kv_heads=3),
        "head_16": Case(_SMALL, head_dim=16),
        "head_96": Case(_SMALL, head_dim=96),
        "head_128": Case(_SMALL, head_dim=128, num_heads=8),
        "gaps": Case((Segment(300, 50, gaps=True), Segment(400, 1, gaps=True))),
        "window": Case(_MIXED, window=37),
        "window_and_gaps": Case((Segment(600, 100, gaps=True), Segment(600, 2, gaps=True)), window=37),
        "window_and_shifts": Case(_MIXED, shifted=0.5, window=37),
        "window_1": Case(_SMALL, window=1),
        "window_of_blocks": Case((Segment(900, 40), Segment(900, 1, gaps=True)), window=300),
        "sinks": Case(_MIXED, sinks=True),
        "sinks_and_window": Case(_SMALL, sinks=True, window=7, num_heads=6),
        "softcap": Case(_SMALL, softcap=2.0),
        "shifts": Case(_MIXED, shifted=0.5),
        "all_shifted": Case(_SMALL, shifted=1.0),
        "long_shifts": Case((*_MIXED, *(Segment(entries, 1) for entries in (300, 600, 250))), shifted=0.9, run=900),
        "no_shifts_promised": Case(_MIXED, shifts=False),
        "partial": Case(_SMALL, rotary_dim=32, shifted=0.7),
        "interleaved": Case(_SMALL, style="interleaved", shifted=0.7),
        "partial_interleaved": Case(_SMALL, head_dim=96, rotary_dim=24, style="interleaved", shifted=0.7),
        "everything": Case(
            _MIXED,
            num_heads=6,
            head_dim=96,
            rotary_dim=48,
            style="interleaved",
            window=100,
            softcap=5.0,
            sinks=True,
            shifted=0.5,
        ),
        "bfloat16": Case(_MIXED, kind="bfloat16", shifted=0.3),
        "bits": Case(_MIXED, kind="bits", shifted=0.3),
        "bits_of_smollm2": Case(_SMALL, kind="bits", num_heads=9, num_kv_heads=3, shifted=0.3),
        "bits_head_96": Case(_SMALL, kind="bits", head_dim=96, sinks=True),
    }


def make(case: Case) -> Inputs:
    """Random unit-variance numbers for a case, and the arrays of its launch.

    The pool has more pages than are listed. Page 0 is the scratch page: it holds finite numbers that nobody may count.
    """
    generator = np.random.default_rng(case.seed)
    total = sum(segment.entries for segment in case.segments)
    rows = rows_in_use(case) if case.rows is None else case.rows
    pages, positions, shifts, run_stops = (_garbage(generator, _ENTRIES + LIST_PADDING) for _ in range(4))
    pages[:total] = 1 + generator.permutation(_PAGES - 1)[:total]
    query_positions: Any = np.zeros(rows, np.int32)
    single, tiles = list[tuple[int, ...]](), list[tuple[int, ...]]()
    first = row = 0
    for segment in case.segments:
        view = slice(first, first + segment.entries)
        positions[view] = _positions(generator, segment)
        shifts[view] = _shifts(generator, positions[view], case)
        query_positions[row : row + segment.queries] = positions[view][segment.entries - segment.queries :]
        size, tasks = (1, single) if segment.queries <= case.short else (case.tile, tiles)
        for start in range(0, segment.queries, size):
            count = min(size, segment.queries - start)
            before = segment.entries - segment.queries + start
            tasks.append((row + start, count, first, before + count, before + 1))
        first, row = first + segment.entries, row + segment.queries
    stops = np.append(np.flatnonzero(np.diff(shifts[:total])) + 1, total)
    run_stops[:total] = stops[np.searchsorted(stops, np.arange(total), side="right")]
    batch = SegmentBatch(
        pages, positions, shifts, run_stops, query_positions, _tasks(single, rows), _tasks(tiles, rows)
    )
    rotated = case.rotary_dim or case.head_dim
    # Keys may be turned by any distance between two positions.
    cos, sin = _table(rotated, _PAGES)
    attention = Attention(
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
    dtype = np.dtype(np.float32 if case.kind == "float32" else ml_dtypes.bfloat16)
    q = generator.standard_normal((rows, case.num_heads, case.head_dim)).astype(dtype)
    k, v = (generator.standard_normal((_PAGES, case.num_kv_heads * case.head_dim)).astype(dtype) for _ in range(2))
    if case.kind == "bits":
        k, v = k.view(np.uint16), v.view(np.uint16)
    sinks = generator.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None
    return Inputs(q, k, v, batch, cos, sin, sinks, attention)


def rows_in_use(case: Case) -> int:
    """How many query rows some task computes: the first ones."""
    return sum(segment.queries for segment in case.segments)


def _positions(generator: np.random.Generator, segment: Segment) -> np.ndarray:
    steps = generator.integers(1, 4, segment.entries) if segment.gaps else np.ones(segment.entries, np.int64)
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


def _garbage(generator: np.random.Generator, size: int) -> Any:
    """What padding holds must not matter."""
    return generator.integers(-(2**31), 2**31, size, dtype=np.int64).astype(np.int32)
