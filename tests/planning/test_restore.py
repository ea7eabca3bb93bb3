"""What is computed: exactly the closure of the specification (DESIGN C6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.planning.restore import compute_set
from akv_jax.planning.sequence import Sequence
from akv_jax.planning.visibility import Timeline
from spec.operations import Append, Drop, History
from spec.strategies import histories
from spec.visibility import closure
from tests.random_histories import random_history

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


@pytest.mark.parametrize("tree", range(10))
def test_minimality_on_random_trees_with_random_holes(tree: int) -> None:
    """C6: a hundred times each: a tree of conversations that branch, with pages evicted at random, and what one more
    request computes: the specification's closure of just what is resident, by token, no more and no less."""
    generator = np.random.default_rng(tree)
    for _ in range(100):
        pool = PagePool(300)
        cache = RadixCache(pool, reposition="copy")
        told: list[History] = [()]
        for _ in range(int(generator.integers(1, 4))):
            history = (*told[int(generator.integers(len(told)))], *random_history(generator, 6, 6, vocab_size=3))
            told.append(history)
            timeline = Timeline(history)
            if timeline.count < pool.num_free:
                pool.free(cache.keep(timeline, "", pool.allocate(timeline.count)))
        cache.evict(int(generator.integers(1 + cache.evictable())))
        history = (*told[int(generator.integers(len(told)))], *random_history(generator, 4, 4, vocab_size=3))
        windows = [(None,), (None,), (None, 3), (4, 2)][int(generator.integers(4))]
        timeline = Timeline(history)
        match = cache.match(timeline, "")
        sequence = Sequence(timeline, match, window=widest(windows), mode="copy")
        resident = np.flatnonzero(match.pages >= 0).tolist()
        assert sequence.compute.tolist() == sorted(closure(history, resident, None, windows))
