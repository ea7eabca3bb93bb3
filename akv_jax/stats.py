"""What the engine counts and measures: plain numbers, read as one snapshot between two steps.

Times come from the clock that the engine was given (DESIGN R6), so that a simulation measures its own.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from akv_jax.request import Usage

#: Seconds from any fixed moment; never goes back.
Clock = Callable[[], float]

#: Seconds: from a decode step of a small model to a queue on a busy machine.
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
QUEUE_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
#: Tokens.
TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram as it stood. `counts` has an entry for each bound, of the values above the bound before it and not
    above this one, and a last one for those above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values by ascending upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._total = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def snapshot(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), self._total)


@dataclass(slots=True)
class Meter:
    """The engine's counters, from its start, and its histograms."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    forwards: int = 0
    computed_tokens: int = 0
    #: Prompt tokens of requests that have their first output token, and what became of them (DESIGN A6).
    looked_up: int = 0
    hits_exact: int = 0
    hits_rotated: int = 0
    misses: int = 0
    drop_skipped: int = 0
    #: With prefill and decode apart: pages that have moved between them, and transfers that came to nothing.
    pages_to_decode: int = 0
    pages_to_prefill: int = 0
    transfers_failed: int = 0
    queue_time: Histogram = field(default_factory=lambda: Histogram(QUEUE_BUCKETS))
    plan_time: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS))
    step_time: Histogram = field(default_factory=lambda: Histogram(STEP_BUCKETS))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))
    closure: Histogram = field(default_factory=lambda: Histogram(TOKEN_BUCKETS))

    def stepped(self, queries: int, plan_time: float, step_time: float) -> None:
        """A forward pass has run: its queries, and seconds until it was planned and until its end."""
        self.forwards += 1
        self.computed_tokens += queries
        self.step_tokens.observe(queries)
        self.plan_time.observe(plan_time)
        self.step_time.observe(step_time)

    def answered(self, usage: Usage) -> None:
        """A request has its first output token."""
        self.looked_up += usage.prompt_tokens
        self.hits_exact += usage.cached_tokens
        self.hits_rotated += usage.repos_tokens
        self.misses += usage.computed_tokens
        self.drop_skipped += usage.drop_skipped_tokens


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers for /metrics. Totals count from the start of the engine; docs/metrics.md says what each one means.

    evicted_pages_total: by `EvictionClass` in small letters, and "forgotten".
    """

    num_running: int
    num_waiting: int
    pages_free: int
    pages_cached: int
    pages_leased: int
    pages_private: int
    derived_pages: int
    tombstones: int
    requests_total: int
    requests_aborted_total: int
    prompt_tokens_total: int
    generation_tokens_total: int
    forwards_total: int
    computed_tokens_total: int
    restored_tokens_total: int
    copied_pages_total: int
    derived_hops_total: int
    evicted_pages_total: Mapping[str, int]
    preemptions_total: int
    compilations_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_exact_total: int
    prefix_cache_hits_rotated_total: int
    prefix_cache_misses_total: int
    drop_skipped_tokens_total: int
    pages_to_decode_total: int
    pages_to_prefill_total: int
    transfers_failed_total: int
    queue_time: Distribution
    plan_time: Distribution
    step_time: Distribution
    step_tokens: Distribution
    closure: Distribution
