"""Two real replicas on this machine, by the one command. Minutes of work: `make test-long`, where Ray is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.running import eventually, send

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install '.[ray]'"),
]

ROOT = Path(__file__).parents[2]
SIZES = ["--chunked-prefill-size", "16", "--max-running-requests", "1", "--context-length", "512"]
KEY = "sesame"


class Command:
    """`python -m akv_jax.serve` in a process of its own; what it writes is in `log`."""

    def __init__(self, *flags: str, cache: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "akv_jax.serve", "--port", str(port), *SIZES, *flags]
        environ = {**os.environ, "AKV_JAX_CACHE_DIR": str(cache / "akv"), "AKV_API_KEY": KEY, "HOME": str(cache)}
        self._log = cache / f"log-{port}"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environ)
        self.http = httpx.Client(base_url=self.url, timeout=120, headers={"Authorization": f"Bearer {KEY}"})

    @property
    def log(self) -> str:
        return self._log.read_text()

    def get(self, path: str) -> httpx.Response | None:
        """None while nobody listens."""
        assert self.process.poll() is None, self.log
        try:
            return self.http.get(path)
        except httpx.TransportError:
            return None

    def wait_ready(self, replicas: int, seconds: float = 300) -> None:
        def ready() -> bool:
            response = self.get("/ready")
            return response is not None and response.status_code == 200 and response.json().get("replicas") == replicas

        eventually(ready, seconds)

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> httpx.Response:
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True, **fields}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response

    def metric(self, name: str) -> list[float]:
        """Of each replica, by seat."""
        return [float(value) for value in re.findall(rf'^akv:{name}{{replica="\d+"}} (\S+)$', self._metrics(), re.M)]

    def _metrics(self) -> str:
        return self.http.get("/metrics").text

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def two(tiny_directory: Path, folder: Path) -> Iterator[Command]:
    flags = ["--model", str(tiny_directory), "--replicas", "2", "--cpus-per-replica", "0"]
    command = Command(*flags, "--max-total-tokens", "2048", cache=folder)
    try:
        eventually(lambda: (response := command.get("/health")) is not None and response.status_code == 200, 30)
        # Alive, but nobody is ready.
        refused = command.http.post("/v1/chat/completions", json={"messages": []})
        assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
        command.wait_ready(2)
        yield command
    finally:
        command.process.kill()


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You are one of many."}, {"role": "user", "content": text}]


def home(command: Command, text: str) -> str:
    return command.chat(ask(text)).headers["x-akv-replica"]


def test_a_conversation_stays_where_its_cache_is(two: Command) -> None:
    homes = {}
    for number in range(6):
        messages = ask(f"task {number}")
        first = two.chat(messages)
        homes[number] = first.headers["x-akv-replica"]
        before = first
        for _ in range(4):
            reply = before.json()["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
            after = two.chat(messages)
            assert after.headers["x-akv-replica"] == homes[number]
            # Nearly the whole prompt before.
            cached = after.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0.8 * before.json()["usage"]["prompt_tokens"]
            before = after
    assert set(homes.values()) == {"0", "1"}


def test_answers_are_those_of_one_engine(two: Command, tiny_directory: Path, folder: Path) -> None:
    one = Command("--model", str(tiny_directory), "--max-total-tokens", "2048", cache=folder)
    try:
        eventually(lambda: (response := one.get("/ready")) is not None and response.status_code == 200, 300)
        for number in range(4):
            drop = {"drop": {"3": [2]}, "reposition": [3]}
            more = [{"role": "user", "content": text} for text in ("x" * 20, "y")]
            messages = [*ask(f"compare {number}"), *more]
            answers = [command.chat(messages, cache=drop, logprobs=True).json() for command in (one, two)]
            assert answers[0]["choices"] == answers[1]["choices"]
            assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
        assert one.http.get("/v1/models").json()["data"][0]["id"] == two.http.get("/v1/models").json()["data"][0]["id"]
        assert one.terminate() == 0
    finally:
        one.process.kill()


def test_events_come_one_by_one(two: Command) -> None:
    body = {"messages": ask("stream"), "stream": True, "max_tokens": 200, "ignore_eos": True}
    times = []
    with two.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: "):
                times.append(time.monotonic())
                last = line
    assert last == "data: [DONE]"
    assert len(times) > 100
    # Held back, they would all come at the end.
    assert times[len(times) // 2] - times[0] > 0.2 * (times[-1] - times[0]) > 0


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_aborts_the_request(two: Command, stream: bool) -> None:
    before = sum(two.metric("requests_aborted_total"))
    body = {"messages": ask("endless"), "stream": stream, "max_tokens": 400, "ignore_eos": True}
    connection = send(two.url, json.dumps(body).encode(), headers=f"Authorization: Bearer {KEY}\r\n")
    eventually(lambda: sum(two.metric("num_requests_running")) == 1, 30)
    connection.close()
    eventually(lambda: sum(two.metric("num_requests_running")) == 0, 30)
    assert sum(two.metric("requests_aborted_total")) == before + 1


def test_a_full_home_spills(two: Command) -> None:
    """One request runs at home, one waits; the others find the other replica empty, or wait too."""
    first = home(two, "popular")
    seen: list[str] = []

    def one() -> None:
        seen.append(two.chat(ask("popular"), max_tokens=100).headers["x-akv-replica"])

    threads = [threading.Thread(target=one) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.2)
    for thread in threads:
        thread.join(60)
    assert len(seen) == 4 and set(seen) == {"0", "1"}
    assert seen.count(first) >= 2
    eventually(lambda: home(two, "popular") == first, 10)


def test_questions_to_all(two: Command) -> None:
    answer = two.http.post("/flush_cache").json()
    assert set(answer["replicas"]) == {"0", "1"} and answer["freed_pages"] == sum(answer["replicas"].values()) > 0
    trees = two.http.get("/cache/tree").json()["data"]
    assert [tree["replica"] for tree in trees] == ["0", "1"]
    assert two.http.get("/cache/tree?replica=1").json()["object"] == "cache.tree"
    assert two.http.get("/cache/tree?replica=9").status_code == 400
    assert httpx.post(f"{two.url}/flush_cache").status_code == 401


def test_work_goes_on_without_a_replica_and_comes_home(two: Command) -> None:
    """One is killed in the middle of an answer: the other one gives it, and the killed one's seat is taken again."""
    seat = home(two, "survivor")
    other = {"0": "1", "1": "0"}[seat]
    pid = dict(re.findall(r"replica starts seat=(\d) pid=(\d+)", two.log))[seat]
    answers: list[httpx.Response] = []
    slow = threading.Thread(target=lambda: answers.append(two.chat(ask("survivor"), max_tokens=300)))
    slow.start()
    eventually(lambda: sum(two.metric("num_requests_running")) == 1, 30)
    os.kill(int(pid), signal.SIGKILL)
    slow.join(120)
    assert answers and answers[0].headers["x-akv-replica"] == other
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    assert home(two, "survivor") == other
    two.wait_ready(2)
    assert home(two, "survivor") == seat


