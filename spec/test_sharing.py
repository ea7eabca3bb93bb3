"""How much two requests share (DESIGN C1)."""

from __future__ import annotations

import pytest
from hypothesis import given

from spec.operations import Append, Drop, History, Reposition, canonical
from spec.sharing import Shared, common_prefix
from spec.state import run
from spec.strategies import histories

R = Reposition()
AB, C, D, CD = Append((1, 2)), Append((3,)), Append((4,)), Append((3, 4))


def drop(*indices: int) -> Drop:
    return Drop(frozenset(indices))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((AB, CD), (AB, C, Append((9,))), Shared(3, 0)),
        ((AB, drop(0), C), (AB, C), Shared(2, 0)),
        ((AB, drop(0), C), (AB, drop(0), R, C), Shared(2, 1)),
        ((AB, drop(0), R, C), (AB, drop(0), R, CD), Shared(3, 2)),
        ((AB, C, drop(0), D), (AB, C, drop(0, 1), D), Shared(3, 0)),
        ((AB, C, drop(0), drop(1), D), (AB, C, drop(0, 1), drop(0), D), Shared(4, 1)),
        ((AB, R, C), (AB, drop(), C), Shared(3, 0)),
        ((AB, drop(0), R, drop(1), R, C), (AB, drop(0, 1), R, C), Shared(2, 0)),
        ((), (AB,), Shared(0, 0)),
    ],
)
def test_common_prefix(a: History, b: History, expected: Shared) -> None:
    """C1: requests share the longest common prefix of their canonical histories and nothing past it: equal tokens
    after different operations are different."""
    assert common_prefix(a, b) == common_prefix(b, a) == expected


@given(histories(vocab_size=2), histories(vocab_size=2))
def test_what_is_shared_was_computed_in_the_same_way(a: History, b: History) -> None:
    """C1: every shared token has seen the same tokens at the same positions in both histories."""
    shared = common_prefix(a, b)
    assert run(None, a).queries[: shared.tokens] == run(None, b).queries[: shared.tokens]


@given(histories(), histories())
def test_a_history_shares_all_of_itself_with_what_goes_on_from_it(a: History, more: History) -> None:
    """C1: the next turn's request, which repeats this one and appends, shares all of it."""
    tokens = sum(len(op.tokens) for op in a if isinstance(op, Append))
    operations = sum(not isinstance(op, Append) for op in canonical(a))
    assert common_prefix(a, (*a, C, *more)) == (tokens, operations)
