"""The real server on a free port of this machine, in a thread of this process, and a client for it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from prometheus_client.parser import text_string_to_metric_families

from akv_jax.async_engine import AsyncEngine
from akv_jax.engine import Engine
from akv_jax.serve import listen
from serving.app import create_app
from serving.settings import Settings

#: A server that does nothing for this long has a fault.
TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer: seconds from sending it to its first and to its last event, and its usage and cache."""

    first_token: float
    seconds: float
    usage: dict[str, Any]
    cache: dict[str, int]


class Refused(RuntimeError):
    """The server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


@contextmanager
def serving(make_engine: Callable[[], Engine]) -> Iterator[str]:
    """Serve an engine over HTTP; gives the URL. The engine is stopped at the end."""
    engine = AsyncEngine(make_engine)
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine, Settings(log_level="error")), log_config=None, timeout_graceful_shutdown=5)
    )
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    engine.start()
    try:
        engine.wait_ready()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def client(url: str) -> httpx.AsyncClient:
    """For `ask`."""
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS, limits=httpx.Limits(max_connections=None))


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Stream one chat completion, greedy and of the full `max_tokens`. Raises Refused if the server does."""
    body = {"temperature": 0, "ignore_eos": True, **body, "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    first, last = None, None
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise Refused(response.status_code, (await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line == "data: [DONE]":
                continue
            first = time.perf_counter() - start if first is None else first
            last = json.loads(line[5:])
    if first is None or last is None or "usage" not in last:
        raise RuntimeError(f"the stream ended without usage; its last event was {last}")
    return Answer(first, time.perf_counter() - start, last["usage"], last["cache"])


def ask_now(url: str, body: dict[str, Any]) -> Answer:
    """`ask`, alone."""

    async def one() -> Answer:
        async with client(url) as http:
            return await ask(http, body)

    return asyncio.run(one())


def counters(url: str) -> dict[str, float]:
    """Every counter of /metrics by name, with its labels if it has any: `akv:preemptions`, `akv:x{kind=y}`."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        if family.type != "counter":
            continue
        for sample in family.samples:
            if sample.name.endswith("_total"):
                labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
                found[family.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return found
