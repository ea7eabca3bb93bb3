"""What must be computed (DESIGN C6): the closure of what is wanted and missing under what its queries read."""

from __future__ import annotations

import numpy as np

from akv_jax.planning.visibility import NEVER, Timeline


def compute_set(timeline: Timeline, resident: np.ndarray, wanted: np.ndarray, window: int | None) -> np.ndarray:
    """Logical indices to compute, ascending.

    Args:
        resident: bool [T]; an entry whose K and V are in the pool in some version.
        wanted: logical indices whose logits are asked for; computed even if resident or dropped.
        window: the widest view of any layer, None if one reads everything.
    """
    total = timeline.count
    missing = ~resident[:total]
    needed = missing & (timeline.dropped[:total] == NEVER)
    needed[wanted] = True
    if window is None:
        _close(timeline, missing, needed)
    else:
        _close_windowed(timeline, missing, needed, window)
    return np.flatnonzero(needed).astype(np.int32)


def first_query(timeline: Timeline, missing: np.ndarray, looked_at: int) -> int:
    """The first query that is computed where logits of `looked_at`, a logical index, and perhaps of later ones count.

    missing: bool [T]. Every layer is taken to read everything.
    """
    dropped, first = timeline.dropped[: timeline.count], looked_at
    needed = missing & (dropped == NEVER)
    first = min(first, int(needed.argmax())) if needed.any() else first
    # What a query reads is computed before it: from epoch to epoch backwards, the first one to compute is any that has
    # something missing which was still active in the first so far.
    bounds = np.array([*timeline.starts, timeline.count])
    epochs = np.flatnonzero(np.diff(bounds))
    last_active = np.maximum.reduceat(np.where(missing, dropped, -1), bounds[epochs])
    reader = timeline.epoch_of(first)
    for epoch, last in zip(reversed(epochs.tolist()), reversed(last_active.tolist()), strict=True):
        if epoch < reader < last:
            reader = epoch
    own = missing[timeline.starts[reader] : min(timeline.stop(reader), first)]
    return timeline.starts[reader] + int(own.argmax()) if own.any() else first


def _close(timeline: Timeline, missing: np.ndarray, needed: np.ndarray) -> None:
    """Newest epoch first. An entry is read by a later epoch iff it is still active in the next one that computes."""
    next_epoch = timeline.num_epochs
    first = first_query(timeline, missing, int(needed.argmax()))
    for epoch in range(timeline.num_epochs - 1, -1, -1):
        own = slice(timeline.starts[epoch], timeline.stop(epoch))
        if own.stop <= first:
            break
        if own.start == own.stop:
            continue
        if next_epoch < timeline.num_epochs:
            needed[own] |= missing[own] & (timeline.dropped[own] > next_epoch)
        queries = np.flatnonzero(needed[own])
        if len(queries):
            own = slice(own.start, own.start + int(queries[-1]))
            needed[own] |= missing[own]
            next_epoch = epoch


def _close_windowed(timeline: Timeline, missing: np.ndarray, needed: np.ndarray, window: int) -> None:
    """Every layer has a window: what a query reads depends on positions, so each view is looked at."""
    for epoch in range(timeline.num_epochs - 1, -1, -1):
        start = timeline.starts[epoch]
        reader: int | None = None
        for index in range(timeline.stop(epoch) - 1, start - 1, -1):
            # Within an epoch, positions differ as logical indices do.
            needed[index] |= missing[index] and reader is not None and reader - index < window
            if needed[index]:
                reader = index
        if reader is None:
            continue
        # The epoch's first query reads furthest back.
        view = timeline.view(epoch, start)
        seen = view.indices[timeline.birth[reader] - view.positions < window]
        needed[seen] |= missing[seen]
