"""What planning and the cache's books cost on the host, with no device: time against length, and against pages.

All of it happens in one thread without waiting for anything, so it is measured in that thread's CPU time: what other
programs do on the machine then hardly matters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.chat.cache_field import CacheField, DropEntry
from akv_jax.chat.lowering import lower
from akv_jax.chat.tokenise import TokenisedChat
from akv_jax.config import EngineConfig, RepositionMode
from akv_jax.planning.planner import assemble
from akv_jax.planning.visibility import Timeline
from akv_jax.scheduler import Job, Scheduler
from spec.operations import Append, Operation

#: Every second message is a tool's; of those this many are kept, and a reposition follows every so many.
KEEP, EVERY = 12, 10
VOCABULARY = 50_000
PROMPT_TOKENS = 4


@dataclass(slots=True)
class Stopwatch:
    """CPU milliseconds by name, one entry a repetition."""

    times: dict[str, list[float]] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        self.times.setdefault(name, []).append(1000 * (time.thread_time() - start))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in self.times.items()}


def _conversation(message_lengths: list[int], random: np.random.Generator) -> TokenisedChat:
    """Messages of those lengths and a generation prompt."""
    ends = np.cumsum(message_lengths).tolist()
    ids = random.integers(10, VOCABULARY, ends[-1] + PROMPT_TOKENS).tolist()
    spans = tuple(zip([0, *ends[:-1]], ends, strict=True))
    return TokenisedChat(tuple(ids), spans, (ends[-1], len(ids)), tuple({} for _ in spans))


def _edits(messages: int) -> CacheField:
    tools = list(range(1, messages, 2))
    drop = {tools[i]: (DropEntry(tools[i - KEEP]),) for i in range(KEEP, len(tools))}
    return CacheField(drop, tuple(tools[EVERY - 1 :: EVERY]))


class _Host:
    """The scheduler with its pool and cache, and steps that are planned but never run."""

    def __init__(self, tokens: int, mode: RepositionMode, chunk: int) -> None:
        config = EngineConfig(
            context_length=2 * tokens, num_pages=4 * tokens, chunked_prefill_size=chunk, reposition=mode
        )
        self.pool = PagePool(config.num_pages)
        self.cache = RadixCache(self.pool, reposition=mode)
        self.scheduler = Scheduler(
            config, self.pool, self.cache, window=None, list_capacity=1 << 24, logit_rows=config.max_running_requests
        )
        self._count = 0

    def submit(self, timeline: Timeline) -> Job:
        self._count += 1
        return self.scheduler.submit(f"r{self._count}", timeline, "", ())

    def step(self, job: Job) -> bool:
        """One step; whether it was the prompt's last one."""
        schedule = self.scheduler.schedule()
        assemble([part.placed for part in schedule.parts])
        self.scheduler.advance(schedule)
        assert job.sequence is not None
        return job.sequence.remaining == 0


def plan_and_match(
    tokens: int, messages: int = 100, *, runs: int = 15, mode: RepositionMode = "on_read", edited: bool = True
) -> dict[str, float]:
    """Median milliseconds of the host's work on the next turn of a conversation, whose other turns are cached.

    The turn is `messages` messages of `tokens` tokens in all, of which the last two are new: they are one step. "plan
    and match" is from the operations to the step's plan, and the lines indented below it are its parts. Before it comes
    the lowering of the `cache` field; the end of the request comes after it.
    """
    random, watch = np.random.default_rng(0), Stopwatch()
    length = tokens // messages
    lengths = [length] * messages
    host = _Host(tokens, mode, chunk=4 * length)
    edits = _edits(messages) if edited else CacheField()
    before = _conversation(lengths[:-2], random)
    job = host.submit(Timeline(lower(before, edits, messages - 2)))
    while not host.step(job):
        pass
    host.scheduler.finish(job)
    for _ in range(runs):
        new = random.integers(10, VOCABULARY, 2 * length + PROMPT_TOKENS).tolist()
        ids = before.token_ids[: before.generation_span[0]] + tuple(new)
        spans = before.message_spans + tuple(
            (sum(lengths[:k]), sum(lengths[: k + 1])) for k in range(messages - 2, messages)
        )
        turn = TokenisedChat(ids, spans, (sum(lengths), len(ids)), tuple({} for _ in spans))
        _measure_turn(host, turn, edits, messages, watch)
    return watch.medians()


def _measure_turn(host: _Host, turn: TokenisedChat, edits: CacheField, messages: int, watch: Stopwatch) -> None:
    with watch("lowering"):
        operations = lower(turn, edits, messages)
    with watch("plan and match"):
        with watch("  Timeline"):
            timeline = Timeline(operations)
        with watch("  Scheduler.submit (peak)"):
            job = host.submit(timeline)
        with watch("  Scheduler.schedule (match, closure, chunk, place)"):
            schedule = host.scheduler.schedule()
        with watch("  assemble"):
            assemble([part.placed for part in schedule.parts])
    with watch("advance"):
        host.scheduler.advance(schedule)
    assert job.sequence is not None
    if job.sequence.remaining:
        raise RuntimeError("the new messages were to be one step")
    with watch("finish (keep, release)"):
        host.scheduler.finish(job)
    with watch("RadixCache.match alone"):
        match = host.cache.match(timeline, "")
    host.cache.release(match, timeline)


@dataclass(frozen=True, slots=True)
class PageCosts:
    """Microseconds a page of allocating, evicting and keeping; and of one call that asks how many could be evicted."""

    allocate: float
    evict: float
    keep: float
    evictable_call: float

    @property
    def total(self) -> float:
        return self.allocate + self.evict + self.keep


def page_costs(num_pages: int, *, path: int = 1000, fresh: int = 256, runs: int = 3) -> PageCosts:
    """A full pool: prompts of `fresh` tokens take their pages from paths of `path` tokens, as the scheduler does it.

    Each of `runs` turns a quarter of the pool over; the medians of their means are reported.
    """
    random = np.random.default_rng(0)
    pool = PagePool(num_pages)
    cache = RadixCache(pool)
    while pool.num_free:
        _keep(pool, cache, random, min(path, pool.num_free))
    measured: list[tuple[float, float, float]] = []
    for _ in range(runs):
        seconds, pages = np.zeros(3), 0
        while pages < max(num_pages // 4, fresh):
            start = time.thread_time()
            short = fresh - pool.num_free
            if short > 0:
                cache.evict(short)
            evicted = time.thread_time()
            allocated = pool.allocate(fresh)
            done = time.thread_time()
            timeline = _timeline(random, fresh)
            begin = time.thread_time()
            cache.keep(timeline, "", allocated)
            seconds += done - evicted, evicted - start, time.thread_time() - begin
            pages += fresh
        measured.append(tuple(1e6 * seconds / pages))
    allocate, evict, keep = (statistics.median(column) for column in zip(*measured, strict=True))
    return PageCosts(allocate, evict, keep, 1e6 * _time(cache.evictable))


def _keep(pool: PagePool, cache: RadixCache, random: np.random.Generator, tokens: int) -> None:
    pages = pool.allocate(tokens)
    pool.free(cache.keep(_timeline(random, tokens), "", pages))


def _timeline(random: np.random.Generator, tokens: int) -> Timeline:
    operations: list[Operation] = [Append(tuple(random.integers(10, VOCABULARY, tokens).tolist()))]
    return Timeline(operations)


def _time(call: Callable[[], object], runs: int = 21) -> float:
    """Median seconds."""
    times = []
    for _ in range(runs):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return statistics.median(times)
