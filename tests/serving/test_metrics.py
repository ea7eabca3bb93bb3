"""Every metric is in docs/metrics.md and the other way round; the HTTP side's numbers move as they should."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from akv_jax.errors import Reason, RequestError
from akv_jax.request import Output, Request
from tests.serving.fake_engine import USAGE, FakeEngine, failing
from tests.serving.running import Running, eventually, running

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
MESSAGES = [{"role": "user", "content": "Hi"}]


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def timed(fake: tuple[Running, FakeEngine]) -> Iterator[tuple[Running, FakeEngine, Clock]]:
    """A server of its own, whose clock moves only as the engine's script says."""
    _, engine = fake
    clock = Clock()
    with running(engine, clock) as server:
        yield server, engine, clock


def documented() -> dict[str, tuple[str, str, frozenset[str]]]:
    """The table of docs/metrics.md: name to type, label and the label's values."""
    rows = {}
    for line in DOCS.read_text().splitlines():
        row = re.match(r"\| `(akv:\w+)` \| (\w+) \|([^|]*)\| \S", line)
        if row:
            name, kind, labels = row.groups()
            label, *values = re.findall(r"`(\w+)`", labels) or [""]
            assert name not in rows
            rows[name] = kind, label, frozenset(values)
    return rows


def served(server: Running) -> dict[str, tuple[str, str, frozenset[str]]]:
    """The same of what is served. A counter's family is named without its `_total`."""
    result = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        assert family.documentation
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {pair for sample in family.samples for pair in sample.labels.items() if pair[0] != "le"}
        names = {label for label, _ in labels} or {""}
        assert len(names) == 1
        result[name] = family.type, names.pop(), frozenset(value for _, value in labels)
    return result


def samples(server: Running) -> dict[str, float]:
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
    }


def test_the_table_and_the_server_agree(tiny: Running) -> None:
    for max_tokens in (1, 200):
        body = {"messages": MESSAGES, "max_tokens": max_tokens, "stop": ["a", "e", "i"]}
        assert tiny.post("/v1/chat/completions", body).status_code == 200
    assert tiny.post("/v1/chat/completions", {}).status_code == 400
    table, there = documented(), served(tiny)
    assert table.keys() == there.keys()
    for name, (kind, label, values) in there.items():
        assert (kind, label) == table[name][:2]
        if table[name][2]:
            assert values <= table[name][2]
        if kind == "gauge":
            assert values == table[name][2]


def test_histograms_are_cumulative_and_whole(tiny: Running) -> None:
    """As Prometheus wants them: buckets that never fall, the last equal to the count, and a sum."""
    tiny.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3})
    for family in text_string_to_metric_families(tiny.http.get("/metrics").text):
        if family.type != "histogram":
            continue
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        counts = [sample.value for sample in buckets]
        bounds = [float(sample.labels["le"]) for sample in buckets]
        rest = {sample.name: sample.value for sample in family.samples if sample not in buckets}
        assert bounds == sorted(bounds) and bounds[-1] == float("inf")
        assert counts == sorted(counts) and counts[-1] == rest[f"{family.name}_count"] > 0
        assert rest[f"{family.name}_sum"] >= 0


def test_latencies_are_the_clocks(timed: tuple[Running, FakeEngine, Clock]) -> None:
    """2 s to the first token, then 0.5 s, then two tokens within 1 s, then 4 s to the end without a token."""
    server, engine, clock = timed

    async def script(request: Request) -> AsyncGenerator[Output, None]:
        for seconds, tokens in ((2.0, 1), (0.5, 1), (1.0, 2)):
            clock.now += seconds
            yield Output(request.request_id, (65,) * tokens, "A" * tokens)
        clock.now += 4.0
        yield Output(request.request_id, finish_reason="length", usage=USAGE)

    engine.script = script
    assert server.post("/v1/chat/completions", {"messages": MESSAGES}).status_code == 200
    told = samples(server)
    assert (told["akv:time_to_first_token_seconds_count"], told["akv:time_to_first_token_seconds_sum"]) == (1, 2.0)
    assert told["akv:time_to_first_token_seconds_bucket 1.0"] == 0
    assert told["akv:time_to_first_token_seconds_bucket 2.5"] == 1
    # An output of two tokens counts as two, each of half its time.
    assert (told["akv:inter_token_latency_seconds_count"], told["akv:inter_token_latency_seconds_sum"]) == (3, 1.5)
    assert (told["akv:e2e_request_latency_seconds_count"], told["akv:e2e_request_latency_seconds_sum"]) == (1, 7.5)
    assert told["akv:request_success_total length"] == 1


def test_what_ends_otherwise_is_no_success(timed: tuple[Running, FakeEngine, Clock]) -> None:
    server, engine, _ = timed
    engine.script = failing(RequestError(Reason.QUEUE_FULL, "full"))
    assert server.post("/v1/chat/completions", {"messages": MESSAGES}).status_code == 503
    assert server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 0}).status_code == 400
    engine.script = failing(ValueError("a bug"), after=1)
    assert server.post("/v1/chat/completions", {"messages": MESSAGES}).status_code == 500
    eventually(lambda: engine.running == 0)
    told = samples(server)
    for reason in (Reason.QUEUE_FULL, Reason.INVALID_REQUEST):
        assert told[f"akv:requests_refused_total {reason.value}"] == 1
    assert not any(name.startswith("akv:request_success_total") for name in told)
    assert told["akv:time_to_first_token_seconds_count"] == 1 and told["akv:e2e_request_latency_seconds_count"] == 0


def test_gauges_of_pages(fake: tuple[Running, FakeEngine]) -> None:
    """As the fake engine tells them."""
    told = samples(fake[0])
    assert [told[f"akv:pages {state}"] for state in ("free", "cached", "leased", "private")] == [250, 3, 2, 1]
    assert told["akv:kv_cache_usage_perc"] == 3 / 256
