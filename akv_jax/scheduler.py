"""Who runs in the next step, on which pages (DESIGN R6). Knows queues, pages and leases; no device, no clock, no text.

Decoding requests get a query each in every step. What is left of the step's token budget goes to prompts, the one that
has waited longest since its last chunk first, so that a short request behind a long prompt waits for one chunk (A10).
Where pages run out, unleased cached ones are evicted, then the newest running request is retracted: it gives its pages
back and waits again, keeping what it has already generated.

With prefill and decode apart there is one scheduler on each side. A job whose prompt is computed is *parked*: it keeps
what it has, and may lose it like any other, until the decode side takes it in (`receive`). While pages are copied from
or to it, it is *moving*, and nobody may take them. `docs/disaggregation.md` says why all get through.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from akv_jax.cache.base import KVCache, MatchResult
from akv_jax.cache.pages import PagePool
from akv_jax.config import EngineConfig
from akv_jax.errors import Reason, RequestError
from akv_jax.planning.active_set import ActiveSet
from akv_jax.planning.peak import Demand
from akv_jax.planning.sequence import Chunk, PlacedChunk, Released, Sequence
from akv_jax.planning.versions import Places
from akv_jax.planning.visibility import Timeline, View


@dataclass(eq=False, slots=True)
class Job:
    """One accepted request. It waits while `sequence` is None."""

    job_id: str
    arrival: int
    timeline: Timeline
    salt: str
    logits_at: tuple[int, ...]
    demand: Demand
    sequence: Sequence | None = None
    #: Before its first token, in earlier attempts that were retracted: what was computed, and in how many steps.
    queried: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    forwards: int = 0
    #: What they made copies for: logical indices and positions.
    made: list[Places] = field(default_factory=list)
    #: Tokens that its first attempt had to restore; None before that.
    restored: int | None = None
    #: At least one token was sampled.
    decoding: bool = False
    #: What it has computed is in the cache while it runs.
    shared: bool = False
    last_served: int = -1
    #: Not to be scheduled (see the module).
    hold: Literal["parked", "moving"] | None = None

    @property
    def held(self) -> int:
        return 0 if self.sequence is None else self.sequence.held


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A job's part of one step."""

    job: Job
    chunk: Chunk
    placed: PlacedChunk


@dataclass(frozen=True, slots=True)
class Moving:
    """What is missing on this side and comes from the other one: on its pages there, and on its pages here."""

    job: Job
    source: ActiveSet
    target: ActiveSet

    def concerns(self, job: Job) -> bool:
        """Whether that job's history, tokens alone, goes at least as far together with this one as to the first entry
        that moves."""
        size = int(self.source.indices[0]) + 1
        mine, others = self.job.timeline, job.timeline
        if self.job.salt != job.salt or others.count < size:
            return False
        return np.array_equal(mine.tokens[:size], others.tokens[:size])


@dataclass(slots=True)
class Schedule:
    """One step: its parts in batch order, and jobs that cannot go on at all."""

    parts: list[Scheduled] = field(default_factory=list)
    #: Alone in the pool, and still no page for one more token.
    exhausted: list[Job] = field(default_factory=list)

    def remove(self, job: Job) -> None:
        self.parts = [part for part in self.parts if part.job is not job]


