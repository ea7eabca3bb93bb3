"""The cache that keeps nothing (DESIGN A4: what any other must agree with)."""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.cache.naive import NaiveCache
from akv_jax.planning.visibility import Timeline
from spec.operations import Append


def test_nothing_is_ever_resident() -> None:
    cache, timeline = NaiveCache(), Timeline((Append((1, 2, 3)),))
    match = cache.match(timeline, "")
    assert match.pages.tolist() == [-1, -1, -1]
    assert match.encoded.tolist() == [0, 1, 2]
    assert cache.leased() == 0 and cache.cached_pages() == [] and cache.evict(5) == 0 and cache.flush() == 0


def test_every_page_offered_comes_back() -> None:
    timeline = Timeline((Append((1, 2, 3)),))
    assert NaiveCache().keep(timeline, "", np.array([7, -1, 4], np.int32)).tolist() == [7, 4]


def test_a_match_is_released_once() -> None:
    """C4: releasing replays the receipt."""
    cache, timeline = NaiveCache(), Timeline((Append((1,)),))
    one, other = cache.match(timeline, ""), cache.match(timeline, "")
    cache.release(one, timeline)
    with pytest.raises(KeyError):
        cache.release(one, timeline)
    cache.release(other, timeline)
