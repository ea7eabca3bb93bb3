"""What the engine counts and measures, on a clock that only the executor moves (DESIGN R6, A6)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.planning.plan import StepPlan
from akv_jax.request import Output, Request, Sampling, Usage
from akv_jax.runtime.runner import SamplingPlan, StepResult
from akv_jax.stats import Distribution, EngineStats, Histogram
from spec.operations import Append, Drop, History, Reposition
from tests.shared_engines import shared

#: Seconds that a forward pass takes on the tests' clock.
FORWARD = 2.0


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Timed:
    """An executor whose passes take `FORWARD` seconds."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._executor, self._clock = engine.executor, clock

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        self._clock.now += FORWARD
        return self._executor.run(plan, sampling)


def timed_engine(mode: RepositionMode = "on_read", **settings: Any) -> tuple[Engine, Clock]:
    """A warm engine with a cache, and the clock it reads."""
    tiny, clock = shared(mode), Clock()
    engine = Engine(tiny.model, dataclasses.replace(tiny.settings, **settings), runner=tiny.runner, clock=clock)
    engine.executor = Timed(engine, clock)
    return engine, clock


def request(name: str, history: History, max_tokens: int = 1) -> Request:
    return Request(name, history, Sampling(max_tokens=max_tokens, temperature=0.0))


def serve(engine: Engine, *requests: Request) -> dict[str, Usage]:
    """To the end, all submitted at once, the pages checked after every step (C7)."""
    outputs: list[Output] = []
    for one in requests:
        engine.submit(one)
    while engine.busy:
        outputs += engine.step()
        engine.check()
    return {output.request_id: output.usage for output in outputs if output.usage is not None}


def count(values: Distribution) -> int:
    return sum(values.counts)


def test_histogram_bounds_are_upper_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.1):
        histogram.observe(value)
    assert histogram.snapshot() == Distribution((1.0, 2.0), (2, 2, 1), pytest.approx(6.6))


def test_times_are_the_clocks() -> None:
    """Two requests, one place: a step takes as long as its pass, and the second waits for all steps of the first."""
    engine, clock = timed_engine(max_running_requests=1)
    engine.submit(request("first", (Append((1, 2, 3)),), max_tokens=4))
    clock.now += 0.25
    serve(engine, request("second", (Append((4, 5, 6)),), max_tokens=2))
    stats = engine.stats()
    assert (count(stats.step_time), stats.step_time.total) == (6, 6 * FORWARD)
    assert (count(stats.plan_time), stats.plan_time.total) == (6, 0.0)
    assert (count(stats.queue_time), stats.queue_time.total) == (2, 0.25 + 4 * FORWARD)
    assert (count(stats.step_tokens), stats.step_tokens.total) == (6, stats.computed_tokens_total)


@pytest.mark.parametrize("mode", ["on_read", "copy"])
def test_hits_misses_and_restored_are_the_usages(mode: RepositionMode) -> None:
    """A6: the four kinds of prompt token, summed over all requests; every one moves when it should."""
    engine, _ = timed_engine(mode)
    told: list[Usage] = []
    edited = (Append(tuple(range(40))), Drop(frozenset(range(5, 20))), Reposition(), Append((1, 2, 3)))

    def turn(name: str, history: History) -> tuple[EngineStats, EngineStats]:
        before = engine.stats()
        told.extend(serve(engine, request(name, history)).values())
        return before, engine.stats()

    before, after = turn("cold", (Append(tuple(range(40))),))
    assert after.prefix_cache_misses_total - before.prefix_cache_misses_total == 40
    assert after.prefix_cache_hits_exact_total == after.prefix_cache_hits_rotated_total == 0
    before, after = turn("edited", edited)
    # 0..4 stay where they are, 20..39 are turned, 5..19 are neither read nor computed.
    assert after.prefix_cache_hits_exact_total - before.prefix_cache_hits_exact_total == 5
    assert after.drop_skipped_tokens_total - before.drop_skipped_tokens_total == 15
    assert after.prefix_cache_hits_rotated_total - before.prefix_cache_hits_rotated_total == 20
    assert after.prefix_cache_misses_total - before.prefix_cache_misses_total == 3
    assert (after.copied_pages_total - before.copied_pages_total) == (20 if mode == "copy" else 0)
    assert after.restored_tokens_total == 0
    engine.flush_cache()
    before, after = turn("flushed", edited)
    assert after.restored_tokens_total - before.restored_tokens_total == told[-1].restored_tokens
    assert after.prefix_cache_misses_total - before.prefix_cache_misses_total == told[-1].computed_tokens == 43

    stats = engine.stats()
    assert stats.prefix_cache_queries_total == sum(usage.prompt_tokens for usage in told) == stats.prompt_tokens_total
    assert stats.prefix_cache_queries_total == (
        stats.prefix_cache_hits_exact_total
        + stats.prefix_cache_hits_rotated_total
        + stats.prefix_cache_misses_total
        + stats.drop_skipped_tokens_total
    )