class Scheduler:
    """Owns the queue and the running set, and calls the page pool and the cache."""

    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        cache: KVCache,
        *,
        window: int | None,
        list_capacity: int,
        logit_rows: int,
    ) -> None:
        """`list_capacity` and `logit_rows`: what the largest step can carry (see `runtime.runner.Runner`)."""
        self.config, self.pool, self.cache, self.window = config, pool, cache, window
        self.list_capacity, self.max_logit_rows = list_capacity, logit_rows
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.preemptions = 0
        self._arrivals = 0
        self._steps = 0
        self._overcommitted = False
        #: What is on its way here for the cache.
        self._returning: list[Moving] = []

    # -- the queue ---------------------------------------------------------------------------------------------------

    def submit(self, job_id: str, timeline: Timeline, salt: str, logits_at: tuple[int, ...]) -> Job:
        """Queue a request. RequestError if the queue is full or the pool could never hold it (DESIGN A7)."""
        if len(self.waiting) >= self.config.max_queued_requests:
            raise RequestError(
                Reason.QUEUE_FULL, f"{len(self.waiting)} requests are waiting already, which is the limit. Retry later."
            )
        demand = Demand(timeline, self.config.reposition, self.window, logits_at)
        if demand.exceeds(self.pool.num_pages):
            raise RequestError(
                Reason.POOL_TOO_SMALL,
                f"the request keeps {demand.peak} tokens active at one time, and the server's KV pool holds "
                f"{self.pool.num_pages}. Drop more, or start the server with a larger --max-total-tokens.",
            )
        job = Job(job_id, self._arrivals, timeline, salt, logits_at, demand)
        self._arrivals += 1
        self.waiting.append(job)
        return job

    def finish(self, job: Job) -> None:
        """The job is over, whatever the reason: its pages go to the cache or back to the pool."""
        if job.sequence is None:
            self.waiting.remove(job)
            return
        self._overcommitted = False
        self._stop(job)

    def _stop(self, job: Job) -> None:
        """Take a job off the batch: its pages go to the cache or back to the pool, its leases end."""
        self.running.remove(job)
        job.hold = None
        sequence, job.sequence = job.sequence, None
        assert sequence is not None
        if not job.decoding:
            job.queried = np.union1d(job.queried, sequence.compute[: sequence.cursor])
            job.forwards += sequence.forwards
            job.made += sequence.made
        births, (versions, positions) = sequence.birth_pages(), sequence.version_pages()
        offered = np.concatenate([births[births >= 0], versions[versions >= 0]])
        self.pool.free(np.setdiff1d(sequence.private_pages(), offered, assume_unique=True))
        self._offer(job, births, versions, positions)
        self.cache.release(sequence.match, job.timeline)

    def _offer(self, job: Job, births: np.ndarray, versions: np.ndarray, positions: np.ndarray) -> None:
        """The cache may keep these pages; what it does not take is free."""
        self.pool.free(self.cache.keep(job.timeline, job.salt, births))
        self.pool.free(self.cache.keep(job.timeline, job.salt, versions, positions))

    def _share(self, job: Job) -> None:
        """The prompt is computed: from now on others may read what it has. What the cache has already stays private."""
        assert job.sequence is not None
        job.shared = True
        births, (versions, positions) = job.sequence.birth_pages(), job.sequence.version_pages()
        for pages, places in ((births, None), (versions, positions)):
            refused = self.cache.keep(job.timeline, job.salt, pages, places, job.sequence.match)
            job.sequence.give(np.setdiff1d(pages[pages >= 0], refused, assume_unique=True))

    def _admit(self) -> None:
        """First come, first served: nothing overtakes the head of the queue, so nothing starves.

        After a retraction the running requests are known to need more pages than there are: letting the victim back in
        before one of them has ended would only compute it in order to retract it again.
        """
        if self._overcommitted and self.running:
            return
        self._overcommitted = False
        while self.waiting and len(self.running) < self.config.max_running_requests:
            head = self.waiting[0]
            if self.running and not head.demand.fits(self._room(), self.cache, head.salt):
                return
            if any(moving.concerns(head) for moving in self._returning):
                # It would compute what is about to be here. That comes without waiting for any prompt.
                return
            self._start(self.waiting.pop(0))

    def _room(self) -> int:
        """Pages that can be had and are not promised to running prompts."""
        promised = sum(max(0, other.demand.peak - other.held) for other in self.running if not other.decoding)
        return self.pool.num_free + self.cache.evictable() - promised

    def _start(self, job: Job) -> None:
        """Put a job into the batch with what the cache has of its history."""
        logits_at = () if job.decoding else job.logits_at
        match = self.cache.match(job.timeline, job.salt, min(logits_at, default=None))
        job.sequence = Sequence(
            job.timeline, match, window=self.window, mode=self.config.reposition, logits_at=logits_at
        )
        if self.config.reposition == "copy" and match.known:
            views = job.sequence.views()
            versions = self.cache.lease_versions(match, job.timeline, job.salt, [view for _, view in views])
            job.sequence.expect(views, versions)
        job.restored = job.sequence.restored if job.restored is None else job.restored
        job.shared = False
        self.cache.stats.restored += job.sequence.restored
        self._release(job, job.sequence.let_go())
        # It takes its turn after those that have waited as long.
        job.last_served = self._steps - 1
        self.running.append(job)

    def _retract(self, job: Job) -> None:
        """Take a running job's pages; it waits again in its old place."""
        self.preemptions += 1
        self._overcommitted = True
        self._stop(job)
        self.requeue(job)

    # -- from and to another side ------------------------------------------------------------------------------------

    def empty_queue(self) -> list[Job]:
        """Take everybody out of the queue, to wait somewhere else."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def requeue(self, job: Job) -> None:
        """Queue a job that was retracted, here or on another side, in its old place."""
        # What it has generated since is computed again, as a part of the prompt.
        logits_at = () if job.decoding else job.logits_at
        job.demand = Demand(job.timeline, self.config.reposition, self.window, logits_at)
        bisect.insort(self.waiting, job, key=lambda j: j.arrival)

    def receive(self, job: Job, held: ActiveSet, most: int) -> Moving | None:
        """Take in what another side has computed, all that is active of it, or None if there is no room now, or if more
        than `most` pages would have to come.

        The new job is moving until `filled`. What this side's cache has just where it is read is leased and need not
        come.
        """
        full = len(self.running) >= self.config.max_running_requests
        if self.running and (full or self._overcommitted or not self._takes(job, held)):
            return None
        match, lacking = self._found(job.timeline, job.salt, held)
        source = held.where(lacking)
        if len(source) > most:
            self.cache.release(match, job.timeline)
            return None
        target = replace(source, pages=self._allocate(len(source)))
        sequence = Sequence(job.timeline, match, window=self.window, mode=self.config.reposition, coming=target)
        assert sequence.compute.tolist() == [job.timeline.count - 1], "only the last token is left to compute"
        demand = Demand(job.timeline, self.config.reposition, self.window)
        new = Job(job.job_id, job.arrival, job.timeline, job.salt, (), demand, sequence, decoding=True)
        new.hold, new.last_served = "moving", self._steps - 1
        self.running.append(new)
        return Moving(new, source, target)

    def _takes(self, job: Job, held: ActiveSet) -> bool:
        """Whether there is room for these entries and one more, beside what others lease of them."""
        short = len(held) + 1 - self._room()
        if short <= 0:
            return True
        leased = self.cache.leased_births(job.timeline, job.salt)
        return int(leased[held.indices[held.births]].sum()) >= short

    def filled(self, job: Job) -> None:
        """What a received job lacked is there: it decodes from now on."""
        assert job.sequence is not None
        job.sequence.filled()
        job.hold = None

    def expect(self, job: Job, held: ActiveSet, most: int) -> Moving | None:
        """Make room for what the cache lacks of these entries of another side's job, at most so many pages; None if
        there is none or nothing.

        Leased pages are never touched for it. `arrived` or `lost` ends it.
        """
        match, lacking = self._found(job.timeline, job.salt, held)
        self.cache.release(match, job.timeline)
        source = held.where(lacking)
        if not len(source) or len(source) > min(most, self._room()) or self.config.disable_radix_cache:
            return None
        moving = Moving(job, source, replace(source, pages=self._allocate(len(source))))
        self._returning.append(moving)
        return moving

    def arrived(self, moving: Moving) -> None:
        """What was expected is there: the cache's, as far as it has not got it meanwhile."""
        self._returning.remove(moving)
        self._offer(moving.job, *moving.target.by_index(moving.job.timeline.count))

    def lost(self, moving: Moving) -> None:
        """What was expected does not come."""
        self._returning.remove(moving)
        self.pool.free(moving.target.pages)

    def private_pages(self) -> list[np.ndarray]:
        """Every page that belongs to a running job alone or is being filled, int32, for the accounting check (C7)."""
        own = [job.sequence.private_pages() for job in self.running if job.sequence is not None]
        return [*own, *(moving.target.pages for moving in self._returning)]

    def _found(self, timeline: Timeline, salt: str, held: ActiveSet) -> tuple[MatchResult, np.ndarray]:
        """Lease of these entries what the cache has just where they are; and bool [entries], which of them it lacks."""
        match, at = self.cache.match(timeline, salt), held.indices
        found = np.where(match.encoded[at] == held.positions, match.pages[at], -1)
        leased = match.pages[match.pages >= 0]
        if self.config.reposition == "copy" and match.known:
            view = View(at, held.positions, held.positions - timeline.birth[at])
            (exact,) = self.cache.lease_versions(match, timeline, salt, [view])
            found = np.where(found < 0, exact, found)
            leased = np.union1d(leased, exact[exact >= 0])
        self.cache.release(match, timeline, np.setdiff1d(leased, found))
        pages, encoded = np.full(timeline.count, -1, np.int32), timeline.birth[: timeline.count].copy()
        pages[at], encoded[at] = found, np.where(found < 0, encoded[at], held.positions)
        return MatchResult(pages, encoded, match.receipt, match.known), found < 0

    def _allocate(self, count: int) -> np.ndarray:
        if count > self.pool.num_free:
            self.cache.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Choose and place the next step's queries. The caller runs it, then calls `advance`."""
        self._steps += 1
        self._admit()
        schedule = Schedule()
        for job in sorted(self.running, key=lambda j: j.arrival):
            if job.sequence is not None and job.hold is None and job.decoding and job.sequence.remaining == 1:
                self._place(schedule, job, 1)
        budget = max(1, self.config.chunked_prefill_size - len(schedule.parts))
        for job in sorted(self.running, key=lambda j: (j.last_served, j.arrival)):
            if budget <= 0 or job.sequence is None or job.hold is not None:
                continue
            if not (job.decoding and job.sequence.remaining == 1):
                budget -= self._place(schedule, job, budget)
        return schedule

    def advance(self, schedule: Schedule) -> None:
        """The step has run: free what no later query reads."""
        for part in schedule.parts:
            job, sequence, stats = part.job, part.job.sequence, self.cache.stats
            assert sequence is not None
            stats.rotations += sum(len(moves.source) for moves in part.placed.moves)
            stats.hops += part.placed.hops
            self._release(job, sequence.advance(part.chunk))
            if sequence.remaining == 0 and not job.shared:
                self._share(job)

    def _release(self, job: Job, pages: Released) -> None:
        assert job.sequence is not None
        self.pool.free(pages.useless)
        self._offer(job, pages.births, pages.versions, pages.positions)
        if len(pages.leased):
            self.cache.release(job.sequence.match, job.timeline, pages.leased)

    def _place(self, schedule: Schedule, job: Job, size: int) -> int:
        """Add up to `size` queries of `job` to the step; returns how many. Older jobs are never disturbed for it."""
        while job.sequence is not None:
            chunk = job.sequence.next_chunk(size)
            short = chunk.pages_needed - self.pool.num_free
            if short > 0:
                self.cache.evict(short)
            left = self._left(schedule)
            chunk = _fitting(job.sequence, chunk, left)
            if chunk is not None:
                placed = job.sequence.place(chunk, self.pool.allocate(chunk.pages_needed))
                schedule.parts.append(Scheduled(job, chunk, placed))
                job.last_served = self._steps
                return len(chunk.indices)
            if job.sequence.next_chunk(1).entries > left.entries:
                return 0
            newest = max((j for j in self.running if j.hold != "moving"), key=lambda j: j.arrival)
            if newest is job:
                if len(self.running) > 1 or self._returning:
                    return 0
                if self._start_over(job):
                    continue
                schedule.exhausted.append(job)
                return 0
            schedule.remove(newest)
            self._retract(newest)
        return 0

    def _start_over(self, job: Job) -> bool:
        """Compute a request from nothing, which fits by `peak`, if what it leases stands in its way.

        What only later queries read is leased from the start, and may fill the room that holes before it need; and
        turning versions back takes room that is not needed where births are at hand.
        """
        sequence = job.sequence
        assert sequence is not None
        if not (sequence.match.pages >= 0).any() or (sequence.computes_last_epoch and not sequence.turns_back):
            return False
        self._stop(job)
        self.cache.flush()
        self._start(job)
        return True

    def _left(self, schedule: Schedule) -> _Left:
        # Every other running job may need a logit row of its own in this step.
        unserved = len(self.running) - len(schedule.parts) - 1
        return _Left(
            pages=self.pool.num_free,
            entries=self.list_capacity - sum(part.chunk.entries for part in schedule.parts),
            logit_rows=self.max_logit_rows - unserved - sum(len(part.placed.logits) for part in schedule.parts),
        )


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left of a step: free pages, page list entries, and rows whose logits can be returned."""

    pages: int
    entries: int
    logit_rows: int


def _fitting(sequence: Sequence, chunk: Chunk, left: _Left) -> Chunk | None:
    """`chunk`, the sequence's next, or the largest smaller one, by halving, that there is room for."""
    while chunk.pages_needed > left.pages or chunk.entries > left.entries or chunk.logits > left.logit_rows:
        size = len(chunk.indices)
        size = left.pages if left.pages < size == chunk.pages_needed else size // 2
        if size == 0:
            return None
        chunk = sequence.next_chunk(size)
    return chunk
