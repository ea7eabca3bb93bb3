"""The radix tree under the scheduler on a symbolic device: shared by meaning, evicted, restored (C1-C7, A4, A6).

A page's content is named by the canonical history up to its token's append, so a page that is reused where the history
differs in anything at all is refused by the device.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import pytest

from akv_jax.cache.base import MatchResult
from akv_jax.cache.naive import NaiveCache
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import RepositionMode
from akv_jax.errors import RequestError
from akv_jax.planning.usage import classify
from akv_jax.planning.visibility import NEVER, Timeline
from akv_jax.scheduler import Scheduler
from spec.operations import Append, Drop, History, Reposition, canonical
from spec.sharing import common_prefix, steps
from spec.state import run
from spec.visibility import closure, usage
from tests.copy_usage import copy_usage
from tests.planning.symbolic import Content, Expected, SymbolicDevice
from tests.random_histories import random_history
from tests.test_scheduler import MODES, Client, Simulation, agent


class Meaning(NamedTuple):
    """What each token of a history is, by logical index: a name of the whole history up to its append."""

    salt: str
    names: Sequence[Hashable]


def meaning(history: History, salt: str) -> Meaning:
    names: list[Hashable] = []
    so_far: Hashable = salt
    for step in steps(canonical(history)):
        so_far = hash((so_far, step))
        if isinstance(step, int):
            names.append(so_far)
    return Meaning(salt, names)


class SharingDevice(SymbolicDevice):
    """Compares contents by meaning, not by request."""

    def _write(self, plan, rows) -> None:
        super()._write(plan, [Expected(row.owner.names[row.query.index], row.query, row.windows) for row in rows])

    def _read(self, segment, rows) -> None:
        for row in rows:
            for read in row.query.view:
                assert read.index < len(row.owner.names)
        translate = {name: row.owner.names[0] for row in rows for name in row.owner.names}
        before = {page: self.pages[page] for page in segment.pages.tolist()}
        for page, content in before.items():
            owner = rows[0].owner
            assert owner.names[content.index] == content.owner, f"page {page} means something else here"
            self.pages[page] = Content(translate[content.owner], content.index, content.encoded)
        super()._read(segment, [Expected(row.owner.names[0], row.query, row.windows) for row in rows])
        self.pages.update(before)


class WatchedCache(RadixCache):
    """Whatever it finds is compared with a search through all that its pages mean (C1, C3)."""

    simulation: SharingSimulation

    def resident(self, timeline: Timeline, salt: str) -> list[dict[int, int]]:
        """By logical index: the pages of its versions by the position of K, found by their meaning."""
        contents: dict[Hashable, dict[int, int]] = {}
        for page in np.concatenate([np.zeros(0, int), *self.cached_pages()]).tolist():
            content = self.simulation.device.pages[page]
            assert content.encoded not in contents.setdefault(content.owner, {}), "one version twice"
            contents[content.owner][content.encoded] = page
        client = next(c for c in self.simulation.clients.values() if c.job.timeline is timeline)
        return [contents.get(name, {}) for name in meaning(self.simulation.whole(client), salt).names]

    def match(self, timeline: Timeline, salt: str, looked_at: int | None = None) -> MatchResult:
        found = super().match(timeline, salt, looked_at)
        client = next((c for c in self.simulation.clients.values() if c.job.timeline is timeline), None)
        if client is not None:
            versions = self.resident(timeline, salt)
            at_hand = {(index, position) for index, places in enumerate(versions) for position in places}
            self.simulation.versions[client.job.job_id] = at_hand
            birth = timeline.birth.tolist()
            for index, (page, encoded) in enumerate(zip(found.pages.tolist(), found.encoded.tolist(), strict=True)):
                if page < 0 and timeline.dropped[index] != NEVER:
                    # Left out, as nobody reads it: if somebody did, more would be computed than the closure.
                    continue
                if birth[index] in versions[index]:
                    assert page == versions[index][birth[index]] and encoded == birth[index]
                elif page >= 0 or versions[index]:
                    assert versions[index][encoded] == page
        return found

    def lease_versions(self, match, timeline, salt, views) -> list[np.ndarray]:
        found = super().lease_versions(match, timeline, salt, views)
        versions = self.resident(timeline, salt)
        for view, pages in zip(views, found, strict=True):
            entries = zip(view.indices.tolist(), view.positions.tolist(), strict=True)
            assert pages.tolist() == [versions[index].get(position, -1) for index, position in entries]
        return found


class SharingSimulation(Simulation):
    """A `Simulation` whose scheduler has a radix tree."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), max_tokens: int | None = None, **config) -> None:
        super().__init__(windows, **config)
        self.device.__class__ = SharingDevice
        self.cache = WatchedCache(
            self.pool, reposition=self.config.reposition, eviction=self.config.eviction, max_tokens=max_tokens
        )
        self.cache.simulation = self
        self.scheduler = Scheduler(
            self.config,
            self.pool,
            self.cache,
            window=self.scheduler.window,
            list_capacity=self.list_capacity,
            logit_rows=self.config.max_running_requests,
        )
        self.computed: dict[str, int] = {}
        #: (logical index, position) of every version at hand when each request was last admitted.
        self.versions: dict[str, set[tuple[int, int]]] = {}

    def submit(self, history: History, outputs: int = 1, logits_at: tuple[int, ...] = (), salt: str = "") -> Client:
        name = f"request {len(self.clients)}"
        job = self.scheduler.submit(name, Timeline(history), salt, logits_at)
        client = Client(job, history, outputs, logits_at, run(None, history).state)
        self.clients[name] = client
        return client

    def whole(self, client: Client) -> History:
        return (*client.history, Append(tuple(client.generated)))

    def run(self, schedule) -> None:
        owners = {name: meaning(self.whole(c), c.job.salt) for name, c in self.clients.items() if c.end is None}
        inner = self.device.run

        def by_meaning(plan, rows, *, turns_on_read: bool) -> None:
            renamed = [Expected(owners[row.owner], row.query, row.windows) for row in rows]
            inner(plan, renamed, turns_on_read=turns_on_read)

        self.device.run = by_meaning  # type: ignore[method-assign]
        try:
            super().run(schedule)
        finally:
            del self.device.run

    def check_pages(self) -> None:
        private = [job.sequence.private_pages() for job in self.scheduler.running if job.sequence is not None]
        self.pool.check(private, self.cache.cached_pages())
        self.cache.check()

    def check_closure(self, client: Client) -> None:
        """C6 with what was resident when it was admitted."""
        sequence = client.job.sequence
        if sequence is client.sequence:
            return
        client.sequence = sequence
        assert sequence is not None
        resident = set(np.flatnonzero(sequence.match.pages >= 0).tolist())
        last = len(client.state.trajectory) - 1
        wanted = {last} if client.generated else {*client.logits_at, last}
        whole = self.whole(client)
        assert sequence.compute.tolist() == sorted(closure(whole, resident, wanted, self.windows))
        self.computed[client.job.job_id] = len(sequence.compute)

    def sample(self, client: Client) -> None:
        """A6, where a request was never retracted and asks for the last logits alone."""
        job, sequence = client.job, client.job.sequence
        assert sequence is not None
        if not (sequence.remaining or client.generated or client.logits_at or len(job.queried)):
            copies = self.config.reposition == "copy"
            kinds = classify(job.timeline, sequence.compute, self.scheduler.window, sequence.made if copies else None)
            at_hand = self.versions[job.job_id]
            meant = (
                copy_usage(client.history, at_hand, self.windows)
                if copies
                else usage(client.history, {index for index, _ in at_hand}, self.windows)
            )
            assert kinds == tuple(map(len, (meant.computed, meant.drop_skipped, meant.repos, meant.cached)))
        super().sample(client)

    def drain(self) -> None:
        while self.live:
            self.step()
        assert self.cache.leased() == 0
        self.cache.flush()
        assert self.pool.num_free == self.pool.num_pages and not self.device.pages
        assert self.cache.remembered == 0


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 800))])
@pytest.mark.parametrize("mode", MODES)
def test_random_traffic(mode: RepositionMode, seed: int) -> None:
    """C1-C7: new conversations, next turns, branches, other tenants, evictions, flushes and aborts in tiny pools."""
    generator = np.random.default_rng(seed)
    windows = [(None,), (None, 3), (2,), (5, 1)][generator.integers(4)]
    simulation = SharingSimulation(
        windows,
        reposition=mode,
        num_pages=int(generator.integers(25, 160)),
        max_running_requests=int(generator.integers(1, 7)),
        chunked_prefill_size=int(generator.choice([1, 3, 8, 32, 200])),
    )
    told: list[History] = []
    for _ in range(200):
        if generator.random() < 0.2:
            history = random_history(generator, max_operations=5, vocab_size=3)
            if told and generator.random() < 0.8:
                history = (*told[int(generator.integers(len(told)))], *history)
                if generator.random() < 0.5:
                    known = len(run(None, history).queries)
                    history = (*history, Drop(frozenset(generator.integers(known, size=2).tolist())), Append((1,)))
            try:
                simulation.submit(
                    history, int(generator.choice([1, 2, 5, 20])), salt=str(generator.choice(["", "", "other"]))
                )
                told.append(history)
            except RequestError:
                pass
        if simulation.live and generator.random() < 0.03:
            simulation.finish(simulation.live[int(generator.integers(len(simulation.live)))], "aborted")
        event = generator.random()
        if event < 0.02:
            simulation.cache.flush()
        elif event < 0.1:
            simulation.cache.evict(int(generator.integers(1, 20)))
        simulation.check_pages()
        simulation.step()
    simulation.drain()


