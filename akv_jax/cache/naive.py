"""A cache that keeps nothing: every request is computed from its history alone.

It is the meaning that any other cache must agree with (DESIGN A4), and their double in tests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from akv_jax.cache.base import CacheStats, MatchResult
from akv_jax.planning.visibility import Timeline, View


class NaiveCache:
    """See `base.KVCache`."""

    def __init__(self) -> None:
        self.stats = CacheStats()
        self.lease_changes = 0
        self._receipts = itertools.count()
        self._open: set[int] = set()

    def match(self, timeline: Timeline, salt: str, looked_at: int | None = None) -> MatchResult:
        receipt = next(self._receipts)
        self._open.add(receipt)
        return MatchResult(np.full(timeline.count, -1, np.int32), timeline.birth[: timeline.count].copy(), receipt)

    def leased_births(self, timeline: Timeline, salt: str) -> np.ndarray:
        return np.zeros(timeline.count, bool)

    def release(self, match: MatchResult, timeline: Timeline, pages: np.ndarray | None = None) -> None:
        if pages is None:
            self._open.remove(match.receipt)

    def lease_versions(
        self, match: MatchResult, timeline: Timeline, salt: str, views: Sequence[View]
    ) -> list[np.ndarray]:
        return [np.full(len(view.indices), -1, np.int32) for view in views]

    def keep(
        self,
        timeline: Timeline,
        salt: str,
        pages: np.ndarray,
        positions: np.ndarray | None = None,
        match: MatchResult | None = None,
    ) -> np.ndarray:
        return pages[pages >= 0]

    def evictable(self) -> int:
        return 0

    def evict(self, count: int) -> int:
        return 0

    def flush(self) -> int:
        return 0

    def cached_pages(self) -> list[np.ndarray]:
        return []

    def leased(self) -> int:
        return 0

    def check(self) -> None:
        pass
