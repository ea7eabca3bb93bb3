"""The operations of the language, and what makes two histories the same (DESIGN L1-L3, L5).

A cache is not its tokens: it is the *history* of the operations that built it. This file has the three operations and
the canonical form of a history; `state.py` says what each does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Append:
    """Append `tokens`, one after another (L1). The k-th token ever appended has *logical index* k for ever."""

    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop attending to the entries with these logical indices (L2)."""

    indices: frozenset[int]


@dataclass(frozen=True, slots=True)
class Reposition:
    """Give the r surviving entries the positions 0..r-1, in logical order (L3)."""


Operation = Append | Drop | Reposition
History = tuple[Operation, ...]


class Reason(Enum):
    """Why the specification refuses something; tests compare reasons, people read messages."""

    NEGATIVE_INDEX = "a logical index is below 0"
    NOT_YET_APPENDED = "a logical index is not below the number of tokens appended so far"
    TOKEN_OUT_OF_VOCABULARY = "a token is not in [0, vocab_size)"
    WRONG_PARAMETERS = "a model's parameters do not fit its configuration"
    WRONG_RANGE = "a range is not inside its message"


class SpecError(ValueError):
    """Something that has no meaning in the language."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


def check_indices(indices: Iterable[int], appended: int) -> None:
    """Refuse logical indices that no token has yet, `appended` being how many tokens there are (L2)."""
    for index in indices:
        if index < 0:
            raise SpecError(Reason.NEGATIVE_INDEX, f"{index}")
        if index >= appended:
            raise SpecError(Reason.NOT_YET_APPENDED, f"{index}, with {appended} tokens appended")


def canonical(history: Iterable[Operation]) -> History:
    """The one history that stands for all that mean the same (L5).

    A drop becomes the set that it newly deactivates; operations that do nothing vanish; then adjacent appends are one
    append, and adjacent drops one drop. Nothing is ever merged across a reposition.

    Raises:
        SpecError: NEGATIVE_INDEX or NOT_YET_APPENDED, from a drop.
    """
    result: list[Operation] = []
    active: set[int] = set()
    appended = 0  # tokens so far: the next logical index
    n = 0  # the next position
    for operation in history:
        previous = result[-1] if result else None
        match operation:
            case Append(tokens):
                if not tokens:
                    continue
                active |= set(range(appended, appended + len(tokens)))
                appended += len(tokens)
                n += len(tokens)
                if isinstance(previous, Append):
                    result[-1] = Append(previous.tokens + tokens)
                else:
                    result.append(operation)
            case Drop(indices):
                check_indices(indices, appended)
                newly = indices & active
                if not newly:
                    continue
                active -= newly
                if isinstance(previous, Drop):
                    result[-1] = Drop(previous.indices | newly)
                else:
                    result.append(Drop(newly))
            case Reposition():
                # Compact entries are not enough: after a dropped tail they stay where they are, but n falls.
                if n == len(active):
                    continue
                n = len(active)
                result.append(operation)
    return tuple(result)
