"""From a chat request to a history (DESIGN A1-A3, A5): messages are appends, and each boundary may drop and reposition.

Everything textual is done before: here a message is the token ids that it owns, and the `cache` field is well-formed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from spec.operations import Append, Drop, History, Operation, Reason, Reposition, SpecError


class TokenRange(NamedTuple):
    """Tokens [start, end) of one message, header included; negative counts from the end, None is the end (A2)."""

    message: int
    start: int = 0
    end: int | None = None


def history_of(
    messages: Sequence[Sequence[int]],
    drop: Mapping[int, Collection[TokenRange]] | None = None,
    reposition: Collection[int] = (),
    generation_prompt: Sequence[int] = (),
    continued: bool = False,
) -> History:
    """The history that a request asks for. Not canonical: `operations.canonical` makes it so.

    Args:
        messages: the token ids that each message owns, in order (A5).
        drop: after which message, which tokens of it and of earlier ones. Overlapping ranges are united (A3).
        reposition: after which messages.
        generation_prompt: the header of the reply, after the last boundary.
        continued: the last message goes on in the output (A10), so that it has no end and no boundary yet.

    Raises:
        SpecError: WRONG_RANGE. A message above its trigger is refused later, by the language: NOT_YET_APPENDED.
    """
    drop = drop or {}
    history: list[Operation] = []
    for number, tokens in enumerate(messages):
        history.append(Append(tuple(tokens)))
        if continued and number == len(messages) - 1:
            break
        # At one boundary: drop, then reposition (A1). Triggers past the last message are never reached (A3).
        if number in drop:
            dropped = {index for part in drop[number] for index in indices_of(part, messages)}
            history.append(Drop(frozenset(dropped)))
        if number in reposition:
            history.append(Reposition())
    history.append(Append(tuple(generation_prompt)))
    return tuple(history)


def indices_of(part: TokenRange, messages: Sequence[Sequence[int]]) -> range:
    """The logical indices of a part of a message."""
    length = len(messages[part.message])
    end = length if part.end is None else part.end
    if not (-length <= part.start <= length and -length <= end <= length):
        raise SpecError(Reason.WRONG_RANGE, f"[{part.start}, {end}) of {length} tokens of message {part.message}")
    first = sum(len(tokens) for tokens in messages[: part.message])
    return range(first, first + length)[part.start : end]
