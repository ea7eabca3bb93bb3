"""The order of eviction (DESIGN C5) against a list that is sorted each time, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.cache.eviction import EvictionClass, EvictionQueue
from akv_jax.config import EvictionPolicy

POLICIES: tuple[EvictionPolicy, ...] = ("drop_aware", "lru")


class SortedPages:
    """The same by brute force: idle pages with (class, time, place among those put together)."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy, self.time, self.pages = policy, 0, dict[int, tuple[int, int, int]]()

    def put(self, pages: list[int], classes: list[int]) -> None:
        self.time += 1
        for place, (page, number) in enumerate(zip(pages, classes, strict=True)):
            self.pages[page] = (number if self.policy == "drop_aware" else 0, self.time, -place)

    def take(self, count: int) -> set[int]:
        taken = sorted(self.pages, key=lambda page: self.pages[page])[:count]
        for page in taken:
            del self.pages[page]
        return set(taken)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_the_order_is_that_of_sorting(policy: EvictionPolicy, seed: int) -> None:
    """C5: pages come and go in any order; some become idle again without having left."""
    generator = np.random.default_rng(seed)
    size = int(generator.choice([5, 50, 600]))
    queue, right = EvictionQueue(size, policy), SortedPages(policy)
    for _ in range(300):
        pages = generator.permutation(np.arange(1, size + 1))[: generator.integers(1, size + 1)].astype(np.int32)
        event = generator.random()
        if event < 0.5:
            classes = generator.integers(len(EvictionClass), size=len(pages)).astype(np.uint8)
            queue.put(pages, classes)
            right.put(pages.tolist(), classes.tolist())
            assert queue.classes(pages).tolist() == classes.tolist()
        elif event < 0.7:
            queue.withdraw(pages)
            for page in pages.tolist():
                right.pages.pop(page, None)
        else:
            count = int(generator.integers(size + 3))
            taken = queue.take(count).tolist()
            assert len(set(taken)) == len(taken) and set(taken) == right.take(count)
        assert len(queue) == len(right.pages)
        assert set(np.flatnonzero(queue.idle(np.arange(size + 1))).tolist()) == right.pages.keys()


def test_stale_entries_do_not_pile_up() -> None:
    """A conversation that goes on for ever leases and releases its pages at every turn."""
    queue, pages = EvictionQueue(100), np.arange(1, 101, dtype=np.int32)
    for _ in range(2000):
        queue.put(pages, np.full(100, EvictionClass.FINISHED_BIRTH, np.uint8))
        queue.withdraw(pages)
        assert sum(len(batch.pages) for waiting in queue._queues for batch in waiting) <= 2 * 100 + 4096 + 100


def test_nothing_is_nothing() -> None:
    queue, nothing = EvictionQueue(3), np.zeros(0, np.int32)
    queue.put(nothing, nothing.astype(np.uint8))
    queue.withdraw(nothing)
    assert len(queue) == 0 and queue.take(5).tolist() == [] and queue.take(0).tolist() == []
