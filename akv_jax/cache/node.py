"""A node of the cache's tree: a run of tokens with the versions of their K and V, or an operation (DESIGN C1, C2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from akv_jax.cache.history import REPOSITION

#: What leads from a node to a child: the next token, or an operation as `history.steps` has it. A root's is its salt.
Edge = int | bytes | str


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens, or an operation (no tokens). Changed by `radix_tree.py` only.

    versions: by shift (position of K - position at birth), int32 pages of the run, -1 where none is resident (C2).
    Shift 0 is the birth version. resident: how many pages each version has, never 0.
    """

    number: int
    parent: Node | None
    edge: Edge
    tokens: np.ndarray
    last_used: int
    versions: dict[int, np.ndarray] = field(default_factory=dict)
    resident: dict[int, int] = field(default_factory=dict)
    children: dict[Edge, Node] = field(default_factory=dict)

    def any_version(self, at: np.ndarray | slice) -> np.ndarray:
        """A resident page of each of these tokens, int32: of the birth version, else of another, else -1 (C3)."""
        births = self.versions.get(0)
        pages = np.full(len(self.tokens), -1, np.int32)[at] if births is None else births[at]
        for shift, others in self.versions.items():
            if shift:
                pages = np.where(pages < 0, others[at], pages)
        return pages

    @property
    def dropped(self) -> np.ndarray | None:
        """Of a drop, the logical indices that it newly deactivates, ascending int32."""
        if not isinstance(self.edge, bytes) or self.edge == REPOSITION:
            return None
        return np.frombuffer(self.edge, np.int32)
