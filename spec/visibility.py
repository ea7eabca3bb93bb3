"""Which entries a query reads, and what must be computed when only some are at hand (DESIGN L6, C6, A6).

All by definition and search. A history is replayed without a model, so every answer here depends on positions alone.
Histories are in the vocabulary of `operations.py`; `windows` has one item a layer, None for a layer without a window;
`resident` holds the logical indices whose KV is at hand, encoded at whatever position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from spec.model import reads
from spec.operations import History, check_indices
from spec.state import Query, Read, run

NO_WINDOW: tuple[int | None, ...] = (None,)


def reads_in_layer(query: Query, window: int | None) -> tuple[Read, ...]:
    """The part of its view that a query reads in a layer with this window, itself included (L6)."""
    return tuple(read for read in query.view if reads(window, query.position, read.position))


def reads_in_any_layer(query: Query, windows: Sequence[int | None] = NO_WINDOW) -> tuple[Read, ...]:
    """What must be there, and where, when the query is computed."""
    return tuple(read for read in query.view if any(reads(w, query.position, read.position) for w in windows))


def closure(
    history: History,
    resident: Collection[int],
    wanted: Iterable[int] | None = None,
    windows: Sequence[int | None] = NO_WINDOW,
) -> frozenset[int]:
    """The logical indices that a request has to compute (C6).

    Args:
        history: what the request asks for.
        resident: what need not be computed; the indices that are not in the history are ignored.
        wanted: the tokens whose logits are asked for; None means the last one appended, even if dropped since.
        windows: one a layer.

    Raises:
        SpecError: a wanted index that the history does not append, or a drop that it cannot have.
    """
    result = run(None, history)
    queries = result.queries
    if wanted is None:
        wanted = [len(queries) - 1] if queries else []
    wanted = frozenset(wanted)
    check_indices(wanted, len(queries))
    active = {entry.index for entry in result.state.active}
    computed = {index for index in active if index not in resident} | wanted
    while True:
        needed = {read.index for index in computed for read in reads_in_any_layer(queries[index], windows)}
        missing = {index for index in needed if index not in resident} - computed
        if not missing:
            return frozenset(computed)
        computed |= missing


@dataclass(frozen=True, slots=True)
class Usage:
    """A partition of a prompt's logical indices (A6)."""

    computed: frozenset[int]
    drop_skipped: frozenset[int]
    repos: frozenset[int]
    cached: frozenset[int]


def usage(history: History, resident: Collection[int], windows: Sequence[int | None] = NO_WINDOW) -> Usage:
    """Sort each token of a prompt under the first of A6's four kinds that applies; keys are rotated as they are read.

    The queries of the request before its first output token are those that `closure` gives, and no others.
    """
    result = run(None, history)
    computed = closure(history, resident, windows=windows)
    reading = [read for index in computed for read in reads_in_any_layer(result.queries[index], windows)]
    read_at_all = {read.index for read in reading}
    read_shifted = {read.index for read in reading if read.shift != 0}
    active = {entry.index for entry in result.state.active}

    def kind(index: int) -> str:
        if index in computed:
            return "computed"
        if index not in active and index not in read_at_all:
            return "drop_skipped"
        if index in read_shifted:
            return "repos"
        return "cached"

    kinds = {index: kind(index) for index in range(len(result.queries))}
    return Usage(
        *(frozenset(i for i in kinds if kinds[i] == name) for name in ("computed", "drop_skipped", "repos", "cached"))
    )
