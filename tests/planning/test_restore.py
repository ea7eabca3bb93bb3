"""What is computed: exactly the closure of the specification (DESIGN C6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import EvictionPolicy, RepositionMode
from akv_jax.planning.restore import compute_set
from akv_jax.planning.sequence import Sequence
from akv_jax.planning.visibility import Timeline, View
from spec.operations import Append, Drop, History
from spec.strategies import histories
from spec.visibility import closure
from tests.random_histories import random_history
from tests.watched_engine import Content, names_of

checked = settings(max_examples=120, deadline=None)
#: Windows of a model's layers; None among them reads everything.
layers = st.one_of(st.just((None,)), st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple))


def widest(windows: tuple[int | None, ...]) -> int | None:
    return None if None in windows else max(w for w in windows if w is not None)


def computed(history: History, resident: set[int], wanted: set[int], windows: tuple[int | None, ...]) -> list[int]:
    timeline = Timeline(history)
    there = np.isin(np.arange(timeline.count), sorted(resident))
    return compute_set(timeline, there, np.array(sorted(wanted), np.int32), widest(windows)).tolist()


@checked
@given(st.data(), histories(max_operations=10), layers)
def test_exactly_what_the_specification_computes(
    data: st.DataObject, history: History, windows: tuple[int | None, ...]
) -> None:
    """C6: to the token, whatever is resident, whatever is asked for, and with windows everywhere."""
    count = Timeline(history).count
    indices = st.integers(0, count - 1)
    resident = data.draw(st.sets(indices), label="resident")
    wanted = data.draw(st.sets(indices, max_size=3), label="wanted") | {count - 1}
    found = computed(history, resident, wanted, windows)
    assert found == sorted(closure(history, resident, wanted, windows))


def test_what_is_dropped_before_anything_reads_it_is_not_computed() -> None:
    """C6: the last two are all that a request for its last token needs."""
    history = (Append((1,) * 8), Drop(frozenset(range(8))), Append((2, 3)))
    assert computed(history, set(), {9}, (None,)) == [8, 9]


def test_a_dropped_token_comes_back_for_one_missing_reader() -> None:
    """C6: token 2 read tokens 0 and 1; losing it alone means computing it and what it read."""
    history = (Append((1, 2, 3)), Drop(frozenset({0})), Append((4,)))
    assert computed(history, {1, 3}, {3}, (None,)) == [0, 2, 3]
    assert computed(history, {0, 1, 3}, {3}, (None,)) == [2, 3]


def test_a_window_spares_what_no_query_sees() -> None:
    """C6, L6: tokens 4 and 5 are all that token 6 reads, so what was before them is not needed."""
    history = (Append((1,) * 10), Drop(frozenset(range(8))), Append((2,)))
    assert computed(history, {4, 5}, {10}, (3,)) == [6, 7, 8, 9, 10]
    assert computed(history, {4, 5}, {10}, (3, None)) == [0, 1, 2, 3, 6, 7, 8, 9, 10]


class Ledger:
    """What every page of a cache holds, written down where it is offered and by the meaning of its entry: what is
    resident is then known without a look into the tree."""

    def __init__(self, cache: RadixCache, pool: PagePool) -> None:
        self.cache, self._pool = cache, pool
        self._held: dict[int, Content] = {}

    def offer(self, history: History, indices: np.ndarray, view: View | None = None) -> None:
        """Keep the entries of these logical indices as computed, or turned to where they are in `view`."""
        timeline, names = Timeline(history), names_of(history, "")
        if len(indices) > self._pool.num_free:
            return
        pages, positions = np.full(timeline.count, -1, np.int32), timeline.birth[: timeline.count].copy()
        pages[indices] = self._pool.allocate(len(indices))
        if view is not None:
            positions[view.indices] = view.positions
        refused = self.cache.keep(timeline, "", pages, None if view is None else positions)
        self._pool.free(refused)
        for index in np.flatnonzero((pages >= 0) & ~np.isin(pages, refused)).tolist():
            self._held[int(pages[index])] = Content(names[index], int(positions[index]))

    def holds(self) -> dict[int, Content]:
        """By page, of those that the cache still has."""
        return {page: self._held[page] for pages in self.cache.cached_pages() for page in pages.tolist()}


def random_tree(generator: np.random.Generator, mode: RepositionMode) -> tuple[Ledger, list[History]]:
    """Conversations that branch, with holes: some entries are never kept, some are evicted; and in copy mode some are
    there at birth, some turned, some in both ways."""
    pool = PagePool(600)
    # By recency alone, turned versions are not the first to go.
    eviction: EvictionPolicy = "drop_aware" if generator.random() < 0.3 else "lru"
    ledger = Ledger(RadixCache(pool, reposition=mode, eviction=eviction), pool)
    told: list[History] = [()]
    for _ in range(int(generator.integers(1, 4))):
        told.append((*told[int(generator.integers(len(told)))], *random_history(generator, 12, 6, vocab_size=3)))
        timeline = Timeline(told[-1])
        kept = generator.random(timeline.count) < generator.choice([0.2, 0.6, 1.0])
        ledger.offer(told[-1], np.flatnonzero(kept))
        if mode == "copy":
            # The later, the further from birth.
            view = timeline.view(int(generator.integers(timeline.num_epochs // 2, timeline.num_epochs)))
            turned = generator.random(len(view.indices)) < 0.8
            ledger.offer(told[-1], view.indices[turned], view)
    if generator.random() < 0.6:
        ledger.cache.evict(int(generator.integers(1 + ledger.cache.evictable())))
    return ledger, told


@pytest.mark.parametrize("mode", ["on_read", "copy"])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 50))])
def test_minimality_on_random_trees_with_random_holes(seed: int, mode: RepositionMode) -> None:
    """C2, C3, C6: a hundred trees each, and what one more request computes: the specification's closure of just what is
    resident, by token, no more and no less. A match overlooks nothing that is read, and finds nothing that is not."""
    generator = np.random.default_rng(seed)
    turned_alone = 0
    for _ in range(100):
        ledger, told = random_tree(generator, mode)
        history = (*told[int(generator.integers(len(told)))], *random_history(generator, 4, 4, vocab_size=3))
        windows = [(None,), (None,), (None, 3), (4, 2)][int(generator.integers(4))]
        timeline, names, held = Timeline(history), names_of(history, ""), ledger.holds()
        there = {content.name for content in held.values()}
        resident = {index for index, name in enumerate(names) if name in there}
        match = ledger.cache.match(timeline, "")
        for index in np.flatnonzero(match.pages >= 0).tolist():
            assert held[int(match.pages[index])] == Content(names[index], int(match.encoded[index]))
            turned_alone += int(match.encoded[index] != timeline.birth[index])
        sequence = Sequence(timeline, match, window=widest(windows), mode=mode)
        assert sequence.compute.tolist() == sorted(closure(history, resident, None, windows))
    # That many entries were there in a turned version only.
    assert turned_alone > 10 if mode == "copy" else turned_alone == 0
