"""Copy mode: the versions at other positions than at birth that one sequence reads (DESIGN C2, C3, C8).

Some are the cache's, leased; the others are copies that the sequence makes. A reposition only ever moves an entry down,
so each entry has one such version at a time, and one that it has left is never read again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from akv_jax.planning.active_set import ActiveSet
from akv_jax.planning.visibility import View

#: Logical indices, and the positions of their versions: int32 [entries] each.
Places = tuple[np.ndarray, np.ndarray]
_NOTHING = np.zeros(0, np.int32)


class Versions:
    """By logical index: the version of an entry that is read in place of its page, as of what has been placed."""

    def __init__(self, count: int) -> None:
        #: int32 [tokens]: the page, -1 where there is none, and the position that its K is rotated to.
        self.page = np.full(count, -1, np.int32)
        self.position = np.zeros(count, np.int32)
        #: Whether the page is the sequence's own, and whether the step that writes it has run.
        self._own = np.zeros(count, bool)
        self._written = np.zeros(count, bool)
        #: The cache's versions that later epochs read: (logical indices, positions, pages) by their first epoch.
        self._coming: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        # Left for another position, but still read by the step that is placed: own pages, and the cache's.
        self._retired: list[np.ndarray] = []
        self._returned: list[np.ndarray] = []
        self._making: list[Places] = []
        #: What copies were made for, by steps that have run (DESIGN A6).
        self.made: list[Places] = []

    def expect(self, epoch: int, indices: np.ndarray, positions: np.ndarray, pages: np.ndarray) -> None:
        """From `epoch` on, these leased pages are read; called once for each page, in the order of epochs."""
        if len(indices):
            self._coming[epoch] = indices, positions, pages

    def receive(self, coming: ActiveSet) -> None:
        """These are its own pages, which somebody else fills; `written` says when."""
        self._put(coming.indices, coming.positions, coming.pages, own=True)

    def written(self, indices: np.ndarray) -> None:
        """The pages of these entries have K and V in them."""
        self._written[indices] = True

    def grow(self, room: int) -> None:
        """Make room for that many more tokens."""
        self.page = np.pad(self.page, (0, room), constant_values=-1)
        self.position = np.pad(self.position, (0, room))
        self._own, self._written = np.pad(self._own, (0, room)), np.pad(self._written, (0, room))

    def missing(self, views: Sequence[tuple[int, View]], turned: Sequence[np.ndarray]) -> tuple[Places, ...]:
        """The copies that (epoch, view) after view need, where `turned` says which entries need a version at all."""
        at, there, missing = self.position.copy(), self.page >= 0, []
        for (epoch, view), needed in zip(views, turned, strict=True):
            if epoch in self._coming:
                indices, positions, _ = self._coming[epoch]
                at[indices], there[indices] = positions, True
            new = needed & ~(there[view.indices] & (at[view.indices] == view.positions))
            indices, positions = view.indices[new], view.positions[new]
            at[indices], there[indices] = positions, True
            missing.append((indices, positions))
        return tuple(missing)

    def place(self, epoch: int, view: View, copies: Places, pages: np.ndarray) -> None:
        """From here on the queries placed are of `epoch` and have this view; its `copies` come to lie on `pages`."""
        if epoch in self._coming:
            indices, positions, leased = self._coming.pop(epoch)
            self._put(indices, positions, leased, own=False)
        self._put(*copies, pages, own=True)
        self._making.append(copies)
        # Now and then the cache has an entry just where it is now, and what was read before it has no use.
        elsewhere = (self.page[view.indices] >= 0) & (self.position[view.indices] != view.positions)
        own, leased = self.drop(view.indices[elsewhere])
        self._retired.append(own[own >= 0])
        self._returned.append(leased)

    def _put(self, indices: np.ndarray, positions: np.ndarray, pages: np.ndarray, *, own: bool) -> None:
        old, owned = self.page[indices], self._own[indices]
        self._retired.append(old[owned])
        self._returned.append(old[(old >= 0) & ~owned])
        self.page[indices], self.position[indices] = pages, positions
        self._own[indices], self._written[indices] = own, not own

    def ran(self) -> tuple[np.ndarray, np.ndarray]:
        """What was placed has run. Returns pages that nothing reads any more: its own, and the cache's."""
        for indices, _ in self._making:
            self._written[indices] = True
        self.made += self._making
        retired, returned = np.concatenate([_NOTHING, *self._retired]), np.concatenate([_NOTHING, *self._returned])
        self._making, self._retired, self._returned = [], [], []
        return retired, returned

    def drop(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """These entries are not read any more. Returns their own pages, by entry or -1, and the leased ones."""
        pages, own = self.page[indices], self._own[indices]
        self.page[indices], self._own[indices] = -1, False
        return np.where(own, pages, -1), pages[(pages >= 0) & ~own]

    def give(self, pages: np.ndarray) -> None:
        """These of its own are the cache's now, leased."""
        self._own &= ~np.isin(self.page, pages)

    @property
    def held(self) -> int:
        """Pages in use, leased ones included."""
        lists = (*self._retired, *self._returned, *(pages for _, _, pages in self._coming.values()))
        return int((self.page >= 0).sum()) + sum(map(len, lists))

    def own_pages(self) -> np.ndarray:
        """Every page that belongs to the sequence alone: int32."""
        return np.concatenate([self.page[self._own], *self._retired])

    def written_pages(self) -> np.ndarray:
        """By logical index: its own page that has K and V in it, or -1."""
        return np.where(self._own & self._written, self.page, -1)