@pytest.mark.parametrize("seed", range(40))
def test_exactly_the_longest_common_history_is_shared(seed: int) -> None:
    """C1: a match knows as many tokens as the two histories share, no more and no less."""
    generator = np.random.default_rng(seed)
    histories = [random_history(generator, vocab_size=2, max_run=4) for _ in range(6)]
    for seen in histories:
        simulation = SharingSimulation(num_pages=400)
        simulation.submit(seen)
        while simulation.live:
            simulation.step()
        for asked in histories:
            match = simulation.cache.match(Timeline(asked), "")
            assert match.known <= common_prefix(canonical(seen), canonical(asked)).tokens
            simulation.cache.release(match, Timeline(asked))
        again = Timeline(seen)
        computed = max(simulation.clients["request 0"].state.trajectory, key=lambda q: q.index).index + 1
        match = simulation.cache.match(again, "")
        assert match.known <= computed
        simulation.cache.release(match, again)


def test_the_next_turn_computes_only_what_is_new() -> None:
    """The heart of it: an agent's next turn reuses everything, edits or not."""
    simulation = SharingSimulation(num_pages=1000, chunked_prefill_size=64)
    history: History = ()
    for turn in range(12):
        history = (*history, Append(tuple((turn * 7 + i) % 64 for i in range(20))))
        if turn >= 2:
            history = (*history, Drop(frozenset(range((turn - 2) * 20, (turn - 1) * 20))))
        if turn % 3 == 2:
            history = (*history, Reposition())
        client = simulation.submit((*history, Append((9, 9))))
        while simulation.live:
            simulation.step()
        assert simulation.computed[client.job.job_id] == 22, turn
    simulation.drain()


