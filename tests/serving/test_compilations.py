"""Nothing compiles after warm-up, whatever is asked for (DESIGN R3): several buckets, layer by layer as on any CPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import pytest
from prometheus_client.parser import text_string_to_metric_families

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel
from tests.serving.running import Running, check_pages, running
from tests.tiny_engine import quick_compiles

BUCKETS = (1, 16, 64)
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FORMS: list[dict[str, Any]] = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}},
]


@pytest.fixture
def server(model: LoadedModel) -> Iterator[Running]:
    config = EngineConfig(
        context_length=1536,
        num_pages=2000,
        max_running_requests=4,
        chunked_prefill_size=BUCKETS[-1],
        max_list_entries=1 << 13,
        tile=16,
    )
    engine = AsyncEngine(lambda: Engine(model, config))
    with quick_compiles(), running(engine) as server:
        engine.start()
        engine.wait_ready()
        yield server


def requests(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Paths and bodies without end: edits, grammars, tools and sampling of all kinds, and other endpoints than chat."""
    draw = random.Random(seed)
    for number in itertools.count():
        text = chr(97 + number % 26) * draw.choice((1, 20, 100))
        body: dict[str, Any] = {"max_tokens": draw.randint(1, 6), "temperature": draw.choice((0, 0.8))}
        body |= draw.choice(({}, {"seed": number}, {"top_p": 0.9, "top_k": 5, "min_p": 0.01}))
        body |= draw.choice(({}, {"logprobs": True, "top_logprobs": draw.choice((0, 20))}))
        body |= draw.choice(({}, {"repetition_penalty": 1.2, "presence_penalty": 0.5}, {"logit_bias": {"70": 5}}))
        messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k in range(2 * draw.randint(0, 2) + 1)]
        chat = body | {"messages": messages, "stream": draw.random() < 0.3}
        last = len(messages) - 1
        kind = number % 5
        if kind == 0:
            yield "/v1/chat/completions", chat | {"response_format": draw.choice(FORMS)}
        elif kind == 1:
            yield "/v1/chat/completions", chat | {"tools": [LOOK], "tool_choice": draw.choice(("auto", "required"))}
        elif kind == 2:
            edits = {"drop": {str(last): [{"message": last, "tokens": [0, 3]}]}, "reposition": [last]}
            yield "/v1/chat/completions", chat | {"cache": edits}
        elif kind == 3:
            body["logprobs"] = draw.choice((None, 3))
            yield "/v1/completions", body | {"prompt": text}
        else:
            operations = [["append", [5, 6, 7, number % 60]], ["drop", [1]], ["reposition"], ["append", [8]]]
            yield "/v1/sequence", {"operations": operations, "max_tokens": body["max_tokens"]}


def counter(server: Running, name: str) -> float:
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    (value,) = (sample.value for family in families for sample in family.samples if sample.name == name)
    return value


def widths(server: Running) -> dict[str, float]:
    """How many steps had at most so many queries."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = (sample for family in families for sample in family.samples)
    return {s.labels["le"]: s.value for s in samples if s.name == "akv:step_tokens_bucket"}


def test_two_hundred_mixed_requests_compile_nothing(server: Running) -> None:
    assert server.state.engine.config.token_buckets == () and counter(server, "akv:compilations_total") > 0
    before = counter(server, "akv:compilations_total")

    def ask(request: tuple[str, dict[str, Any]]) -> None:
        response = server.post(*request)
        assert response.status_code == 200, (request, response.text)
        assert '"error"' not in response.text

    mixed = requests(0)
    with ThreadPoolExecutor(max_workers=6) as several:
        for _ in several.map(ask, itertools.islice(mixed, 190)):
            pass
    # Alone, it decodes in steps of one query.
    for request in itertools.islice(mixed, 10):
        ask(request)
    check_pages(server)
    assert counter(server, "akv:requests_total") >= 200
    # Every bucket was used.
    told = widths(server)
    assert 0 < told["1.0"] < told["16.0"] < told["64.0"] == told["+Inf"]
    assert counter(server, "akv:compilations_total") == before
    # And it counts.
    jax.jit(lambda x: x * 1.2345)(1.0)
    assert counter(server, "akv:compilations_total") > before
