"""A radix tree as plain arrays: what leaves one process and comes back in another (see `persistence.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import ClassVar

import numpy as np


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
    int32, the run and the place in it; `shifts` int32, position minus birth position (DESIGN C2); `used` int64;
    `dropped` bool, whether its last user did.
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
    used: np.ndarray
    dropped: np.ndarray

    #: Columns and their dtypes, little-endian.
    NODE_COLUMNS: ClassVar = {"parents": "<i4", "kinds": "|u1", "lengths": "<i4", "last_used": "<i8"}
    SLOT_COLUMNS: ClassVar = {"nodes": "<i4", "offsets": "<i4", "shifts": "<i4", "used": "<i8", "dropped": "|u1"}
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

    def part(self, node: int, ends: np.ndarray) -> np.ndarray:
        """The node's numbers; `ends` are the running totals of `lengths`."""
        return self.numbers[ends[node] - self.lengths[node] : ends[node]]

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
        _require(((self.kinds == NodeKind.ROOT) == roots).all() and (self.kinds <= max(NodeKind)).all(), "unknown kinds")
        _require(int(roots.sum()) == len(self.salts) == len(set(self.salts)), "not one salt a root")
        listed = np.isin(self.kinds, (NodeKind.RUN, NodeKind.DROP))
        _require((self.lengths[listed] > 0).all() and not self.lengths[~listed].any(), "lengths of nodes")
        _require(int(self.lengths.sum(dtype=np.int64)) == len(self.numbers), "not as many numbers as nodes have")
        _require((self.numbers >= 0).all(), "negative numbers")
        _require(_are_times(self.last_used), "times of nodes")
        ends, edges = np.cumsum(self.lengths), set()
        for node in np.flatnonzero(~roots).tolist():
            own = self.part(node, ends)
            edges.add((int(self.parents[node]), self.kinds[node], own[: 1 if self._is_run(node) else None].tobytes()))
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
        _require(_are_times(self.used), "times of slots")

    def _is_run(self, node: int) -> bool:
        return self.kinds[node] == NodeKind.RUN


def from_columns(salts: tuple[str, ...], columns: dict[str, bytes]) -> TreeExport:
    """From little-endian bytes by name. ValueError if some are missing, of no whole length, or make no tree."""
    _require(set(columns) == set(TreeExport.COLUMNS), "other columns than expected")
    arrays = {name: np.frombuffer(columns[name], dtype) for name, dtype in TreeExport.COLUMNS.items()}
    _require((arrays["dropped"] <= 1).all(), "neither dropped nor not")
    arrays["dropped"] = arrays["dropped"].astype(bool)
    tree = TreeExport(salts, **arrays)
    tree.validate()
    return tree


def to_columns(tree: TreeExport) -> dict[str, bytes]:
    """The reverse of `from_columns`, salts left aside."""
    names = [field.name for field in fields(tree) if field.name != "salts"]
    return {name: getattr(tree, name).astype(TreeExport.COLUMNS[name]).tobytes() for name in names}


def _are_times(times: np.ndarray) -> bool:
    # Far from overflow, for the clock goes on from there.
    return bool(((times >= 0) & (times < 1 << 60)).all())


def _require(condition: object, what: str) -> None:
    if not condition:
        raise ValueError(what)