def test_sigterm_lets_a_stream_come_to_its_end(two: Command, folder: Path) -> None:
    """The last test: it ends the server."""
    lines: list[str] = []
    begun = threading.Event()

    def stream() -> None:
        body = {"messages": ask("last"), "stream": True, "max_tokens": 200, "ignore_eos": True}
        with two.http.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                begun.set()
                lines.append(line)

    reader = threading.Thread(target=stream)
    reader.start()
    assert begun.wait(30)
    assert two.terminate() == 0
    reader.join(20)
    assert lines[-2:] == ["data: [DONE]", ""]
    # Ray leaves nothing at home.
    assert not (folder / ".ray").exists()


def test_a_model_that_cannot_be_loaded_ends_it(tiny_directory: Path, folder: Path) -> None:
    flags = ["--model", str(tiny_directory), "--replicas", "2", "--cpus-per-replica", "0"]
    command = Command(*flags, "--context-length", "9999", cache=folder)
    try:
        assert command.process.wait(timeout=300) == 2
        assert "error: --context-length 9999: tiny was trained for at most 512 positions" in command.log
    finally:
        command.process.kill()


def test_more_cpus_than_there_are(tiny_directory: Path, folder: Path) -> None:
    flags = ["--model", str(tiny_directory), "--replicas", "2", "--cpus-per-replica", "4000"]
    command = Command(*flags, cache=folder)
    try:
        assert command.process.wait(timeout=120) == 2
        assert "--cpus-per-replica" in command.log
    finally:
        command.process.kill()
