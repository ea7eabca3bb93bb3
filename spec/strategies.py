"""Random histories for hypothesis, shared by the laws here and by whoever checks an implementation against them."""

from __future__ import annotations

from hypothesis import strategies as st

from spec.operations import Append, Drop, History, Operation, Reposition


@st.composite
def histories(
    draw: st.DrawFn,
    vocab_size: int = 64,
    max_operations: int = 8,
    max_run: int = 5,
    min_tokens: int = 1,
) -> History:
    """A legal history, canonical or not, with at least `min_tokens` tokens and appends of up to `max_run`.

    Drops name any tokens appended so far, dropped ones and none at all included.
    """
    tokens = st.integers(0, vocab_size - 1)
    history: list[Operation] = []
    appended = 0
    for _ in range(draw(st.integers(1, max_operations))):
        kind = draw(st.sampled_from(["append", "append", "drop", "drop", "reposition"]))
        if kind == "append" or appended == 0:
            run = tuple(draw(st.lists(tokens, min_size=1, max_size=max_run)))
            appended += len(run)
            history.append(Append(run))
        elif kind == "drop":
            history.append(Drop(draw(st.frozensets(st.integers(0, appended - 1), max_size=appended))))
        else:
            history.append(Reposition())
    if appended < min_tokens:
        size = min_tokens - appended
        history.append(Append(tuple(draw(st.lists(tokens, min_size=size, max_size=size)))))
    return tuple(history)
