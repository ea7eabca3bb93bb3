"""What the scheduler asks of a cache. `naive.py` is the smallest thing that answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from akv_jax.planning.visibility import Timeline


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What is resident of one history (DESIGN C3), leased to the caller until `KVCache.release`.

    pages: int32 [T], the page holding each token's K and V, or -1 where it is missing.
    encoded: int32 [T], the position its K is rotated to.
    receipt: identifies the lease.
    known: how many leading tokens of the history the cache remembers, resident or not.
    """

    pages: np.ndarray
    encoded: np.ndarray
    receipt: int
    known: int = 0


class KVCache(Protocol):
    """Keeps K and V between requests under the meaning of their history."""

    def match(self, timeline: Timeline, salt: str) -> MatchResult:
        """Find and lease every entry of the history that is resident."""
        ...

    def release(self, match: MatchResult, timeline: Timeline, pages: np.ndarray | None = None) -> None:
        """End the lease on `pages`, or on all that are left of it; the latter exactly once for each match.

        `timeline` is the history as it stands, by which dropped pages are evicted first (DESIGN C5).
        """
        ...

    def keep(self, timeline: Timeline, salt: str, pages: np.ndarray) -> np.ndarray:
        """Offer private birth pages that their request gives up, int32 [T] by logical index (-1: none).

        Returns those pages that the cache does not take over; the caller frees them.
        """
        ...

    def evictable(self) -> int:
        """How many pages `evict` could free."""
        ...

    def evict(self, count: int) -> int:
        """Free `count` unleased pages, or as many as there are; returns how many were freed."""
        ...

    def flush(self) -> int:
        """Free every unleased page (DESIGN A8); returns how many."""
        ...

    def cached_pages(self) -> list[np.ndarray]:
        """Every page that a version owns, for the accounting check (DESIGN C7)."""
        ...

    def leased(self) -> int:
        """How many of the cached pages are leased."""
        ...

    def check(self) -> None:
        """PageError if the cache's own books are wrong."""
        ...
