"""Prometheus metrics: the engine's own numbers read at scrape time, and what only the HTTP side sees (DESIGN A10).

docs/metrics.md has the table of all of them; a test holds the two together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from akv_jax.stats import Distribution, EngineStats, Histogram

#: Seconds; from one decode step on a GPU to a long prompt on a CPU.
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics(Collector):
    """What the HTTP side counts, all of it from the event loop's thread."""

    def __init__(self) -> None:
        #: By finish reason, and by why they were refused.
        self.finished: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.time_to_first_token = Histogram(LATENCY_BUCKETS)
        self.inter_token_latency = Histogram(TOKEN_LATENCY_BUCKETS)
        self.latency = Histogram(LATENCY_BUCKETS)

    def render(self, stats: EngineStats | None) -> bytes:
        """All of it as Prometheus text, the engine's part only where there are `stats`."""
        registry = CollectorRegistry()
        registry.register(self)
        if stats is not None:
            registry.register(EngineCollector(stats))
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        yield _counters("request_success", "Requests that finished.", "finished_reason", self.finished)
        yield _counters("requests_refused", "Requests answered with an error.", "reason", self.refusals)
        yield _histogram(
            "time_to_first_token_seconds",
            "From the body's arrival to the first token.",
            self.time_to_first_token.snapshot(),
        )
        yield _histogram(
            "inter_token_latency_seconds",
            "Between one token and the next of the same request.",
            self.inter_token_latency.snapshot(),
        )
        yield _histogram(
            "e2e_request_latency_seconds", "From the body's arrival to the last token.", self.latency.snapshot()
        )


class EngineCollector(Collector):
    """One snapshot of the engine, as Prometheus has it."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterator[Metric]:
        stats = self._stats
        pages = {state: getattr(stats, f"pages_{state}") for state in ("free", "cached", "leased", "private")}
        yield _gauges("pages", "Pages (one token's KV each) by who holds them.", "state", pages)
        in_use = (stats.pages_leased + stats.pages_private) / max(1, sum(pages.values()))
        yield _gauge("kv_cache_usage_perc", "Share of pages that running requests hold, 1 is all.", in_use)
        births = stats.pages_cached + stats.pages_leased - stats.derived_pages
        versions = {"birth": births, "derived": stats.derived_pages}
        yield _gauges("cache_version_pages", "Cached pages by version: as computed, or turned.", "version", versions)
        yield _gauge("cache_tombstones", "Tokens that the cache remembers without a page.", stats.tombstones)
        yield _gauge("num_requests_running", "Requests in the batch.", stats.num_running)
        yield _gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)

    def _counters(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text in (
            ("compilations", "Programs compiled; does not move after warm-up."),
            ("requests", "Requests accepted."),
            ("requests_aborted", "Requests that ended before their time, as by a client that hung up."),
            ("prompt_tokens", "Logical prompt tokens accepted."),
            ("generation_tokens", "Generated tokens."),
            ("forwards", "Forward passes."),
            ("computed_tokens", "Queries of all forward passes, prompts and generated tokens."),
            ("restored_tokens", "Tokens computed again because their pages had been evicted."),
            ("drop_skipped_tokens", "Prompt tokens that were dropped and never read again."),
            ("copied_pages", "Pages turned into another page by a reposition; none in on_read mode."),
            ("derived_hops", "Of those, pages turned from one that had been turned before."),
            ("preemptions", "Running requests put back into the queue."),
            ("transfers_failed", "Transfers between the two pools that came to nothing."),
            ("prefix_cache_queries", "Prompt tokens of requests that were answered."),
            ("prefix_cache_misses", "Of those, tokens that were computed: one a request at least."),
        ):
            yield CounterMetricFamily(f"akv:{name}", text, getattr(stats, f"{name}_total"))
        hits = {"exact": stats.prefix_cache_hits_exact_total, "rotated": stats.prefix_cache_hits_rotated_total}
        yield _counters(
            "prefix_cache_hits", "Of those, tokens found at their position, or turned to it.", "match", hits
        )

        moved = {"to_decode": stats.pages_to_decode_total, "to_prefill": stats.pages_to_prefill_total}
        yield _counters("transferred_pages", "Pages moved between prefill's and decode's pools.", "direction", moved)
        evicted = dict(stats.evicted_pages_total)
        yield _counters("evicted_pages", "Pages that the cache gave up for want of room.", "class", evicted)

    def _histograms(self) -> Iterator[Metric]:
        stats = self._stats
        yield _histogram("request_queue_time_seconds", "From acceptance to the first step.", stats.queue_time)
        yield _histogram("request_closure_tokens", "What a request computes before its next token.", stats.closure)
        yield _histogram("step_time_seconds", "A step: schedule, plan, forward pass, sampling.", stats.step_time)
        yield _histogram("plan_time_seconds", "Of a step: match, schedule and plan, on the host.", stats.plan_time)
        yield _histogram("step_tokens", "Queries of a step.", stats.step_tokens)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"akv:{name}", text, value)


def _gauges(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(f"akv:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(f"akv:{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, values: Distribution) -> Metric:
    """Prometheus' buckets are cumulative."""
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(values.counts), strict=True))
    return HistogramMetricFamily(f"akv:{name}", text, buckets=buckets, sum_value=values.total)
