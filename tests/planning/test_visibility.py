"""The compiled history against the specification (DESIGN L1-L5)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv_jax.planning.visibility import NEVER, Timeline, View
from spec.operations import Append, Drop, History, Reposition, canonical
from spec.state import Read, Result, run
from spec.strategies import histories

# The first example of a run also pays for imports.
checked = settings(max_examples=60, deadline=None)


def reads(view: View) -> tuple[Read, ...]:
    columns = view.indices.tolist(), view.positions.tolist(), view.shifts.tolist()
    return tuple(Read(*entry) for entry in zip(*columns, strict=True))


def boundaries(history: History) -> list[int]:
    """First logical index of each epoch, by definition: the start, and each operation that is not an append."""
    starts, appended = [0], 0
    for operation in canonical(history):
        if isinstance(operation, Append):
            appended += len(operation.tokens)
        else:
            starts.append(appended)
    return starts


def check_against(timeline: Timeline, result: Result) -> None:
    """Every number of the timeline, and the view of every query."""
    queries, total = result.queries, len(result.queries)
    assert timeline.count == total
    assert timeline.tokens[:total].tolist() == [query.token for query in queries]
    assert timeline.birth[:total].tolist() == [query.position for query in queries]
    assert timeline.next_position == result.state.n
    assert timeline.active == len(result.state.active)
    for query in queries:
        view = timeline.view(timeline.epoch_of(query.index), query.index + 1)
        assert reads(view) == query.view
    at_end = tuple(Read(e.index, e.position, e.position - e.birth) for e in result.state.active)
    assert reads(timeline.view(timeline.num_epochs - 1)) == at_end


@checked
@given(histories(max_operations=12))
def test_every_view_is_the_specs(history: History) -> None:
    """L1-L3: what each query reads, where, how far that is from where it was encoded, and the next position."""
    timeline, result = Timeline(history), run(None, history)
    check_against(timeline, result)
    active = {entry.index for entry in result.state.active}
    assert {i for i in range(timeline.count) if timeline.dropped[i] == NEVER} == active


@checked
@given(histories(max_operations=12))
def test_the_largest_position_is_the_largest_n_at_any_time(history: History) -> None:
    """A7: computed or not, dropped since or not."""
    largest = max(run(None, history[: stop + 1]).state.n for stop in range(len(history)))
    assert Timeline(history).largest_position == largest


@checked
@given(histories(max_operations=12))
def test_epochs_are_those_of_the_canonical_history(history: History) -> None:
    """L5: operations that do nothing begin no epoch, and adjacent drops begin one."""
    timeline = Timeline(history)
    assert timeline.starts == boundaries(history)
    kinds = [operation for operation in canonical(history) if not isinstance(operation, Append)]
    assert timeline.repositions == [epoch + 1 for epoch, op in enumerate(kinds) if isinstance(op, Reposition)]
    assert [timeline.stop(epoch) for epoch in range(timeline.num_epochs)] == [*timeline.starts[1:], timeline.count]


@checked
@given(histories(max_operations=12))
def test_a_history_and_its_canonical_form_compile_alike(history: History) -> None:
    """L5: histories equal in canonical form are the same history."""
    one, other = Timeline(history), Timeline(canonical(history))
    assert (one.starts, one.repositions) == (other.starts, other.repositions)
    for name in ("tokens", "birth", "dropped"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


@checked
@given(histories(max_operations=8), st.lists(st.integers(0, 63), max_size=5))
def test_generated_tokens_are_appends(history: History, generated: list[int]) -> None:
    """L1: and so is every sampled token, whatever the timeline had room for."""
    timeline = Timeline(history)
    for token in generated:
        timeline.append(token)
    check_against(timeline, run(None, (*history, Append(tuple(generated)))))


def test_many_generated_tokens() -> None:
    """The arrays grow as they must."""
    timeline = Timeline((Append((1, 2, 3)), Drop(frozenset({0}))))
    for token in range(300):
        timeline.append(token % 64)
    check_against(timeline, run(None, (Append((1, 2, 3)), Drop(frozenset({0})), Append(tuple(np.arange(300) % 64)))))


@checked
@given(histories(max_operations=12))
def test_the_queries_of_an_epoch_are_a_segment(history: History) -> None:
    """R1: a maximal run of queries with one view lies between two operations."""
    timeline = Timeline(history)
    epochs = [range(timeline.starts[epoch], timeline.stop(epoch)) for epoch in range(timeline.num_epochs)]
    runs = [segment.queries for segment in run(None, history).segments]
    assert runs == [tuple(epoch) for epoch in epochs if epoch]


@pytest.mark.parametrize("indices", [{3}, {-1}, {0, 99}])
def test_a_drop_of_what_is_not_there_is_refused(indices: set[int]) -> None:
    """L2: an index not yet appended is an error."""
    with pytest.raises(ValueError, match="outside the 3 appended"):
        Timeline((Append((1, 2, 3)), Drop(frozenset(indices)), Append((4,))))
