"""Work beside the host's thread: what an engine with several devices starts, and is told when it has ended.

A *lane* does one thing after another, in the order in which they were started; lanes do not wait for each other. What
takes time is in a lane, so the host waits for nothing but for whatever ends first (DESIGN R5, R6).
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Lanes(Protocol):
    """Threads, or a simulation of them."""

    @property
    def pending(self) -> int:
        """How many things have been started and are not told to have ended."""
        ...

    def start(self, lane: str, work: Callable[[], T], then: Callable[[Callable[[], T]], None]) -> None:
        """Do `work` in that lane. When it has ended `wait` calls `then` with what returns its result, or raises."""
        ...

    def wait(self) -> None:
        """Wait until something has ended, and call its `then`, and those of whatever else has ended by now."""
        ...


class ThreadLanes:
    """See `Lanes`: a thread a lane."""

    def __init__(self) -> None:
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._ended: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.pending = 0

    def start(self, lane: str, work: Callable[[], T], then: Callable[[Callable[[], T]], None]) -> None:
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(max_workers=1, thread_name_prefix=lane)

        def ended(future: Future[T]) -> None:
            self._ended.put(lambda: then(future.result))

        self.pending += 1
        self._threads[lane].submit(work).add_done_callback(ended)

    def wait(self) -> None:
        # One at a time: should one of them raise, the others are still to come.
        then = self._ended.get()
        while True:
            self.pending -= 1
            then()
            if self._ended.empty():
                return
            then = self._ended.get()
