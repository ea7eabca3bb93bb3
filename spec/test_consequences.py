"""The consequences that DESIGN §2 names, on a model of every variety. Tokens are called A, B, C, ..."""

from __future__ import annotations

import numpy as np

from spec.model import Model
from spec.operations import Append, Drop, History, Operation, Reposition
from spec.state import Segment, State, apply, run

REPOSITION = Reposition()


def append(letters: str) -> Append:
    """Token 1 is A, 2 is B, ..."""
    return Append(tuple(ord(letter) - ord("A") + 1 for letter in letters))


def drop(*indices: int) -> Drop:
    return Drop(frozenset(indices))


def shown(segment: Segment, trajectory: str) -> str:
    """A segment as DESIGN writes it: each token with its position."""
    return " ".join(f"{trajectory[read.index]}{read.position}" for read in segment.view)


def differ(a: np.ndarray, b: np.ndarray) -> bool:
    """Far beyond rounding. Logits differ if the hidden states do."""
    return float(np.abs(a - b).max()) > 1e-3


def last_logits(model: Model, *history: Operation) -> np.ndarray:
    return run(model, history).logits[-1]


def test_three_routes_give_three_different_C_and_two_different_B(model: Model) -> None:
    """L4: A,B,C then drop A; A,B, drop A, then C; B,C alone: three different C and two different B."""
    late = run(model, (append("ABC"), drop(0)))
    between = run(model, (append("AB"), drop(0), append("C")))
    never = run(model, (append("BC"),))
    b = [late.logits[1], between.logits[1], never.logits[0]]
    c = [late.logits[2], between.logits[2], never.logits[1]]
    np.testing.assert_array_equal(b[0], b[1], "both B saw A")
    assert differ(b[0], b[2])
    assert differ(c[0], c[1])
    assert differ(c[0], c[2])
    assert differ(c[1], c[2]), "this B has seen A, and this one has not"
    assert [[e.position for e in r.state.active] for r in (late, between, never)] == [[1, 2], [1, 2], [0, 1]]


def test_position_trace() -> None:
    """L1, L2, L3: A0 B1 C2 | drop B, reposition | D2 | drop D | E3 | reposition -> E2 | F3, in just four segments."""
    history = (append("ABC"), drop(1), REPOSITION, append("D"), drop(3), append("E"), REPOSITION, append("F"))
    result = run(None, history)
    assert [query.position for query in result.queries] == [0, 1, 2, 2, 3, 3]
    views = [shown(segment, "ABCDEF") for segment in result.segments]
    assert views == ["A0 B1 C2", "A0 C1 D2", "A0 C1 E3", "A0 C1 E2 F3"]
    assert [segment.queries for segment in result.segments] == [(0, 1, 2), (3,), (4,), (5,)]
    assert [(e.index, e.position, e.birth) for e in result.state.active] == [(0, 0, 0), (2, 1, 2), (4, 2, 3), (5, 3, 3)]
    assert result.state.n == 4


def test_reposition_before_or_after_an_append_differs_when_survivors_shift_differently(model: Model) -> None:
    """L1, L3: reposition before or after a token's append gives different hidden states, though the final positions
    agree, when the survivors shift by different amounts."""
    before = run(model, (append("ABC"), drop(1), REPOSITION, append("D")))
    after = run(model, (append("ABC"), drop(1), append("D"), REPOSITION))
    assert [e.position for e in before.state.active] == [e.position for e in after.state.active] == [0, 1, 2]
    assert before.state.n == after.state.n
    assert differ(before.logits[-1], after.logits[-1])


def test_a_uniform_shift_changes_nothing(model: Model) -> None:
    """L3, L7: a reposition that shifts every survivor by the same amount changes no hidden state."""
    before = run(model, (append("ABCD"), drop(0, 1), REPOSITION, append("EF")))
    after = run(model, (append("ABCD"), drop(0, 1), append("EF"), REPOSITION))
    np.testing.assert_allclose(before.logits, after.logits, atol=1e-11)
    for a, b in zip(before.state.active, after.state.active, strict=True):
        assert (a.index, a.position) == (b.index, b.position)
        np.testing.assert_allclose(a.k, b.k, atol=1e-11)
        np.testing.assert_allclose(a.v, b.v, atol=1e-11)


def test_append_in_one_piece_equals_append_token_by_token(model: Model) -> None:
    """L1: append in one piece equals append token by token."""
    start = run(model, (append("ABC"), drop(1))).state
    whole = apply(start, append("DEFG"), model)
    single = start
    for letter in "DEFG":
        single = apply(single, append(letter), model)
    assert_same(whole, single)


def test_reposition_without_a_gap_is_the_identity(model: Model) -> None:
    """L3, L5: reposition without a gap is the identity."""
    compact = run(model, (append("ABCD"), drop(1), REPOSITION)).state
    assert_same(apply(compact, REPOSITION, model), compact)


def test_reposition_after_a_dropped_tail_lowers_the_next_position(model: Model) -> None:
    """L3, L5: after a dropped tail the survivors are compact already, and a reposition still lowers n."""
    gap = run(model, (append("ABC"), drop(2))).state
    closed = apply(gap, REPOSITION, model)
    assert (gap.n, closed.n) == (3, 2)
    assert [e.position for e in gap.active] == [e.position for e in closed.active] == [0, 1]
    low = run(model, (append("ABC"), drop(2), REPOSITION, append("D")))
    high = run(model, (append("ABC"), drop(2), append("D")))
    assert (low.queries[-1].position, high.queries[-1].position) == (2, 3)
    assert differ(low.logits[-1], high.logits[-1])


def test_two_repositions_equal_one_rerotation_from_birth(model: Model) -> None:
    """L3, L7: two repositions equal one re-rotation from birth."""
    twice = run(model, (append("ABCDE"), drop(1), REPOSITION, drop(0), REPOSITION)).state
    once = run(model, (append("ABCDE"), drop(0, 1), REPOSITION)).state
    assert [(e.index, e.position, e.birth) for e in twice.active] == [(2, 0, 2), (3, 1, 3), (4, 2, 4)]
    for a, b in zip(twice.active, once.active, strict=True):
        assert (a.index, a.position) == (b.index, b.position)
        np.testing.assert_allclose(a.k, b.k, atol=1e-12)
        np.testing.assert_array_equal(a.v, b.v)


def test_what_a_dropped_token_told_others_stays(model: Model) -> None:
    """L2, L4: dropping a token does not take back what others have read from it."""
    told = last_logits(model, append("ABC"), drop(0, 1), append("D"))
    dropped_first = last_logits(model, append("AB"), drop(0, 1), append("CD"))
    assert differ(told, dropped_first), "both D read only C, but the first C has read A and B"


def assert_same(a: State, b: State) -> None:
    assert a.n == b.n
    for x, y in zip(a.active, b.active, strict=True):
        assert (x.index, x.token, x.position, x.birth) == (y.index, y.token, y.position, y.birth)
        np.testing.assert_array_equal(x.k, y.k)
        np.testing.assert_array_equal(x.v, y.v)
    for x, y in zip(a.trajectory, b.trajectory, strict=True):
        assert x.view == y.view
        np.testing.assert_array_equal(x.logits, y.logits)


def test_history_is_a_value() -> None:
    """Histories are hashable, so that they can be keys."""
    history: History = (append("AB"), drop(0), REPOSITION)
    assert {history: 1}[(append("AB"), drop(0), Reposition())] == 1
