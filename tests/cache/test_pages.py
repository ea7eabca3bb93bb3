"""The accounting of pages (DESIGN C7): every mistake that a caller could make is found."""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.cache.pages import PageError, PagePool


def test_pages_are_handed_out_once_and_never_the_scratch_page() -> None:
    pool = PagePool(10)
    first, second = pool.allocate(4), pool.allocate(6)
    assert sorted([*first, *second]) == list(range(1, 11))
    assert pool.num_free == 0
    pool.check([first, second], [])


def test_an_empty_pool_refuses_and_stays_as_it_was() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    with pytest.raises(PageError, match="2 pages asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check([pages], [])


def test_counts_add_up() -> None:
    pool = PagePool(7)
    pages = pool.allocate(5)
    pool.free(pages[:2])
    counts = pool.counts()
    assert (counts.free, counts.cached, counts.private) == (4, 0, 3)


def test_allocating_nothing_and_freeing_nothing() -> None:
    pool = PagePool(1)
    pool.free(pool.allocate(0))
    assert pool.num_free == 1
    pool.check([], [])


@pytest.mark.parametrize(
    "pages",
    [[1, 1], [3], [0], [1, 2, 3]],
    ids=["twice at once", "never allocated", "the scratch page", "one of them free"],
)
def test_freeing_what_is_not_in_use_is_an_error(pages: list[int]) -> None:
    pool = PagePool(5)
    held = pool.allocate(2)
    with pytest.raises(PageError, match="freed twice"):
        pool.free(np.array(pages, np.int32))
    pool.check([held], [])


def test_freeing_twice_is_an_error() -> None:
    pool = PagePool(5)
    pages = pool.allocate(2)
    pool.free(pages)
    with pytest.raises(PageError, match="freed twice"):
        pool.free(pages)
    assert pool.num_free == 5


@pytest.mark.parametrize("what", ["forgotten", "overlap", "foreign", "cached"])
def test_the_check_finds_every_wrong_claim(what: str) -> None:
    """C7: each page in use is named once, by whoever has it."""
    pool = PagePool(6)
    one, other = pool.allocate(2), pool.allocate(2)
    pool.check([one, other], [])
    free = np.setdiff1d(np.arange(1, 7), [*one, *other])[:1]
    private, cached = {
        "forgotten": ([one], []),
        "overlap": ([one, other, one[:1]], []),
        "foreign": ([one, other, free], []),
        "cached": ([one], [other]),
    }[what]
    with pytest.raises(PageError):
        pool.check(private, cached)


def test_random_use_keeps_the_books() -> None:
    """C7: after every one of a thousand allocations and releases in any order."""
    generator, pool = np.random.default_rng(0), PagePool(40)
    held: list[np.ndarray] = []
    for _ in range(1000):
        if held and generator.random() < 0.5:
            pool.free(held.pop(int(generator.integers(len(held)))))
        elif pool.num_free:
            held.append(pool.allocate(int(generator.integers(1, pool.num_free + 1))))
        pool.check(held, [])
        assert pool.num_free == 40 - sum(map(len, held))
        assert len({*np.concatenate([[0], *held]).tolist()}) == 1 + sum(map(len, held))
