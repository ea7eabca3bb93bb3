"""The pages of the KV pool and who has each of them (DESIGN C7)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

#: The page that padding writes to (DESIGN C7). Kernels may read it in place of what is not there: it stays finite.
SCRATCH_PAGE = 0


class PageState(IntEnum):
    """Exactly one holds of every page at any time."""

    SCRATCH = 0
    FREE = 1
    #: Owned by one version in the cache.
    CACHED = 2
    #: Private to one running request.
    PRIVATE = 3


@dataclass(frozen=True, slots=True)
class PageCounts:
    free: int
    cached: int
    private: int


class PageError(RuntimeError):
    """The accounting is wrong: a bug, never the client's doing."""


class PagePool:
    """Hands out page numbers 1..num_pages; page 0 is the scratch page that padding writes to."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._state = np.full(num_pages + 1, PageState.FREE, np.uint8)
        self._state[SCRATCH_PAGE] = PageState.SCRATCH
        # A stack: the lowest page comes out first, so a small load stays in few memory pages.
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int32)
        self.num_free = num_pages
        # Only for `free`, by page: its place in the list of pages that is being freed.
        self._place = np.zeros(num_pages + 1, np.int32)

    def allocate(self, count: int) -> np.ndarray:
        """`count` free pages, now private: int32 [count]. PageError if there are not as many."""
        if count > self.num_free:
            raise PageError(f"{count} pages asked for, {self.num_free} free")
        self.num_free -= count
        pages = self._stack[self.num_free : self.num_free + count].copy()
        self._state[pages] = PageState.PRIVATE
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Give pages back. PageError if one of them is not in use or named twice."""
        if len(pages) == 0:
            return
        states = self._state[pages]
        # Of a page that is named twice, only the last place is found again.
        places = np.arange(len(pages), dtype=np.int32)
        self._place[pages] = places
        if (states < PageState.CACHED).any() or (self._place[pages] != places).any():
            raise PageError("a page was freed twice, or was never in use")
        self._state[pages] = PageState.FREE
        self._stack[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def to_cached(self, pages: np.ndarray) -> None:
        """Private pages become a version's. PageError if one of them is not private."""
        if (self._state[pages] != PageState.PRIVATE).any():
            raise PageError("only a private page can be given to the cache")
        self._state[pages] = PageState.CACHED

    def counts(self) -> PageCounts:
        """How many pages are in each state."""
        totals = np.bincount(self._state, minlength=4)
        return PageCounts(int(totals[PageState.FREE]), int(totals[PageState.CACHED]), int(totals[PageState.PRIVATE]))

    def check(self, private: list[np.ndarray], cached: list[np.ndarray]) -> None:
        """C7: the pages that running requests and versions name are exactly those in use, each named once."""
        for name, groups, state in (("private", private, PageState.PRIVATE), ("cached", cached, PageState.CACHED)):
            named = np.sort(np.concatenate([np.zeros(0, np.int32), *groups]))
            expected = np.flatnonzero(self._state == state)
            if not np.array_equal(named, expected):
                raise PageError(
                    f"{name} pages: {len(named)} named, {len(expected)} in that state, or not the same ones"
                )
        free = np.sort(self._stack[: self.num_free])
        if not np.array_equal(free, np.flatnonzero(self._state == PageState.FREE)):
            raise PageError("the free list and the page states disagree")