def test_an_unchanged_request_computes_one_token() -> None:
    """A10: from its second time on; the last token, for its logits."""
    simulation = SharingSimulation(num_pages=1000)
    for time in range(3):
        client = simulation.submit(agent(6, 10, reposition=True))
        while simulation.live:
            simulation.step()
        if time:
            assert simulation.computed[client.job.job_id] <= 1
    simulation.drain()


def test_tenants_share_nothing() -> None:
    simulation = SharingSimulation(num_pages=100)
    for salt in ("a", "b"):
        client = simulation.submit((Append((1, 2, 3, 4)),), salt=salt)
        while simulation.live:
            simulation.step()
        assert simulation.computed[client.job.job_id] == 4
    simulation.drain()


def test_dropped_pages_are_evicted_first() -> None:
    """C5: what its last user dropped goes before what is merely old."""
    simulation = SharingSimulation(num_pages=100)
    simulation.submit((Append((1, 2, 3, 4)),))
    while simulation.live:
        simulation.step()
    simulation.submit((Append((1, 2, 3, 4)), Drop(frozenset({1, 2})), Append((5,))))
    while simulation.live:
        simulation.step()
    assert simulation.cache.evict(2) == 2
    timeline = Timeline((Append((1, 2, 3, 4)),))
    match = simulation.cache.match(timeline, "")
    assert (match.pages >= 0).tolist() == [True, False, False, True] and match.known == 4
    simulation.cache.release(match, timeline)
    simulation.drain()


