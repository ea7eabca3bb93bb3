"""What every later query of a request reads, as one value: what moves between two pools (DESIGN R5)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ActiveSet:
    """Entries in logical order, one element an entry.

    indices, pages: int32, logical index and the page in some pool. positions: int32, what the page's K is rotated to.
    births: bool, K and V as they were computed; the others are copies that were turned (DESIGN C2).
    """

    indices: np.ndarray
    pages: np.ndarray
    positions: np.ndarray
    births: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def where(self, mask: np.ndarray) -> ActiveSet:
        """Those of a bool mask."""
        return ActiveSet(self.indices[mask], self.pages[mask], self.positions[mask], self.births[mask])

    def by_index(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As a cache is offered them, int32 [count] by logical index: pages at birth, pages of copies, -1 for none, and
        positions of the latter."""
        births, copies, positions = (
            np.full(count, -1, np.int32),
            np.full(count, -1, np.int32),
            np.zeros(count, np.int32),
        )
        births[self.indices[self.births]] = self.pages[self.births]
        copies[self.indices[~self.births]] = self.pages[~self.births]
        positions[self.indices] = self.positions
        return births, copies, positions
