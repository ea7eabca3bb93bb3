"""A client that hangs up takes its work with it, at every stage."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from akv_jax.engine import Executor
from akv_jax.planning.plan import StepPlan
from akv_jax.runtime.runner import SamplingPlan, StepResult
from tests.serving.fake_engine import FakeEngine, endless, silent
from tests.serving.running import Running, eventually, send

Fake = tuple[Running, FakeEngine]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, endless], ids=["prefill", "decode"])
def test_hanging_up_aborts_the_request(fake: Fake, script: object, stream: bool) -> None:
    server, engine = fake
    engine.script = script
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": stream}).encode()
    connection = send(server, body)
    eventually(lambda: engine.running == 1)
    if script is endless and stream:
        assert b"200 OK" in connection.recv(64)
    connection.close()
    eventually(lambda: engine.running == 0)
    assert engine.aborted == 1
    eventually(lambda: "finish=abort" in server.log.getvalue())


def test_hanging_up_while_sending_starts_nothing(fake: Fake) -> None:
    server, engine = fake
    send(server, b'{"messages": [', length=1000).close()
    time.sleep(0.1)
    assert engine.running == engine.aborted == 0
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "path, reading",
    [
        ("/v1/chat/completions", "serving.chat.prepare"),
        ("/v1/completions", "serving.completions.parse_prompt"),
        ("/v1/sequence", "serving.sequence.parse_operations"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_while_the_body_is_read_submits_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, path: str, reading: str, stream: bool
) -> None:
    """Tokenising and compiling grammars take a while, in a thread: who has left by then has left."""
    server, engine = fake
    module, _, name = reading.rpartition(".")
    real, begun, go_on = getattr(sys.modules[module], name), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(reading, slow)
    body = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "operations": [["append", [1]]]}
    connection = send(server, json.dumps({**body, "stream": stream}).encode(), path=path)
    assert begun.wait(10)
    connection.close()
    eventually(lambda: "status=499" in server.log.getvalue())
    go_on.set()
    time.sleep(0.1)
    assert engine.running == engine.aborted == 0


def test_a_slow_stream_is_kept_alive_by_comments(fake: Fake) -> None:
    server, engine = fake
    engine.script = silent
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert next(response.iter_lines()).startswith(": keep-alive")
    eventually(lambda: engine.running == 0)


def test_hanging_up_at_any_moment_leaves_the_engine_whole(tiny: Running) -> None:
    """Before, while and after the engine takes the request up: it is busy, so that it takes some up late."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Hi " * 30}], "max_tokens": 3, "ignore_eos": True}
    ).encode()
    for round_ in range(40):
        connection = send(tiny, body)
        time.sleep(0.001 * round_)
        connection.close()
    eventually(lambda: "akv:num_requests_running 0.0" in tiny.http.get("/metrics").text)
    assert 'akv:pages{state="private"} 0.0' in tiny.http.get("/metrics").text
    assert tiny.post("/v1/chat/completions", body).status_code == 200
    assert tiny.http.get("/health").status_code == 200


class Slow:
    """An executor whose steps take long enough to be counted from outside."""

    def __init__(self, executor: Executor) -> None:
        self.steps = 0
        self._executor = executor

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        self.steps += 1
        time.sleep(0.25)
        return self._executor.run(plan, sampling)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [1, 200], ids=["decode", "prefill"])
def test_work_ends_within_two_steps(tiny: Running, monkeypatch: pytest.MonkeyPatch, prompt: int, stream: bool) -> None:
    """After a client has hung up: the step that runs, and at most one more."""
    engine = tiny.state.require_engine()._require()  # pyright: ignore[reportPrivateUsage]
    slow = Slow(engine.executor)
    monkeypatch.setattr(engine, "executor", slow)
    # Many chunks for the long prompt, so that the client can leave in the middle of it.
    monkeypatch.setattr(engine.scheduler, "config", replace(engine.config, chunked_prefill_size=10))
    ids = [3 + i % 7 for i in range(prompt)]
    body = json.dumps(
        {"prompt": ids, "max_tokens": 40, "ignore_eos": True, "stream": stream, "cache_salt": f"{stream}"}
    )
    connection = send(tiny, body.encode(), path="/v1/completions")
    eventually(lambda: slow.steps >= 3)
    connection.close()
    steps = slow.steps
    eventually(lambda: not engine.busy)
    time.sleep(0.6)
    assert steps <= slow.steps <= steps + 2
    assert engine.stats().pages_private == 0
