"""From plans to padded arrays (DESIGN R3), by brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from akv_jax.planning.plan import NO_MOVES, Moves, Segment, StepPlan
from akv_jax.runtime.batch import MOVE_PADDING, SCRATCH_PAGE, StepBatch, build, most_tiles
from pallas_kernels.segment_attention.api import LIST_PADDING, Lists, SegmentBatch

SIZES = {"rows": 64, "logit_rows": 8, "list_capacity": 500, "move_capacity": 20, "tile": 16}


def random_plan(generator: np.random.Generator, segments: int = 4) -> StepPlan:
    """Segments of 1 to 20 queries, each the end of a longer list with gaps in its positions."""
    parts, positions, start = [], [], 0
    for _ in range(segments):
        queries = int(generator.choice([1, 2, 4, 5, 15, 16, 17, 20]))
        entries = queries + int(generator.integers(40))
        at = (np.cumsum(generator.integers(1, 4, entries)) - 1).astype(np.int32)
        pages, drawn = (generator.integers(1, 999, entries).astype(np.int32) for _ in range(2))
        # Runs of one to many entries.
        shifts = np.repeat(drawn % 3, 1 + drawn % 8)[:entries]
        parts.append(Segment(start, start + queries, pages, at, -shifts))
        positions.append(at[entries - queries :])
        start += queries
    tokens, destinations = (generator.integers(1, 999, start).astype(np.int32) for _ in range(2))
    moves = Moves(*(generator.integers(1, 99, 7).astype(np.int32) for _ in range(3)))
    return StepPlan(
        tokens, np.concatenate(positions), destinations, tuple(parts), moves, np.array([0, start - 1], np.int32)
    )


def tasks(lists: Lists) -> list[tuple[int, ...]]:
    columns: Any = lists[:5]
    return [tuple(int(column[i]) for column in columns) for i in range(int(lists.num))]


def runs(batch: SegmentBatch, first: int, length: int) -> list[tuple[int, int]]:
    """Where in the list a run of one shift ends, and its shift: as a reader goes from one to the next."""
    found, entry = [], first
    while entry < first + length:
        stop = min(int(batch.run_stops[entry]), first + length)
        found.append((stop - first, int(batch.shifts[entry])))
        entry = stop
    return found


def runs_of(shifts: list[int]) -> list[tuple[int, int]]:
    return [(i + 1, shift) for i, shift in enumerate(shifts) if i + 1 == len(shifts) or shifts[i + 1] != shift]


def built(plan: StepPlan, **changes: int) -> StepBatch:
    return build(plan, **{**SIZES, "rows": 96, **changes})


@pytest.mark.parametrize("seed", range(20))
def test_every_query_is_in_one_task_with_its_list(seed: int) -> None:
    """R3: and `length` and `shared` count what the last and the first query of a task reach."""
    plan = random_plan(np.random.default_rng(seed))
    batch = built(plan)
    attention = batch.attention
    covered: list[int] = []
    for kind, longest in ((attention.rows, 1), (attention.tiles, 16)):
        for query, count, first, length, shared in tasks(kind):
            assert 1 <= count <= longest
            rows = range(query, query + count)
            covered += rows
            (segment,) = [s for s in plan.segments if s.start <= query < s.stop]
            assert query + count <= segment.stop
            reach = [int((segment.positions <= plan.positions[row]).sum()) for row in rows]
            assert (length, shared) == (max(reach), min(reach))
            view = slice(first, first + length)
            assert attention.pages[view].tolist() == segment.pages[:length].tolist()
            assert attention.positions[view].tolist() == segment.positions[:length].tolist()
            assert attention.shifts[view].tolist() == segment.shifts[:length].tolist()
            assert runs(attention, first, length) == runs_of(segment.shifts[:length].tolist())
    assert sorted(covered) == list(range(len(plan.tokens)))


def test_short_segments_are_rows_and_long_ones_tiles() -> None:
    """R3: a tile that is mostly empty costs more than a few rows."""
    plan = random_plan(np.random.default_rng(1), segments=8)
    batch = built(plan, rows=256)
    for segment in plan.segments:
        mine = [t for t in tasks(batch.attention.rows) if segment.start <= t[0] < segment.stop]
        assert len(mine) == (segment.stop - segment.start if segment.stop - segment.start <= 4 else 0)


def test_padding() -> None:
    """C7: rows that nobody asked for write to the scratch page; capacities are the executable's."""
    plan = random_plan(np.random.default_rng(0))
    used = len(plan.tokens)
    batch = built(plan)
    for name in ("tokens", "positions", "destinations"):
        column = np.asarray(getattr(batch, name))
        assert column.shape == (96,) and column.dtype == np.int32
        assert column[:used].tolist() == getattr(plan, name).tolist()
    assert set(np.asarray(batch.destinations)[used:]) == {SCRATCH_PAGE}
    assert np.array_equal(batch.attention.query_positions, batch.positions)
    assert len(batch.attention.pages) == 500 + LIST_PADDING
    assert np.asarray(batch.logit_rows).tolist() == [0, used - 1, *[0] * 6]
    assert int(batch.moves.num) == 7
    assert len(batch.moves.source) == 20 + MOVE_PADDING
    assert set(np.asarray(batch.moves.target)[7:]) == {SCRATCH_PAGE}


def test_shapes_do_not_depend_on_the_plan() -> None:
    """R3: only the bucket is a shape."""
    nothing = np.zeros(0, np.int32)
    empty = built(StepPlan(nothing, nothing, nothing, (), NO_MOVES, nothing))
    full = built(random_plan(np.random.default_rng(0)))

    def shapes(batch: Any) -> list[tuple[int, ...]]:
        if isinstance(batch, tuple):
            return [shape for part in batch for shape in shapes(part)]
        return [np.shape(batch)]

    assert shapes(empty) == shapes(full)


def test_a_bucket_of_few_rows_has_no_tiles() -> None:
    """R3: a decode step's executable is the smaller for it."""
    nothing = np.zeros(0, np.int32)
    empty = StepPlan(nothing, nothing, nothing, (), NO_MOVES, nothing)
    assert len(built(empty, rows=4).attention.tiles.query) == 0
    assert len(built(empty, rows=5).attention.tiles.query) == 1


@pytest.mark.parametrize("tile", [1, 3, 5, 8, 128])
def test_there_is_room_for_every_tile(tile: int) -> None:
    """R3: however the rows are divided among segments."""

    def most(rows: int) -> int:
        """Tiles of the worst division, by dynamic programming."""
        best = [0] * (rows + 1)
        for used in range(5, rows + 1):
            best[used] = max(best[used - size] + -(-size // tile) for size in range(5, used + 1))
        return max(best)

    for rows in range(5, 60):
        assert most(rows) <= most_tiles(rows, tile)


@pytest.mark.parametrize(
    "capacity",
    [{"rows": 30}, {"list_capacity": 60}, {"move_capacity": 6}, {"logit_rows": 1}],
    ids=lambda c: next(iter(c)),
)
def test_a_plan_beyond_its_bucket_is_refused(capacity: dict[str, int]) -> None:
    """Never cut short in silence."""
    plan = random_plan(np.random.default_rng(0))
    assert len(plan.tokens) > 30 and sum(len(s.pages) for s in plan.segments) > 60
    with pytest.raises(ValueError, match="exceeds its bucket"):
        built(plan, **capacity)
