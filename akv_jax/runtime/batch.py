"""From a `StepPlan` to the padded arrays of one executable (DESIGN R3).

Only the number of query rows is a shape, rounded up to a bucket; lengths of page lists and numbers of tasks are values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from akv_jax.cache.pages import SCRATCH_PAGE
from akv_jax.planning.plan import Segment, StepPlan
from akv_jax.runtime.host_array import empty_aligned
from pallas_kernels.reposition.api import MOVE_PADDING, MoveBatch
from pallas_kernels.segment_attention.api import LIST_PADDING, Lists, SegmentBatch

#: Segments of at most this many queries run as single rows: cheaper than a mostly empty tile.
_SHORT = 4


class StepBatch(NamedTuple):
    """Everything that one step reads beside weights and pool, for T query rows. `build` makes it of NumPy arrays."""

    #: int32 [T]; padding rows write to the scratch page and are read by nobody.
    tokens: Array
    positions: Array
    destinations: Array
    attention: SegmentBatch
    moves: MoveBatch
    #: int32 [S]: query rows whose logits are returned.
    logit_rows: Array


def build(
    plan: StepPlan, *, rows: int, logit_rows: int, list_capacity: int, move_capacity: int, tile: int
) -> StepBatch:
    """Pad `plan` to `rows` query rows. The plan must fit every capacity; that is the planner's duty."""
    used = len(plan.tokens)
    total = sum(len(segment.pages) for segment in plan.segments)
    if (
        used > rows
        or total > list_capacity
        or len(plan.moves.source) > move_capacity
        or len(plan.logit_rows) > logit_rows
    ):
        raise ValueError(f"plan of {used} queries and {total} list entries exceeds its bucket of {rows} rows")
    columns: Any = [empty_aligned((list_capacity + LIST_PADDING,), np.int32) for _ in range(4)]
    pages, positions, shifts, run_stops = columns
    end = 0
    for segment in plan.segments:
        begin, end = end, end + len(segment.pages)
        pages[begin:end], positions[begin:end], shifts[begin:end] = segment.pages, segment.positions, segment.shifts
    _fill_run_stops(shifts[:end], run_stops[:end])
    single, tiles = _tasks(plan, tile)
    query_positions = _padded(plan.positions, rows)
    return StepBatch(
        tokens=_padded(plan.tokens, rows),
        positions=query_positions,
        destinations=_padded(plan.destinations, rows, fill=SCRATCH_PAGE),
        attention=SegmentBatch(
            *(pages, positions, shifts, run_stops, query_positions),
            rows=_lists(single, rows),
            tiles=_lists(tiles, most_tiles(rows, tile)),
        ),
        moves=MoveBatch(
            _padded(plan.moves.source, move_capacity + MOVE_PADDING),
            _padded(plan.moves.target, move_capacity + MOVE_PADDING, fill=SCRATCH_PAGE),
            _padded(plan.moves.shift, move_capacity + MOVE_PADDING),
            _scalar(len(plan.moves.source)),
        ),
        logit_rows=_padded(plan.logit_rows, logit_rows),
    )


def most_tiles(rows: int, tile: int) -> int:
    """How many tile tasks `rows` queries can come to: each is full, or the last of a segment that is not short."""
    return 0 if rows <= _SHORT else rows // tile + rows // (_SHORT + 1)


def _fill_run_stops(shifts: np.ndarray, run_stops: np.ndarray) -> None:
    """Where the run of one shift that each entry is in ends (see `api.SegmentBatch`)."""
    changes = np.flatnonzero(shifts[1:] != shifts[:-1]) + 1
    if len(changes) == 0:
        run_stops[:] = len(shifts)
        return
    stops = np.append(changes, len(shifts))
    run_stops[:] = np.repeat(stops, np.diff(stops, prepend=0))


def _tasks(plan: StepPlan, tile: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Split segments into tasks (query, count, first, length, shared), single rows and tiles apart."""
    single: list[tuple[int, ...]] = []
    tiles: list[tuple[int, ...]] = []
    first = 0
    for segment in plan.segments:
        count = segment.stop - segment.start
        size, tasks = (1, single) if count <= _SHORT else (tile, tiles)
        for query in range(segment.start, segment.stop, size):
            tasks.append((query, min(size, segment.stop - query), first, *_reach(plan, segment, query, size)))
        first += len(segment.pages)
    return single, tiles


def _reach(plan: StepPlan, segment: Segment, query: int, size: int) -> tuple[int, int]:
    """How many leading entries of the segment's list the task's last and first query reach by position."""
    ends = plan.positions[[min(query + size, segment.stop) - 1, query]]
    last, first = np.searchsorted(segment.positions, ends, side="right")
    return int(last), int(first)


def _lists(tasks: list[tuple[int, ...]], capacity: int) -> Lists:
    columns: Any = np.zeros((5, capacity), np.int32)
    if tasks:
        columns[:, : len(tasks)] = np.array(tasks, np.int32).T
    return Lists(*columns, num=_scalar(len(tasks)))


def _scalar(value: int) -> Any:
    return np.int32(value)


def _padded(values: np.ndarray, size: int, fill: int = 0) -> Any:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out
