"""What became of each prompt token (DESIGN A6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from akv_jax.planning.versions import Places
from akv_jax.planning.visibility import NEVER, Timeline


class TokenKinds(NamedTuple):
    """How many tokens of the prompt come under each kind; the four sum to all of them."""

    computed: int
    drop_skipped: int
    repos: int
    cached: int


def num_segments(timeline: Timeline, computed: np.ndarray) -> int:
    """How many views the queries of these logical indices have (DESIGN R1)."""
    return len(np.unique(np.searchsorted(timeline.starts, computed, side="right")))


def classify(
    timeline: Timeline, computed: np.ndarray, window: int | None, made: Sequence[Places] | None = None
) -> TokenKinds:
    """Each token counts under the first that applies: computed, dropped and never read, read rotated, the rest.

    Args:
        computed: logical indices that are queries of the request before its first output token, ascending.
        window: the widest view of any layer, None if one reads everything.
        made: in copy mode, what the request made copies for: reading one is a rotation, reading a version that was
            there is none. None if keys are rotated as they are read, wherever there is a shift.
    """
    copies = np.concatenate([np.zeros(0, np.int64), *(_key(*places) for places in made or ())])
    count = timeline.count
    queried, read, shifted = np.zeros(count, bool), np.zeros(count, bool), np.zeros(count, bool)
    queried[computed] = True
    epochs = np.searchsorted(timeline.starts, computed, side="right") - 1
    for epoch in np.unique(epochs).tolist():
        queries = computed[epochs == epoch]
        view = timeline.view(epoch, int(queries[-1]) + 1)
        seen = np.ones(len(view.indices), bool)
        if window is not None:
            # An entry is read iff the first query at or after it still has it in its window.
            next_query = queries[np.searchsorted(queries, view.indices)]
            seen = timeline.birth[next_query] - view.positions < window
        read[view.indices[seen]] = True
        turned = view.shifts != 0 if made is None else np.isin(_key(view.indices, view.positions), copies)
        shifted[view.indices[seen & turned]] = True
    skipped = ~queried & (timeline.dropped[:count] != NEVER) & ~read
    repos = ~queried & ~skipped & shifted
    kinds = [int(kind.sum()) for kind in (queried, skipped, repos)]
    return TokenKinds(*kinds, cached=count - sum(kinds))


def _key(indices: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number for an entry and a position."""
    return indices.astype(np.int64) << 32 | positions
