"""What each operation does (DESIGN L1-L4): `apply(state, operation, model) -> state`. Read this file first.

Three things that are never the same: the *trajectory* (every token ever appended), the *active* entries (those that
the next token attends to), and residency (which entries sit in some engine's memory), which the language does not know.

    from spec.model import Model, random_params
    result = run(Model.of(config, params), (Append((1, 2, 3)), Drop(frozenset({1})), Reposition(), Append((4,))))
    result.logits      # [4, vocab_size], of every token ever appended

Dataclasses here compare without their arrays: two states are equal when they hold the same entries at the same places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from spec.model import Model, Output, Past, forward
from spec.operations import Append, Drop, Operation, Reposition, check_indices
from spec.rope import rotate


@dataclass(frozen=True, slots=True)
class Entry:
    """One token's KV. Only `position` and `k` ever change, and only together, by a reposition (L4)."""

    #: Logical index: the how-manieth token ever appended it is. Never changes, never reused.
    index: int
    token: int
    #: Where K is encoded now.
    position: int
    #: Where K was encoded first; `position - birth` is the entry's *shift*.
    birth: int
    #: A layer: [kv_heads, head_dim].
    k: tuple[np.ndarray, ...] = field(compare=False)
    v: tuple[np.ndarray, ...] = field(compare=False)


class Read(NamedTuple):
    """One entry as a query finds it. `shift` is its position less its birth position."""

    index: int
    position: int
    shift: int


@dataclass(frozen=True, slots=True)
class Query:
    """A token at the moment of its append, for the record: operations never look at this."""

    index: int
    token: int
    position: int
    #: Every entry that it may attend to, in logical order, itself last. Window layers read a part of these (L6).
    view: tuple[Read, ...]
    #: [vocab_size] float64; None if there is no model.
    logits: np.ndarray | None = field(compare=False)


@dataclass(frozen=True, slots=True)
class State:
    """The active entries in logical order, the next position n, and the trajectory so far."""

    active: tuple[Entry, ...] = ()
    n: int = 0
    trajectory: tuple[Query, ...] = ()


def apply(state: State, operation: Operation, model: Model | None = None) -> State:
    """The state after one operation. Without a model only positions are kept: K, V and logits are empty.

    Raises:
        SpecError: NEGATIVE_INDEX, NOT_YET_APPENDED (drop) or TOKEN_OUT_OF_VOCABULARY (append).
    """
    match operation:
        case Append(tokens):
            for token in tokens:  # in one piece or token by token is the same thing, by definition
                state = append(state, token, model)
            return state
        case Drop(indices):
            return drop(state, indices)
        case Reposition():
            return reposition(state, model)


def append(state: State, token: int, model: Model | None = None) -> State:
    """L1: encode the new token at n; it attends to every active entry where that is now, and to itself."""
    index = len(state.trajectory)
    # Compute.
    output = Output((), (), np.empty(0)) if model is None else forward(model, token, state.n, _past(state, model))
    # Which entries are active: one more.
    entry = Entry(index, token, position=state.n, birth=state.n, k=output.k, v=output.v)
    active = (*state.active, entry)
    # Where they are: unchanged.
    # Next position.
    n = state.n + 1
    # For the record.
    view = tuple(Read(e.index, e.position, e.position - e.birth) for e in active)
    query = Query(index, token, state.n, view, None if model is None else output.logits)
    return State(active, n, (*state.trajectory, query))


def drop(state: State, indices: Iterable[int]) -> State:
    """L2: these entries are not attended to any more. Those not, or no longer, active are ignored."""
    indices = frozenset(indices)
    check_indices(indices, len(state.trajectory))
    # Compute: nothing.
    # Which entries are active: the others.
    active = tuple(entry for entry in state.active if entry.index not in indices)
    # Where they are, and the next position: unchanged. The gap stays until a reposition closes it.
    return State(active, state.n, state.trajectory)


def reposition(state: State, model: Model | None = None) -> State:
    """L3: the r survivors move to positions 0..r-1 in logical order, and n to r. V stays as it is."""
    # Compute: nothing but rotations. K := R(q)·R(-p)·K is one rotation by q - p.
    # Which entries are active: the same.
    # Where they are.
    active = tuple(_moved(entry, position, model) for position, entry in enumerate(state.active))
    # Next position.
    n = len(active)
    return State(active, n, state.trajectory)


@dataclass(frozen=True, slots=True)
class Segment:
    """A maximal run of queries with one view: each sees what the one before it saw, where that was, and itself."""

    #: Logical indices of the queries, in order.
    queries: tuple[int, ...]
    #: What the last of them sees; an earlier one sees the part up to itself.
    view: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a history comes to. `logits` is float64 [appended, vocab_size] ([appended, 0] without a model)."""

    state: State
    logits: np.ndarray = field(compare=False)
    queries: tuple[Query, ...]
    segments: tuple[Segment, ...]


def run(model: Model | None, history: Iterable[Operation]) -> Result:
    """Apply a whole history, canonical or not, to the empty state."""
    state = State()
    for operation in history:
        state = apply(state, operation, model)
    queries = state.trajectory
    logits = np.array([query.logits for query in queries if query.logits is not None], dtype=np.float64)
    width = 0 if model is None else model.config.vocab_size
    return Result(state, logits.reshape(len(queries), width), queries, segments(queries))


def segments(queries: Iterable[Query]) -> tuple[Segment, ...]:
    """Cut a trajectory wherever a query's view is not that of the query before it, plus itself."""
    result: list[Segment] = []
    for query in queries:
        if result and query.view[:-1] == result[-1].view:
            result[-1] = Segment((*result[-1].queries, query.index), query.view)
        else:
            result.append(Segment((query.index,), query.view))
    return tuple(result)


def _past(state: State, model: Model) -> Past:
    layers = range(len(model.config.layers))
    return Past(
        positions=[entry.position for entry in state.active],
        k=[[entry.k[layer] for entry in state.active] for layer in layers],
        v=[[entry.v[layer] for entry in state.active] for layer in layers],
    )


def _moved(entry: Entry, position: int, model: Model | None) -> Entry:
    shift = position - entry.position
    layers = () if model is None else model.config.layers
    k = tuple(rotate(layer.rotary, k, shift) for layer, k in zip(layers, entry.k, strict=True))
    return replace(entry, position=position, k=k)
