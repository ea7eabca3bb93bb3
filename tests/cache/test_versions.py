"""Position versions (DESIGN C2, C3, C5) under the scheduler on a symbolic device, `--reposition copy`."""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.cache.eviction import EvictionClass
from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import EngineConfig, EvictionPolicy
from akv_jax.planning.visibility import Timeline
from akv_jax.scheduler import Scheduler
from spec.operations import Append, Drop, History, Reposition
from tests.cache.test_radix_tree import SharingSimulation
from tests.test_scheduler import Client

#: Four tokens survive a drop of three and move from 3..6 to 0..3; five more are appended at 4..8.
MOVED: History = (Append(tuple(range(7))), Drop(frozenset(range(3))), Reposition(), Append((7, 8, 9, 10, 11)))
TO_FOLLOW = Append((12, 13))


def served(simulation: SharingSimulation, history: History, outputs: int = 1) -> Client:
    """Serve one request alone, to its end."""
    client = simulation.submit(history, outputs)
    while simulation.live:
        simulation.step()
    return client


def copying(**config) -> SharingSimulation:
    return SharingSimulation(reposition="copy", **config)


def test_an_exact_match_makes_no_move() -> None:
    """C3: the second request reads the first one's copies, and takes no page for them."""
    simulation = copying()
    served(simulation, MOVED)
    stats = simulation.cache.stats
    assert (stats.rotations, stats.hops, stats.versions) == (4, 0, 4)
    served(simulation, (*MOVED, TO_FOLLOW))
    assert (stats.rotations, stats.versions) == (4, 4)
    simulation.drain()


def test_a_compatible_match_is_rotated_from_birth() -> None:
    """C3: another place, and the birth version is there: one rotation, no hop."""
    simulation = copying()
    served(simulation, MOVED)
    further = (*MOVED, Drop(frozenset({3})), Reposition(), TO_FOLLOW)
    served(simulation, further)
    stats = simulation.cache.stats
    assert stats.rotations == 4 + 8 and stats.hops == 0
    simulation.drain()


def test_a_compatible_match_from_a_derived_version_is_a_hop() -> None:
    """C3: where the birth version is gone, any other will do; it is counted."""
    simulation = copying()
    served(simulation, MOVED)
    # Births of three dropped tokens and of four that have moved.
    assert simulation.cache.evict(7) == 7
    assert simulation.cache.stats.evicted[EvictionClass.LEFT_BIRTH] == 7
    served(simulation, (*MOVED, Drop(frozenset({3})), Reposition(), TO_FOLLOW))
    stats = simulation.cache.stats
    assert stats.rotations == 4 + 8 and stats.hops == 3
    assert simulation.computed["request 1"] == 2
    simulation.drain()


def test_a_version_back_at_its_birth_position_is_not_a_birth_version() -> None:
    """C3: a request that never repositioned finds only what was moved: turned back, counted, and not kept."""
    simulation = copying()
    served(simulation, MOVED)
    simulation.cache.evict(7)
    client = served(simulation, (Append(tuple(range(7))), Append((20,))))
    stats = simulation.cache.stats
    # Tokens 0 to 2 and the new one are computed, 3 to 6 are turned back.
    assert simulation.computed[client.job.job_id] == 4 and stats.hops == 4
    births = simulation.cache.match(timeline := Timeline((Append(tuple(range(7))),)), "")
    assert (births.encoded == timeline.birth[:7]).tolist() == [True] * 3 + [False] * 4
    simulation.cache.release(births, timeline)
    simulation.drain()


def test_two_requests_read_one_version() -> None:
    """C2, C4: at the same time, and each lets go of it by itself."""
    simulation = copying()
    served(simulation, MOVED)
    one = simulation.submit((*MOVED, Append((20,))), outputs=3)
    other = simulation.submit((*MOVED, Append((21,))), outputs=6)
    simulation.step()
    lists = [client.job.sequence._decode_list for client in (one, other)]  # type: ignore[union-attr]
    pages = [set(listed._columns[0, : listed.length].tolist()) for listed in lists]  # type: ignore[union-attr]
    assert len(pages[0] & pages[1]) == 9
    # Births that have moved and dropped ones are in nobody's way, neither is what was generated.
    assert simulation.cache.leased() == 9 + 2
    while one.end is None:
        simulation.step()
    assert simulation.cache.leased() == 9 + 1
    simulation.drain()


