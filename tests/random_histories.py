"""Random histories like an agent's: mostly appends, drops of a stretch or of a few tokens, frequent repositions.

Where hypothesis' shrinking is not worth its time: thousands of histories, each named by its seed.
"""

from __future__ import annotations

import numpy as np

from spec.operations import Append, Drop, History, Operation, Reposition


def random_history(
    generator: np.random.Generator, max_operations: int = 10, max_run: int = 8, vocab_size: int = 64
) -> History:
    """At least one token; canonical or not."""
    history: list[Operation] = [_tokens(generator, max_run, vocab_size)]
    appended = len(history[0].tokens)
    for _ in range(int(generator.integers(max_operations))):
        kind = generator.choice(["append", "stretch", "few", "reposition"], p=[0.4, 0.2, 0.15, 0.25])
        if kind == "append":
            history.append(_tokens(generator, max_run, vocab_size))
            appended += len(history[-1].tokens)
        elif kind == "stretch":
            start = int(generator.integers(appended))
            history.append(Drop(frozenset(range(start, min(appended, start + int(generator.integers(1, max_run)))))))
        elif kind == "few":
            history.append(Drop(frozenset(generator.integers(appended, size=generator.integers(4)).tolist())))
        else:
            history.append(Reposition())
    return tuple(history)


def _tokens(generator: np.random.Generator, max_run: int, vocab_size: int) -> Append:
    return Append(tuple(generator.integers(vocab_size, size=generator.integers(1, max_run + 1)).tolist()))
