"""How many pages a history needs at its fullest moment (DESIGN A7)."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from akv_jax.cache.base import KVCache
from akv_jax.config import RepositionMode
from akv_jax.planning.restore import compute_set
from akv_jax.planning.visibility import NEVER, Timeline


class Demand:
    """Pages that a request needs at one moment before its next sampled token (DESIGN A7).

    Working that out is slow beside all other planning, so it is done once somebody has to know: a pool is mostly larger
    than any bound. It is of the history as it stands; once that has gone on, another one is made.
    """

    def __init__(
        self, timeline: Timeline, mode: RepositionMode, window: int | None = None, logits_at: tuple[int, ...] = ()
    ) -> None:
        """As `Sequence` has them."""
        self._timeline, self._window, self._logits_at = timeline, window, logits_at
        self._mode: RepositionMode = mode
        self._used: np.ndarray | None = None
        self._peak: int | None = None
        #: The peak beside others' leases, and the cache's `lease_changes` when it was worked out.
        self._beside = (-1, 0)

    @property
    def peak(self) -> int:
        """The number itself, computed from nothing."""
        if self._peak is None:
            self._peak = peak_pages(self._timeline, self._computed(), self._mode)
        return self._peak

    def exceeds(self, pages: int) -> bool:
        return most_pages(self._timeline, self._mode) > pages and self.peak > pages

    def fits(self, room: int, cache: KVCache, salt: str) -> bool:
        """Whether `room` is enough beside what others lease of the same history, which it then leases too."""
        if not self.exceeds(room):
            return True
        if self._beside[0] != cache.lease_changes:
            others = cache.leased_births(self._timeline, salt)
            self._beside = cache.lease_changes, peak_pages(self._timeline, self._computed(), self._mode, others)
        return self._beside[1] <= room

    def _computed(self) -> np.ndarray:
        """Bool [T]: the tokens that are computed where nothing is at hand."""
        if self._used is None:
            nothing = np.zeros(self._timeline.count, bool)
            wanted = np.array([*self._logits_at, self._timeline.count - 1])
            self._used = nothing.copy()
            self._used[compute_set(self._timeline, nothing, wanted, self._window)] = True
        return self._used


def most_pages(timeline: Timeline, mode: RepositionMode) -> int:
    """No less than `peak_pages`, known at once. In copy mode a token has one copy, and the one that replaces it."""
    return timeline.count * (3 if mode == "copy" else 1)


def peak_pages(timeline: Timeline, used: np.ndarray, mode: RepositionMode, others: np.ndarray | None = None) -> int:
    """Most pages that the history needs at one moment, when every pass is split at boundaries (DESIGN A7).

    used, others: bool [T], the tokens that are computed or resident, and those whose birth version takes no page of the
    request's, as somebody else has it.
    """
    epochs, own = timeline.epochs(), used if others is None else used & ~others
    born = np.bincount(epochs[own], minlength=timeline.num_epochs + 1)
    ends = timeline.dropped[: timeline.count][own]
    gone = np.bincount(ends[ends != NEVER], minlength=timeline.num_epochs + 1)
    alive = np.cumsum(born - gone)
    peak = int(alive.max(initial=0))
    if mode == "copy":
        peak = max(peak, _copy_peak(timeline, used, own, epochs, alive))
    return peak


def _copy_peak(timeline: Timeline, used: np.ndarray, own: np.ndarray, epochs: np.ndarray, alive: np.ndarray) -> int:
    """The same with turned copies: made for an epoch's first query, while those that they replace are still there."""
    peak, turn, at = 0, -1, np.full(timeline.count, -1, np.int32)
    copied = np.zeros(0, np.int32)
    # Whether or not the last epoch has a query yet, generated tokens will be in it.
    for epoch in sorted({*epochs[used].tolist(), timeline.num_epochs - 1}):
        made, turn = turn, bisect_right(timeline.repositions, epoch)
        if turn != made:
            first = np.flatnonzero(used & (epochs == epoch))[:1]
            view = timeline.view(epoch, int(first[0]) + 1 if len(first) else None)
            there = used[view.indices]
            indices, positions, shifts = view.indices[there], view.positions[there], view.shifts[there]
            old = at[indices] >= 0
            new = (shifts != 0) & (at[indices] != positions)
            peak = max(peak, int(own[indices].sum()) + int(old.sum()) + int(new.sum()))
            at[indices[new]] = positions[new]
            copied = indices[old | new]
        # Until the next reposition copies only go, with what is dropped.
        copied = copied[timeline.dropped[copied] > epoch]
        peak = max(peak, int(alive[epoch]) + len(copied))
    return peak
