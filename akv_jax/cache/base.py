"""What the scheduler asks of a cache. `naive.py` is the smallest thing that answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from akv_jax.cache.eviction import EvictionClass
from akv_jax.planning.visibility import Timeline, View


@dataclass(frozen=True, slots=True)
class MatchResult:
    """What is resident of one history (DESIGN C3), leased to the caller until `KVCache.release`.

    pages: int32 [T], a page with each token's K and V, of the birth version where it is resident, else of any other;
        -1 where the token is missing.
    encoded: int32 [T], the position its K is rotated to.
    receipt: identifies the lease.
    known: how many leading tokens of the history the cache remembers, resident or not.
    """

    pages: np.ndarray
    encoded: np.ndarray
    receipt: int
    known: int = 0


@dataclass(slots=True)
class CacheStats:
    """What reuse came to: totals since the start, the last two being of the moment. Plain counts, of tokens or pages.

    The scheduler counts admissions, those of retracted requests again; the cache what happens to its pages.
    """

    #: Tokens of admitted prompts to compute because no version was resident, though the cache remembered them.
    restored: int = 0
    #: Copies made for positions, and those of them made from a version that had been rotated already.
    rotations: int = 0
    hops: int = 0
    #: Pages evicted by `EvictionClass`, and those that went because the memory of paths is bounded.
    evicted: list[int] = field(default_factory=lambda: [0] * len(EvictionClass))
    forgotten: int = 0
    #: Now: remembered tokens without a resident version, and pages of versions at other positions than at birth.
    tombstones: int = 0
    versions: int = 0


class KVCache(Protocol):
    """Keeps K and V between requests under the meaning of their history."""

    stats: CacheStats
    #: Goes up whenever something is leased or a lease ends.
    lease_changes: int

    def match(self, timeline: Timeline, salt: str, looked_at: int | None = None) -> MatchResult:
        """Find and lease one version of every entry of the history that has any and that some query may read.

        looked_at: the first logical index whose logits are asked for, by default the last one. What was dropped before
        that, and before anything is missing, is left out: no query reads it (DESIGN C6).
        """
        ...

    def lease_versions(
        self, match: MatchResult, timeline: Timeline, salt: str, views: Sequence[View]
    ) -> list[np.ndarray]:
        """The versions that have the entries of these views just where they are (DESIGN C3's exact match).

        Returns for each view int32 [entries], the page or -1. Those that `match` has not leased yet now are, under the
        same receipt.
        """
        ...

    def leased_births(self, timeline: Timeline, salt: str) -> np.ndarray:
        """Bool [T]: the history's tokens whose birth version somebody leases now. Changes nothing, not even recency."""
        ...

    def release(self, match: MatchResult, timeline: Timeline, pages: np.ndarray | None = None) -> None:
        """End the lease on `pages`, or on all that are left of it; the latter exactly once for each match.

        `timeline` is the history as it stands, by which what is left behind is evicted first (DESIGN C5).
        """
        ...

    def keep(
        self,
        timeline: Timeline,
        salt: str,
        pages: np.ndarray,
        positions: np.ndarray | None = None,
        match: MatchResult | None = None,
    ) -> np.ndarray:
        """Offer private pages, int32 [T] by logical index (-1: none), at birth or copies with K at `positions`.

        What is taken is idle, or with `match` leased under its receipt. Returns those pages that the cache does not
        take over; they stay the caller's. A copy that is back at its birth position is never taken: rounding has
        touched it, and all other versions are rotated from the birth version where there is one.
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
