"""Pages that nobody leases, in the order in which they are evicted (DESIGN C5).

Pages become idle in batches, each later than the ones before it: a queue a class is in order by itself. A page that is
leased again, or becomes idle once more, leaves a stale entry behind, which is passed over when it comes up. So both
putting and taking cost a constant time a page, however large the pool is.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from akv_jax.config import EvictionPolicy


class EvictionClass(IntEnum):
    """What a page is to its last user, in the order of eviction.

    LEFT: dropped, or superseded: in the end the entry is elsewhere. FINISHED: read to the end. DERIVED: a version at
    another position than at birth.
    """

    LEFT_DERIVED = 0
    LEFT_BIRTH = 1
    FINISHED_DERIVED = 2
    FINISHED_BIRTH = 3


class _Batch(NamedTuple):
    """Pages that became idle together; the last of them goes first."""

    time: int
    pages: np.ndarray


#: Stale entries that are not worth clearing away, and the least that are looked at in one go.
_CLUTTER, _SLICE = 4096, 256


class EvictionQueue:
    """The idle pages. `len` is how many there are."""

    def __init__(self, num_pages: int, policy: EvictionPolicy = "drop_aware") -> None:
        """`policy`: lru goes by recency alone."""
        self._policy = policy
        self._queues: list[deque[_Batch]] = [deque() for _ in EvictionClass]
        #: By page: when it became idle, 0 while it is not; and its class then.
        self._time = np.zeros(num_pages + 1, np.int64)
        self._class = np.zeros(num_pages + 1, np.uint8)
        self._now = self._idle = self._entries = 0

    def __len__(self) -> int:
        return self._idle

    def put(self, pages: np.ndarray, classes: np.ndarray) -> None:
        """These pages, each once, became idle just now; of one class, the last goes first."""
        if len(pages) == 0:
            return
        self._now += 1
        self._idle += len(pages) - int(np.count_nonzero(self._time[pages]))
        self._time[pages], self._class[pages] = self._now, classes
        self._entries += len(pages)
        if self._policy == "lru":
            self._queues[0].append(_Batch(self._now, pages.copy()))
        else:
            for number in np.flatnonzero(np.bincount(classes)).tolist():
                self._queues[number].append(_Batch(self._now, pages[classes == number]))
        if self._entries > 2 * self._idle + _CLUTTER:
            self._tidy()

    def withdraw(self, pages: np.ndarray) -> None:
        """These pages, each once, are leased, or gone; some may not have been idle."""
        self._idle -= int(np.count_nonzero(self._time[pages]))
        self._time[pages] = 0

    def take(self, count: int) -> np.ndarray:
        """Withdraw the next `count` pages, or as many as there are: int32."""
        taken = [np.zeros(0, np.int32)]
        for queue in self._queues:
            while queue and count > 0:
                time, pages = queue[0]
                start = max(0, len(pages) - max(count, _SLICE))
                valid = start + np.flatnonzero(self._time[pages[start:]] == time)
                stop = start
                if len(valid) > count:
                    stop = int(valid[-count])
                    valid = valid[-count:]
                taken.append(pages[valid])
                count -= len(valid)
                self._entries -= len(pages) - stop
                queue[0] = _Batch(time, pages[:stop])
                if stop == 0:
                    queue.popleft()
        pages = np.concatenate(taken)
        self.withdraw(pages)
        return pages

    def order(self) -> np.ndarray:
        """Every idle page, the next to be taken first: int32."""
        batches = (pages[self._time[pages] == time][::-1] for queue in self._queues for time, pages in queue)
        return np.concatenate([np.zeros(0, np.int32), *batches])

    def idle(self, pages: np.ndarray) -> np.ndarray:
        """Which of these are idle: bool."""
        return self._time[pages] > 0

    def classes(self, pages: np.ndarray) -> np.ndarray:
        """The class that each had when it last became idle: uint8."""
        return self._class[pages]

    def _tidy(self) -> None:
        """Clear the stale entries away: as many as were put since the last time, so it costs each of them once."""
        self._entries = 0
        for number, queue in enumerate(self._queues):
            current = ((time, pages[self._time[pages] == time]) for time, pages in queue)
            self._queues[number] = deque(_Batch(time, pages) for time, pages in current if len(pages))
            self._entries += sum(len(pages) for _, pages in self._queues[number])
