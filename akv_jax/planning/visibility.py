"""A history compiled to arrays, and which entries each query reads at which positions (DESIGN L1-L5).

An *epoch* is what lies between two operations: epoch e starts with the e-th drop or reposition that does something
(epoch 0 with the empty cache) and contains the appends up to the next one, if any. All queries of one epoch have one
view but for what they append themselves. Nothing here is kept per epoch and token: a view is worked out when asked
for, in time linear in the number of tokens, from when each token was dropped and where the last reposition put it.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from spec.operations import Append, Drop, Operation

#: "Dropped in epoch" of a token that is still active.
NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class View:
    """Active entries in logical order: int32 [entries] logical indices, present positions, and shifts from birth."""

    indices: np.ndarray
    positions: np.ndarray
    shifts: np.ndarray


class Timeline:
    """The compiled history of one request; generation extends it by `append`.

    Attributes, T tokens in all:
        tokens, birth, dropped: int32 [T]; token id, position at append, epoch whose drop deactivated it or `NEVER`.
        starts: first logical index of each epoch. repositions: epochs that began with a reposition.
        next_position, largest_position: n now, and the largest n at any time (DESIGN A7).
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        """Raises ValueError for a drop of a token that has not been appended, OverflowError for what is no int32."""
        total = sum(len(op.tokens) for op in operations if isinstance(op, Append))
        self.tokens = np.zeros(total, np.int32)
        self.birth = np.zeros(total, np.int32)
        self.dropped = np.full(total, NEVER, np.int32)
        self.starts = [0]
        self.repositions: list[int] = []
        self.next_position = self.largest_position = 0
        self._last_was_drop = False
        self._last_view: tuple[tuple[int, int], View] | None = None
        self.count = self.active = 0
        for op in operations:
            if isinstance(op, Append):
                self._append(_int32(op.tokens))
            elif isinstance(op, Drop):
                self._drop(_int32(op.indices))
            else:
                self._reposition()

    @property
    def num_epochs(self) -> int:
        return len(self.starts)

    def append(self, token: int) -> None:
        """One generated token."""
        if self.count == len(self.tokens):
            room = max(64, self.count // 4)
            self.tokens = np.concatenate([self.tokens, np.zeros(room, np.int32)])
            self.birth = np.concatenate([self.birth, np.zeros(room, np.int32)])
            self.dropped = np.concatenate([self.dropped, np.full(room, NEVER, np.int32)])
        self._append(np.array([token], np.int32))

    def epoch_of(self, index: int) -> int:
        """The epoch in which the token with this logical index was appended."""
        return bisect_right(self.starts, index) - 1

    def epochs(self) -> np.ndarray:
        """The epoch in which each token was appended: int32 [T]."""
        return np.repeat(np.arange(self.num_epochs, dtype=np.int32), np.diff([*self.starts, self.count]))

    def stop(self, epoch: int) -> int:
        """One past the last logical index appended in `epoch`."""
        return self.starts[epoch + 1] if epoch + 1 < len(self.starts) else self.count

    def view(self, epoch: int, stop: int | None = None) -> View:
        """What is active in `epoch` once the tokens before logical index `stop` (default: all of its own) are in."""
        stop = self.stop(epoch) if stop is None else stop
        # Several ask for the same one in turn; what comes later changes no earlier view.
        if self._last_view is not None and self._last_view[0] == (epoch, stop):
            return self._last_view[1]
        indices = np.flatnonzero(self.dropped[:stop] > epoch).astype(np.int32)
        positions = self.birth[indices]
        turn = bisect_right(self.repositions, epoch) - 1
        if turn >= 0:
            # The last reposition ranked what was active then; entries dropped since still took up a place.
            at = self.repositions[turn]
            ranks = np.cumsum(self.dropped[: self.starts[at]] > at, dtype=np.int32) - 1
            old = np.searchsorted(indices, self.starts[at])
            positions[:old] = ranks[indices[:old]]
        view = View(indices, positions, positions - self.birth[indices])
        self._last_view = (epoch, stop), view
        return view

    def _append(self, tokens: np.ndarray) -> None:
        start, self.count = self.count, self.count + len(tokens)
        self.tokens[start : self.count] = tokens
        self.birth[start : self.count] = np.arange(self.next_position, self.next_position + len(tokens))
        self.next_position += len(tokens)
        self.active += len(tokens)
        self.largest_position = max(self.largest_position, self.next_position)
        if len(tokens):
            self._last_was_drop = False

    def _drop(self, indices: np.ndarray) -> None:
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.count):
            raise ValueError(f"a drop names a token outside the {self.count} appended so far")
        new = indices[self.dropped[indices] == NEVER]
        if not len(new):
            return
        if not self._last_was_drop:
            self.starts.append(self.count)
        self.dropped[new] = len(self.starts) - 1
        self._last_view = None
        self.active -= len(new)
        self._last_was_drop = True

    def _reposition(self) -> None:
        if self.active == self.next_position:
            return
        self.repositions.append(len(self.starts))
        self.starts.append(self.count)
        self.next_position = self.active
        self._last_was_drop = False


def _int32(numbers: Collection[int]) -> np.ndarray:
    """In their order; twice as fast as NumPy's own ways from Python's numbers. Raises OverflowError."""
    try:
        return np.frombuffer(struct.pack(f"{len(numbers)}i", *numbers), np.int32)
    except struct.error:
        raise OverflowError("a token id or a logical index is no 32-bit number") from None
