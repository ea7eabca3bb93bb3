"""How much two requests share: the longest common prefix of their canonical histories, and nothing past it (C1)."""

from __future__ import annotations

from typing import NamedTuple

from spec.operations import Append, Drop, History, Reposition, canonical


class Shared(NamedTuple):
    """A common prefix, as its number of appended tokens and its number of drops and repositions."""

    tokens: int
    operations: int


def common_prefix(a: History, b: History) -> Shared:
    """Walk both canonical histories to the first differing token or operation. A drop is one step, equal or not."""
    tokens = operations = 0
    for step, other in zip(steps(a), steps(b), strict=False):
        if step != other:
            break
        if isinstance(step, int):
            tokens += 1
        else:
            operations += 1
    return Shared(tokens, operations)


def steps(history: History) -> list[int | Drop | Reposition]:
    """A canonical history with every append spread into its tokens."""
    result: list[int | Drop | Reposition] = []
    for operation in canonical(history):
        if isinstance(operation, Append):
            result.extend(operation.tokens)
        else:
            result.append(operation)
    return result