def test_a_version_is_evicted_by_itself() -> None:
    """C2, C5: what a later turn has moved away from goes first, and nothing else has to be computed or rotated."""
    simulation = copying()
    served(simulation, MOVED)
    further = (*MOVED, Drop(frozenset({3})), Reposition(), TO_FOLLOW)
    served(simulation, further)
    cache = simulation.cache
    assert cache.stats.versions == 4 + 8
    assert cache.evict(4) == 4
    assert cache.stats.evicted[EvictionClass.LEFT_DERIVED] == 4 and cache.stats.versions == 8
    assert cache.stats.tombstones == 0
    rotations = cache.stats.rotations
    client = served(simulation, (*further, Append((30,))))
    assert cache.stats.rotations == rotations and simulation.computed[client.job.job_id] == 1
    # One that branches off before the second reposition has the first one's positions made anew.
    served(simulation, (*MOVED, Append((31,))))
    assert cache.stats.rotations == rotations + 4
    simulation.drain()


def test_the_order_of_classes() -> None:
    """C5: superseded copies, then births dropped or moved away from, then current copies, then births in place."""
    simulation = copying()
    served(simulation, MOVED)
    served(simulation, (*MOVED, Drop(frozenset({3})), Reposition(), TO_FOLLOW))
    simulation.cache.evict(1000)
    # Births: 12 + 2, of which 4 dropped and 8 moved.
    assert simulation.cache.stats.evicted == [4, 12, 8, 2]
    simulation.drain()


def test_plain_recency_for_comparison() -> None:
    """C5: `--eviction lru` takes the oldest, whatever became of it."""
    simulation = SharingSimulation(eviction="lru")
    served(simulation, (Append((1, 2, 3)),))
    served(simulation, (Append((4, 5, 6)), Drop(frozenset({0, 1})), Append((7,))))
    assert simulation.cache.evict(3) == 3
    assert simulation.cache.stats.evicted[EvictionClass.FINISHED_BIRTH] == 3
    simulation.drain()


@pytest.mark.parametrize("mode", ["on_read", "copy"])
def test_a_computed_prompt_is_shared_while_its_request_runs(mode) -> None:
    """C4: somebody who comes meanwhile computes only what is his own."""
    simulation = SharingSimulation(reposition=mode)
    first = simulation.submit((*MOVED, Append((20,))), outputs=30)
    simulation.step()
    other = simulation.submit((*MOVED, Append((21,))), outputs=2)
    third = simulation.submit((*MOVED, Append((20,))), outputs=2)
    simulation.step()
    assert simulation.computed[other.job.job_id] == simulation.computed[third.job.job_id] == 1
    assert first.end is None
    assert simulation.cache.stats.rotations == (4 if mode == "copy" else 0)
    simulation.drain()


def test_what_the_cache_has_already_stays_private() -> None:
    """C7: two compute the same at the same time; the second one's pages are its own until it ends."""
    simulation = copying()
    one, other = simulation.submit(MOVED, outputs=5), simulation.submit(MOVED, outputs=9)
    for _ in range(3):
        simulation.step()
    own = [len(client.job.sequence.private_pages()) for client in (one, other)]  # type: ignore[union-attr]
    # Generated tokens with K and V; and of the second, a step behind, 5 births and 4 copies that were there already.
    assert own == [2, 1 + 9]
    simulation.drain()


def test_an_aborted_request_leaves_what_is_written_and_nothing_else() -> None:
    """C7: after any number of steps, in chunks."""
    for steps in range(1, 8):
        simulation = copying(chunked_prefill_size=3)
        client = simulation.submit((*MOVED, Drop(frozenset({4})), Reposition(), TO_FOLLOW), outputs=3)
        for _ in range(steps):
            if client.end is None:
                simulation.step()
        if client.end is None:
            simulation.finish(client, "aborted")
        simulation.check_pages()
        assert simulation.cache.leased() == 0
        served(simulation, (*MOVED, TO_FOLLOW))
        simulation.drain()