def test_restored_tokens_are_those_that_were_there_once() -> None:
    """C6: dropped pages go first and leave a hole; who needs them computes them again, and that is counted."""
    engine, _ = timed_engine()
    whole = Append(tuple(range(40)))
    serve(engine, request("one", (whole, Drop(frozenset(range(5, 20))), Append((1,)))))
    assert engine.cache.evict(15) == 15 and engine.stats().restored_tokens_total == 0
    usage = serve(engine, request("two", (whole, Append((9,)))))["two"]
    assert (usage.computed_tokens, usage.restored_tokens) == (16, 15)
    assert engine.stats().restored_tokens_total == 15


def test_closures() -> None:
    """C6: one observation a start, of what is computed before the next token: everything, or what is new."""
    engine, _ = timed_engine()
    serve(engine, request("cold", (Append(tuple(range(40))),), max_tokens=5))
    assert (count(engine.stats().closure), engine.stats().closure.total) == (1, 40)
    serve(engine, request("warm", (Append((*range(40), 50, 51)),), max_tokens=5))
    assert (count(engine.stats().closure), engine.stats().closure.total) == (2, 42)


def test_preemptions_count_and_queue_once() -> None:
    """A retraction is counted; the wait in the queue is measured once for a request, its closure at every start."""
    engine, _ = timed_engine(num_pages=60)
    usages = serve(engine, *(request(name, (Append((index,) * 20),), 25) for index, name in enumerate("abc")))
    stats = engine.stats()
    assert len(usages) == 3 and stats.preemptions_total > 0
    assert count(stats.queue_time) == 3
    assert count(stats.closure) == 3 + stats.preemptions_total
    assert stats.generation_tokens_total == 75


def test_aborted_and_refused_requests_are_not_answered_ones() -> None:
    engine, _ = timed_engine(chunked_prefill_size=4)
    engine.submit(request("gone", (Append(tuple(range(30))),)))
    engine.step()
    engine.abort("gone")
    stats = engine.stats()
    assert (stats.requests_total, stats.requests_aborted_total, stats.prompt_tokens_total) == (1, 1, 30)
    assert (stats.prefix_cache_queries_total, stats.computed_tokens_total, stats.pages_private) == (0, 4, 0)


def test_versions_hops_and_evictions() -> None:
    """C2, C3, C5: pages by version, copies, hops from a turned page once the birth one is gone, evictions by class."""
    engine, _ = timed_engine("copy")
    start = (Append(tuple(range(20))), Drop(frozenset(range(5))), Reposition(), Append((1, 2)))
    serve(engine, request("one", start))
    stats = engine.stats()
    assert (stats.copied_pages_total, stats.derived_pages, stats.derived_hops_total) == (15, 15, 0)
    assert sum(stats.evicted_pages_total.values()) == stats.tombstones == 0
    # Dropped births, and births that their copies replaced: all that was left behind.
    assert engine.cache.evict(20) == 20
    stats = engine.stats()
    assert stats.evicted_pages_total == {
        "left_derived": 0,
        "left_birth": 20,
        "finished_derived": 0,
        "finished_birth": 0,
        "forgotten": 0,
    }
    # Five tokens have no version left.
    assert (stats.tombstones, stats.derived_pages, stats.pages_cached) == (5, 15, 17)
    serve(engine, request("two", (*start, Drop(frozenset({5, 6})), Reposition(), Append((3,)))))
    stats = engine.stats()
    # 7..19 from where they were turned to; 20 and 21 from their birth.
    assert (stats.copied_pages_total, stats.derived_hops_total) == (15 + 15, 13)
    engine.flush_cache()
    after = engine.stats()
    assert (after.derived_pages, after.tombstones, after.pages_cached) == (0, 0, 0)
    # A flush was asked for, and is no eviction.
    assert after.evicted_pages_total == stats.evicted_pages_total
