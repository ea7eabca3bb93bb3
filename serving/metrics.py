"""Prometheus metrics: the engine's own numbers read at scrape time, and what only the HTTP side sees (DESIGN A10)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from akv_jax.engine import EngineStats

#: Seconds; from one decode step on a GPU to a long prompt on a CPU.
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TOKEN_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class EngineCollector(Collector):
    """One snapshot of the engine, as Prometheus has it."""

    def __init__(self, stats: EngineStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        pages = GaugeMetricFamily("akv:pages", "Pages (one token's KV each) by who holds them.", labels=["state"])
        for state in ("free", "cached", "leased", "private"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        yield GaugeMetricFamily("akv:num_requests_running", "Requests in the batch.", stats.num_running)
        yield GaugeMetricFamily("akv:num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        for name, text in (
            ("compilations", "Programs compiled; does not move after warm-up."),
            ("requests_aborted", "Requests that ended before their time, as by a client that hung up."),
            ("requests", "Requests accepted."),
            ("forwards", "Forward passes."),
            ("prompt_tokens", "Logical prompt tokens."),
            ("computed_tokens", "Prompt tokens that were computed."),
            ("generation_tokens", "Generated tokens."),
            ("preemptions", "Running requests put back into the queue."),
        ):
            yield CounterMetricFamily(f"akv:{name}", text, getattr(stats, f"{name}_total"))


class Metrics:
    """What the HTTP side counts, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.finished = Counter(
            "akv:request_success", "Requests that finished.", ["finished_reason"], registry=registry
        )
        self.refusals = Counter(
            "akv:requests_refused", "Requests answered with an error.", ["reason"], registry=registry
        )
        self.time_to_first_token = Histogram(
            "akv:time_to_first_token_seconds",
            "From arrival to the first token.",
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )
        self.inter_token_latency = Histogram(
            "akv:inter_token_latency_seconds",
            "Between one token and the next of the same request.",
            registry=registry,
            buckets=TOKEN_LATENCY_BUCKETS,
        )
        self.latency = Histogram(
            "akv:e2e_request_latency_seconds",
            "From arrival to the last token.",
            registry=registry,
            buckets=LATENCY_BUCKETS,
        )

    def render(self, stats: EngineStats | None) -> bytes:
        """All of it, the engine's part only where there are `stats`."""
        text = generate_latest(self._registry)
        if stats is not None:
            snapshot = CollectorRegistry()
            snapshot.register(EngineCollector(stats))
            text += generate_latest(snapshot)
        return text