def test_the_older_of_two_copies_goes_with_its_pass() -> None:
    """C2, C8: positions that only the pass needed leave no version behind."""
    simulation = copying(chunked_prefill_size=256)
    history: History = (Append(tuple(range(30))),)
    for turn in range(8):
        history = (*history, Drop(frozenset({turn})), Reposition(), Append((turn, 31)))
    served(simulation, history)
    stats = simulation.cache.stats
    # The 22 survivors of the first append were copied 8 times; what was dropped before is at the place it had last.
    assert stats.rotations > 8 * 22 and stats.versions == 7 + 22 + 2 * 7
    simulation.drain()


@pytest.mark.parametrize("mode", ["on_read", "copy"])
def test_forty_turns_of_a_thousand_tokens_in_eight_thousand_pages(mode) -> None:
    """A7: each turn drops the one before the last and repositions; all of it cold, and again warm."""
    turns, length = 40, 1000
    history: list[Append | Drop | Reposition] = []
    for turn in range(turns):
        history.append(Append(tuple(np.full(length, turn).tolist())))
        if turn >= 2:
            history += [Drop(frozenset(range((turn - 2) * length, (turn - 1) * length))), Reposition()]
    timeline = Timeline(tuple(history))
    assert timeline.largest_position < 4000
    pool, steps = PagePool(8000), []
    cache = RadixCache(pool, reposition=mode)
    config = EngineConfig(4000, 8000, chunked_prefill_size=1000, reposition=mode)
    scheduler = Scheduler(config, pool, cache, window=None, list_capacity=1 << 20, logit_rows=1 << 20)
    # Every token is asked for, so that nothing is spared; then the same again.
    for wanted in (tuple(range(turns * length)), ()):
        job = scheduler.submit("job", Timeline(tuple(history)), "", wanted)
        count = 0
        while job.sequence is None or job.sequence.remaining:
            schedule = scheduler.schedule()
            assert schedule.parts and not schedule.exhausted
            scheduler.advance(schedule)
            assert job.sequence is not None
            pool.check([job.sequence.private_pages()], cache.cached_pages())
            count += 1
        scheduler.finish(job)
        cache.check()
        steps.append(count)
    assert steps[0] < 60 and steps[1] == 1 and scheduler.preemptions == 0


def test_scattered_drops_cut_a_run_rather_than_fill_memory() -> None:
    """C2: a version of every tenth token's shift needs arrays no longer than its stretch, by a small factor."""
    pool = PagePool(4000)
    cache = RadixCache(pool, reposition="copy")
    gone = frozenset(range(0, 1000, 10))
    timeline = Timeline((Append(tuple(range(1000))), Drop(gone), Reposition(), Append((1,))))
    view = timeline.view(timeline.num_epochs - 1)
    pages, positions = np.full(1001, -1, np.int32), np.zeros(1001, np.int32)
    moved = view.shifts != 0
    pages[view.indices[moved]] = pool.allocate(int(moved.sum()))
    positions[view.indices] = view.positions
    assert len(cache.keep(timeline, "", pages, positions)) == 0
    cache.check()
    slots = sum(len(version) for node in cache._nodes.values() for version in node.versions.values())
    assert slots < 10 * moved.sum()
    match = cache.match(timeline, "")
    (found,) = cache.lease_versions(match, timeline, "", [view])
    assert (found[moved] == pages[view.indices[moved]]).all()
    cache.release(match, timeline)
    assert cache.flush() == moved.sum() and cache.remembered == 0
    cache.check()


@pytest.mark.parametrize("eviction", ["drop_aware", "lru"])
def test_a_derived_version_that_nobody_reads_any_more_goes_once(eviction: EvictionPolicy) -> None:
    """C5, C7: a drop passes over a derived version whose birth was evicted before."""
    pool = PagePool(20)
    cache = RadixCache(pool, reposition="copy", eviction=eviction)
    before = (Append((1, 2, 3, 4)), Drop(frozenset({0})), Reposition(), Append((5,)))
    births, copies = pool.allocate(5), pool.allocate(3)
    assert not len(cache.keep(Timeline(before), "", births))
    moved, positions = np.array([-1, *copies, -1], np.int32), np.array([0, 0, 1, 2, 3], np.int32)
    assert not len(cache.keep(Timeline(before), "", moved, positions))
    assert cache.evict(3) == 3
    after = Timeline((*before, Drop(frozenset({1, 2})), Append((7, 8))))
    match = cache.match(after, "")
    cache.check()
    cache.release(match, after)
    cache.check()
    assert cache.evict(2) == 2
    cache.check()
    assert cache.flush() == 3 and pool.counts().free == 20
