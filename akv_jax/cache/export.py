"""A radix tree as plain arrays: what leaves one process and comes back in another (see `persistence.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, ClassVar

import numpy as np

from akv_jax.cache.history import REPOSITION
from akv_jax.cache.node import Edge

#: Parent (-1: none), edge, tokens, and when it was last used.
Path = tuple[int, Edge, np.ndarray, int]
_NO_TOKENS = np.zeros(0, np.int32)


class NodeKind(IntEnum):
    ROOT = 0
    RUN = 1
    DROP = 2
    REPOSITION = 3


@dataclass(frozen=True, slots=True)
class TreeExport:
    """Paths and residency, no references. Nodes are numbered from 0, parents before their children.

    Of nodes: `parents` int32, -1 of a root; `kinds` uint8, `NodeKind`; `lengths` int32, how many of `numbers` are the
    node's: a run's token ids, or the indices that a drop deactivates; `last_used` int64. `salts`: one a root, in order.

    Of resident pages, one *slot* each, the most worth keeping first and derived versions last: `nodes` and `offsets`,
    int32, the run and the place in it; `shifts` int32, position minus birth position (DESIGN C2); `ranks` int32, their
    places in the order of eviction, the next to go first; `left` bool, whether their last user left them behind (C5).
    """

    salts: tuple[str, ...]
    parents: np.ndarray
    kinds: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    last_used: np.ndarray
    nodes: np.ndarray
    offsets: np.ndarray
    shifts: np.ndarray
    ranks: np.ndarray
    left: np.ndarray

    #: Columns and their dtypes, little-endian.
    NODE_COLUMNS: ClassVar = {"parents": "<i4", "kinds": "|u1", "lengths": "<i4", "last_used": "<i8"}
    SLOT_COLUMNS: ClassVar = {"nodes": "<i4", "offsets": "<i4", "shifts": "<i4", "ranks": "<i4", "left": "|u1"}
    COLUMNS: ClassVar = {**NODE_COLUMNS, "numbers": "<i4", **SLOT_COLUMNS}

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @property
    def num_slots(self) -> int:
        return len(self.nodes)

    @property
    def num_births(self) -> int:
        """Slots that hold birth versions: they come before all others."""
        return int((self.shifts == 0).sum())

    def first(self, count: int) -> TreeExport:
        """The same paths with the first `count` slots only."""
        return replace(self, **{name: getattr(self, name)[:count] for name in self.SLOT_COLUMNS})

    def paths(self) -> Iterator[Path]:
        """Every node; the arrays are the caller's."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        salts = iter(self.salts)
        rows = zip(self.parents.tolist(), self.kinds.tolist(), (ends - self.lengths).tolist(), ends.tolist())
        for (parent, kind, start, end), last_used in zip(rows, self.last_used.tolist(), strict=True):
            own = self.numbers[start:end]
            if kind == NodeKind.RUN:
                yield parent, int(own[0]), own.copy(), last_used
            elif kind == NodeKind.ROOT:
                yield parent, next(salts), _NO_TOKENS, last_used
            else:
                yield parent, REPOSITION if kind == NodeKind.REPOSITION else own.tobytes(), _NO_TOKENS, last_used

    def starts(self) -> np.ndarray:
        """Logical index of each node's first token, int64."""
        starts = np.zeros(self.num_nodes, np.int64)
        tokens = np.where(self.kinds == NodeKind.RUN, self.lengths, 0)
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                starts[node] = starts[parent] + tokens[parent]
        return starts

    def by_version(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Node, shift and slots of each version of each run."""
        order = np.lexsort((self.shifts, self.nodes))
        breaks = (np.diff(self.nodes[order]) != 0) | (np.diff(self.shifts[order]) != 0)
        for slots in np.split(order, np.flatnonzero(breaks) + 1) if len(order) else ():
            yield int(self.nodes[slots[0]]), int(self.shifts[slots[0]]), slots

    def validate(self) -> None:
        """ValueError that says what is wrong if no tree could have been exported like this."""
        for columns, count in ((self.NODE_COLUMNS, self.num_nodes), (self.SLOT_COLUMNS, self.num_slots)):
            for name in columns:
                _require(len(getattr(self, name)) == count, f"{name} has another length than its neighbours")
        self._validate_nodes()
        self._validate_slots()

    def _validate_nodes(self) -> None:
        roots = self.parents == -1
        _require((self.parents >= -1).all() and (self.parents < np.arange(self.num_nodes)).all(), "parents come late")
        _require(((self.kinds == NodeKind.ROOT) == roots).all(), "roots that are none")
        _require((self.kinds <= max(NodeKind)).all(), "unknown kinds")
        _require(int(roots.sum()) == len(self.salts) == len(set(self.salts)), "not one salt a root")
        listed = np.isin(self.kinds, (NodeKind.RUN, NodeKind.DROP))
        _require((self.lengths[listed] > 0).all() and not self.lengths[~listed].any(), "lengths of nodes")
        _require(int(self.lengths.sum(dtype=np.int64)) == len(self.numbers), "not as many numbers as nodes have")
        _require((self.numbers >= 0).all(), "negative numbers")
        # Far from overflow, for the clock goes on from there.
        _require(((self.last_used >= 0) & (self.last_used < 1 << 60)).all(), "times of nodes")
        edges = {(parent, edge) for parent, edge, _, _ in self.paths() if parent >= 0}
        _require(len(edges) == self.num_nodes - len(self.salts), "two children with one edge")

    def _validate_slots(self) -> None:
        known = (self.nodes >= 0) & (self.nodes < self.num_nodes)
        _require(known.all() and (self.kinds[self.nodes] == NodeKind.RUN).all(), "slots of nodes that are no runs")
        _require(((self.offsets >= 0) & (self.offsets < self.lengths[self.nodes])).all(), "slots outside their run")
        order = np.lexsort((self.shifts, self.offsets, self.nodes))
        columns = (self.nodes[order], self.offsets[order], self.shifts[order])
        alike = np.logical_and.reduce([column[1:] == column[:-1] for column in columns])
        _require(not alike.any(), "two slots for one entry")
        _require((self.shifts[: self.num_births] == 0).all(), "derived versions before birth versions")
        # Where slots were left off the end, ranks are missing.
        _require(len(np.unique(self.ranks)) == self.num_slots, "two slots with one rank")


def from_nodes(paths: Sequence[Path], **slots: np.ndarray) -> TreeExport:
    """From what `TreeExport.paths` gives, and the columns of the slots."""
    kinds, numbers = [], [_NO_TOKENS]
    for _, edge, tokens, _ in paths:
        if isinstance(edge, bytes):
            kinds.append(NodeKind.REPOSITION if edge == REPOSITION else NodeKind.DROP)
            tokens = np.frombuffer(edge, np.int32) if kinds[-1] == NodeKind.DROP else _NO_TOKENS
        else:
            kinds.append(NodeKind.ROOT if isinstance(edge, str) else NodeKind.RUN)
        numbers.append(tokens)
    columns: dict[str, Any] = {
        "parents": np.array([parent for parent, _, _, _ in paths], np.int32),
        "kinds": np.array(kinds, np.uint8),
        "lengths": np.array([len(own) for own in numbers[1:]], np.int32),
        "numbers": np.concatenate(numbers),
        "last_used": np.array([last_used for _, _, _, last_used in paths], np.int64),
    }
    return TreeExport(tuple(edge for _, edge, _, _ in paths if isinstance(edge, str)), **columns, **slots)


def from_columns(salts: tuple[str, ...], columns: dict[str, bytes]) -> TreeExport:
    """From little-endian bytes by name. ValueError if some are missing, of no whole length, or make no tree."""
    _require(set(columns) == set(TreeExport.COLUMNS), "other columns than expected")
    arrays = {name: np.frombuffer(columns[name], dtype) for name, dtype in TreeExport.COLUMNS.items()}
    _require((arrays["left"] <= 1).all(), "neither left behind nor not")
    arrays["left"] = arrays["left"].astype(bool)
    tree = TreeExport(salts, **arrays)
    tree.validate()
    return tree


def to_columns(tree: TreeExport) -> dict[str, bytes]:
    """The reverse of `from_columns`, salts left aside."""
    return {name: getattr(tree, name).astype(dtype).tobytes() for name, dtype in TreeExport.COLUMNS.items()}


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)
