"""How many pages a history needs at its fullest moment (DESIGN A7)."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from akv_jax.config import RepositionMode
from akv_jax.planning.visibility import NEVER, Timeline


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
