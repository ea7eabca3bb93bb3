"""Bodies of 50 MB, and millions of elements: a clear answer soon, and others are served meanwhile (DESIGN A7, A10)."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest

import serving.sequence
from tests.serving.bad_input import CHAT, HELLO, SEQUENCE
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import Running, check_pages

#: Characters.
HUGE = 50_000_000


class Watch:
    """Asks `/health` for as long as it is open; `longest` is the longest that it had to wait, seconds."""

    def __init__(self, server: Running) -> None:
        self.longest = 0.0
        self._url, self._over = server.url, threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._over.wait(0.02):
                begun = time.monotonic()
                assert http.get("/health").status_code == 200
                self.longest = max(self.longest, time.monotonic() - begun)


def assistant(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", **fields}, *HELLO]}


def called(arguments: str) -> dict[str, Any]:
    return assistant(tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}])


def declared(description: str) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "description": description}}
    return {"messages": HELLO, "tools": [tool]}


#: Contents and completions are in test_hostile.py.
BODIES: dict[str, tuple[str, Any, str]] = {
    "reasoning": (CHAT, lambda: assistant(reasoning_content="x" * HUGE), "messages"),
    "arguments": (CHAT, lambda: called('{"a": "' + "x" * HUGE + '"}'), "messages"),
    "messages": (CHAT, lambda: {"messages": [{"role": "user", "content": "x" * 999}] * (HUGE // 1000)}, "messages"),
    "tools": (CHAT, lambda: declared("x" * HUGE), "tools"),
    "tokens": (CHAT, lambda: assistant(token_ids=[70] * 1_000_000), "messages"),
    "tokenize prompt": ("/tokenize", lambda: {"prompt": "x" * HUGE}, "prompt"),
    "tokenize messages": ("/tokenize", lambda: assistant(reasoning_content="x" * HUGE), "messages"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
def test_what_cannot_fit_is_refused_at_once(roomy: Running, kind: str) -> None:
    """6,144 positions and tokens of at most 12 characters: nothing here is worth tokenising."""
    path, body, param = BODIES[kind]
    content = httpx.Request("POST", "http://x", json=body()).read()
    with Watch(roomy) as watch:
        begun = time.monotonic()
        response = roomy.http.post(path, content=content)
        seconds = time.monotonic() - begun
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "maximum context length is 6144 tokens" in error["message"]
    # A second or so where nobody else computes; tokenising takes a minute, and would hold up everybody.
    assert seconds < 30 and watch.longest < 10
    check_pages(roomy)


def test_what_fits_by_repositions_is_not_refused(tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions count, not characters (A7): the sum is only taken from one reposition to the next."""
    # As if every character were a token, which here it is.
    monkeypatch.setattr(tiny.state, "_longest", 1)
    body = {"messages": [{"role": "user", "content": "x" * 150}] * 4, "max_tokens": 1}
    assert tiny.post(CHAT, body).json()["error"]["code"] == "context_length_exceeded"
    edits = {"drop": {"0": [0], "1": [1], "2": [2]}, "reposition": [0, 1, 2]}
    assert tiny.post(CHAT, {**body, "cache": edits}).status_code == 200
    only_drops = {"drop": edits["drop"]}
    assert tiny.post(CHAT, {**body, "cache": only_drops}).json()["error"]["code"] == "context_length_exceeded"
    check_pages(tiny)


def test_many_ids_to_detokenize(tiny: Running) -> None:
    response = tiny.post("/detokenize", {"tokens": [70] * 300_000})
    assert len(response.json()["prompt"]) == 300_000


@pytest.mark.parametrize("path", [SEQUENCE, "/detokenize"])
def test_elements_are_looked_at_beside_the_event_loop(
    fake: tuple[Running, FakeEngine], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server, _ = fake
    threads: list[str] = []

    def seen(*_: Any) -> Any:
        threads.append(threading.current_thread().name)
        raise ZeroDivisionError

    monkeypatch.setattr(serving.sequence, "parse_operations", seen)
    monkeypatch.setattr("serving.tokens.check_token_ids", seen)
    assert server.post(path, {"operations": [["append", [1]]], "tokens": [1]}).status_code == 500
    assert threads and threads[0].startswith("asyncio_")


def test_a_million_times_the_same_drop(roomy: Running) -> None:
    body = {"messages": [*HELLO, *HELLO], "max_tokens": 1, "cache": {"drop": {"0": [0] * 1_000_000}}}
    with Watch(roomy) as watch:
        assert roomy.post(CHAT, body).status_code == 200
    assert watch.longest < 10
    check_pages(roomy)
