"""Canonical histories (DESIGN L5) and what the language refuses (L2)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given

from spec.operations import Append, Drop, History, Reason, Reposition, SpecError, canonical
from spec.state import State, run
from spec.strategies import histories

ABC, R = Append((1, 2, 3)), Reposition()


def drop(*indices: int) -> Drop:
    return Drop(frozenset(indices))


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ((), ()),
        ((Append(()),), ()),
        ((Append((1,)), Append((2, 3))), (ABC,)),
        ((ABC, drop()), (ABC,)),
        ((ABC, drop(1), drop(1)), (ABC, drop(1))),
        ((ABC, drop(1), drop(0, 1)), (ABC, drop(0, 1))),
        ((ABC, drop(1), Append((4,)), drop(1, 3)), (ABC, drop(1), Append((4,)), drop(3))),
        ((ABC, drop(1), Append(()), drop(0)), (ABC, drop(0, 1))),
        ((R, ABC, R), (ABC,)),
        ((Append((1,)), R, Append((2, 3))), (ABC,)),
        ((ABC, drop(1), R, R), (ABC, drop(1), R)),
        ((ABC, drop(2), R), (ABC, drop(2), R)),
        ((ABC, drop(1), R, drop(0)), (ABC, drop(1), R, drop(0))),
        ((ABC, drop(1), R, drop(1), R, drop(0)), (ABC, drop(1), R, drop(0))),
        ((ABC, drop(0, 1, 2), R, R), (ABC, drop(0, 1, 2), R)),
    ],
)
def test_canonical(history: History, expected: History) -> None:
    """L5: a drop is the set it newly deactivates; what does nothing vanishes; neighbours merge, never across a
    reposition; a reposition is no operation iff n = r."""
    assert canonical(history) == expected


@given(histories())
def test_canonical_once_is_enough(history: History) -> None:
    """L5: the canonical form of a canonical form is itself."""
    assert canonical(canonical(history)) == canonical(history)


@given(histories())
def test_every_operation_of_a_canonical_history_does_something(history: History) -> None:
    """L5: every operation of a canonical history changes the state, and no two neighbours are of one kind."""
    operations = canonical(history)
    states = [_positions(run(None, operations[:i]).state) for i in range(len(operations) + 1)]
    assert all(before != after for before, after in pairwise(states))
    kinds = [type(operation) for operation in operations]
    assert all(kind != following for kind, following in pairwise(kinds))


def _positions(state: State) -> tuple[int, list[tuple[int, int]]]:
    return state.n, [(entry.index, entry.position) for entry in state.active]


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        ((drop(0),), Reason.NOT_YET_APPENDED),
        ((ABC, drop(3)), Reason.NOT_YET_APPENDED),
        ((ABC, drop(0), R, drop(2, 3)), Reason.NOT_YET_APPENDED),
        ((drop(1), Append((1, 2))), Reason.NOT_YET_APPENDED),
        ((ABC, drop(-1)), Reason.NEGATIVE_INDEX),
    ],
)
def test_refused(history: History, reason: Reason) -> None:
    """L2: an index that is not yet appended is an error, whoever looks."""
    with pytest.raises(SpecError) as from_canonical:
        canonical(history)
    with pytest.raises(SpecError) as from_run:
        run(None, history)
    assert from_canonical.value.reason == from_run.value.reason == reason


def test_an_index_no_longer_active_is_ignored() -> None:
    """L2: an index that is not active any more is ignored."""
    assert run(None, (ABC, drop(1), drop(1, 0))).state.active == run(None, (ABC, drop(0, 1))).state.active