def test_what_no_query_reads_is_not_leased() -> None:
    """C4, C6: what was dropped before the first query. It goes first from now on, whoever had used it before."""
    simulation = SharingSimulation(num_pages=100)
    simulation.submit((Append((1, 2, 3, 4)),))
    while simulation.live:
        simulation.step()
    cache = simulation.cache
    timeline = Timeline((Append((1, 2, 3, 4)), Drop(frozenset({1, 2})), Append((5,))))
    for looked_at, found in ((3, [True, True, True, True, False]), (None, [True, False, False, True, False])):
        match = cache.match(timeline, "", looked_at)
        assert (match.pages >= 0).tolist() == found and cache.leased() == sum(found)
        if looked_at is None:
            assert cache.evictable() == 2 and cache.evict(1) == 1
            assert simulation.pool.counts().free == 97
        cache.release(match, timeline)
    match = cache.match(timeline, "", 3)
    # The later of the two has gone, and its place is the first that is missing: 1 is read by what restores it.
    assert (match.pages >= 0).tolist() == [True, True, False, True, False]
    cache.release(match, timeline)
    simulation.drain()


def test_a_hole_that_nobody_needs_makes_nothing_leased() -> None:
    """C4, C6: what was dropped long ago is evicted first; what was dropped later stays unleased all the same."""
    simulation = SharingSimulation(num_pages=100)
    history = (Append(tuple(range(10))), Drop(frozenset(range(2, 6))), Append((10, 11)))
    simulation.submit(history)
    while simulation.live:
        simulation.step()
    assert simulation.cache.evict(1) == 1
    timeline = Timeline((*history, Drop(frozenset({6, 10})), Append((12,))))
    match = simulation.cache.match(timeline, "")
    assert np.flatnonzero(match.pages >= 0).tolist() == [0, 1, 7, 8, 9, 11]
    simulation.cache.release(match, timeline)
    simulation.drain()


def test_memory_of_paths_is_bounded() -> None:
    """C5: tombstones included."""
    simulation = SharingSimulation(num_pages=60, max_tokens=100)
    for start in range(40):
        simulation.submit((Append((start, *range(20))),))
        while simulation.live:
            simulation.step()
        assert simulation.cache.remembered <= 100
    simulation.drain()


def test_what_cannot_be_forgotten_costs_nobody_else() -> None:
    """C5: a history longer than the bound, while it is leased, does not drive out what others have cached."""
    simulation = SharingSimulation(num_pages=200, max_tokens=100)
    other = (Append(tuple(range(100, 130))),)
    simulation.submit(other)
    while simulation.live:
        simulation.step()
    large = simulation.submit((Append(tuple(range(120))),), outputs=50)
    while simulation.cache.remembered <= 100:
        simulation.step()
    client = simulation.submit(other)
    while client.end is None:
        simulation.step()
    assert large.end is None and simulation.computed[client.job.job_id] == 1
    simulation.drain()


@pytest.mark.parametrize("mode", MODES)
def test_leases_of_later_entries_do_not_stand_in_the_way_of_holes(mode: RepositionMode) -> None:
    """A4, A7: a request that fits when nothing is resident fits when anything is."""
    numbers = tuple(range(10))
    simulation = SharingSimulation(num_pages=12, reposition=mode)
    first = (Append(numbers), Drop(frozenset(range(5))), Append((20, 21, 22, 23, 24)), Drop(frozenset(range(5, 10))))
    for history in (
        (*first, Append((30,))),
        (Append((40, 41, 42, 43, 44, 45)),),
        (Append(numbers), Drop(frozenset(range(5))), Append((20, 21, 22, 23, 24)), Append((31, 32))),
    ):
        client = simulation.submit(history)
        while simulation.live:
            simulation.step()
        assert client.end == "finished"
    simulation.drain()


def test_memory_of_conversations_is_bounded() -> None:
    """C5: paths of many runs, operations between them."""
    simulation = SharingSimulation(num_pages=400, max_tokens=300)
    for talk in range(8):
        simulation.submit((Append((talk,)), *agent(8, 15, reposition=True)))
        while simulation.live:
            simulation.step()
        assert simulation.cache.remembered <= 300
    simulation.drain()


def test_naive_is_the_same_but_for_what_is_computed() -> None:
    """A4: the double and the tree plan the same reads; see `test_scheduler.py` for the double alone."""
    assert {name for name in dir(NaiveCache) if not name.startswith("_")} <= set(dir(RadixCache))
