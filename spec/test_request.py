"""From a request to a history (DESIGN A1-A3, A5)."""

from __future__ import annotations

import pytest

from spec.operations import Append, Drop, History, Reason, Reposition, SpecError, canonical
from spec.request import TokenRange, history_of
from spec.state import run

R = Reposition()
#: Four messages of two, three, one and four tokens, and the header of the reply.
MESSAGES = [(10, 11), (20, 21, 22), (30,), (40, 41, 42, 43)]
HEADER = (99,)


def drop(*indices: int) -> Drop:
    return Drop(frozenset(indices))


def whole(*messages: int) -> list[TokenRange]:
    return [TokenRange(message) for message in messages]


def test_without_a_cache_field() -> None:
    """A5: without edits the history is one append: every message, then the generation prompt."""
    assert canonical(history_of(MESSAGES, generation_prompt=HEADER)) == (Append((*sum(MESSAGES, ()), 99)),)


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        (
            {"drop": {2: whole(1)}},
            (Append((10, 11, 20, 21, 22, 30)), drop(2, 3, 4), Append((40, 41, 42, 43, 99))),
        ),
        (
            {"drop": {2: whole(1)}, "reposition": [2]},
            (Append((10, 11, 20, 21, 22, 30)), drop(2, 3, 4), R, Append((40, 41, 42, 43, 99))),
        ),
        (
            {"drop": {1: whole(1)}},
            (Append((10, 11, 20, 21, 22)), drop(2, 3, 4), Append((30, 40, 41, 42, 43, 99))),
        ),
        (
            {"drop": {3: whole(0, 2)}, "reposition": [3]},
            (Append((10, 11, 20, 21, 22, 30, 40, 41, 42, 43)), drop(0, 1, 5), R, Append((99,))),
        ),
        (
            {"drop": {3: [TokenRange(1, 1, -1), TokenRange(3, -2), TokenRange(3, 1, 3)]}},
            (Append((10, 11, 20, 21, 22, 30, 40, 41, 42, 43)), drop(3, 7, 8, 9), Append((99,))),
        ),
        ({"drop": {9: whole(0)}, "reposition": [9]}, (Append((*sum(MESSAGES, ()), 99)),)),
        (
            {"drop": {0: whole(0), 2: whole(0)}, "reposition": [2]},
            (Append((10, 11)), drop(0, 1), Append((20, 21, 22, 30)), R, Append((40, 41, 42, 43, 99))),
        ),
    ],
    ids=["drop", "drop_then_reposition", "own_message", "trailing", "ranges", "past_the_end", "cumulative"],
)
def test_boundaries(edits: dict, expected: History) -> None:
    """A1, A3: an edit runs after its message and before the next, the trailing one before the generation prompt; at one
    boundary the drop comes first; a trigger past the last message is inert."""
    assert canonical(history_of(MESSAGES, generation_prompt=HEADER, **edits)) == expected


def test_the_message_of_the_boundary_still_sees_what_it_drops() -> None:
    """A1: the message after which a drop runs still sees what it drops; the next one does not."""
    queries = run(None, history_of(MESSAGES, {2: whole(1)}, generation_prompt=HEADER)).queries
    assert [read.index for read in queries[5].view] == [0, 1, 2, 3, 4, 5]
    assert [read.index for read in queries[6].view] == [0, 1, 5, 6]


def test_a_continued_message_has_no_boundary_yet() -> None:
    """A3: the boundary of a last assistant message that is being continued is inert."""
    history = history_of(MESSAGES, {3: whole(1), 0: whole(0)}, reposition=[3], continued=True)
    assert canonical(history) == (Append((10, 11)), drop(0, 1), Append((20, 21, 22, 30, 40, 41, 42, 43)))


@pytest.mark.parametrize("part", [TokenRange(1, 0, 4), TokenRange(1, -4), TokenRange(1, 0, -4), TokenRange(1, 4)])
def test_range_out_of_bounds(part: TokenRange) -> None:
    """A3: a token range that leaves its message is refused; it may end at the message's length."""
    history_of(MESSAGES, {1: [TokenRange(1, -3, 3)]})
    with pytest.raises(SpecError) as refused:
        history_of(MESSAGES, {1: [part]})
    assert refused.value.reason == Reason.WRONG_RANGE


def test_a_message_above_its_trigger() -> None:
    """A3: a message cannot be dropped before it is there."""
    with pytest.raises(SpecError) as refused:
        run(None, history_of(MESSAGES, {1: whole(2)}))
    assert refused.value.reason == Reason.NOT_YET_APPENDED
