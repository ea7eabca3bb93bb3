"""One line in the log for every request, whatever becomes of it; unknown fields in it, once each."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from akv_jax.errors import Reason, RequestError
from serving.unknown_fields import UnknownFields
from tests.serving.bad_input import CHAT, HELLO, SEQUENCE
from tests.serving.fake_engine import FakeEngine, failing, silent
from tests.serving.running import Running, eventually, running, send
from tests.serving.test_metrics import samples

Fake = tuple[Running, FakeEngine]
ONE = {"messages": HELLO, "max_tokens": 1}


def forget(server: Running) -> None:
    """What has been logged; waits for what is still to come of requests before."""
    time.sleep(0.05)
    server.log.seek(0)
    server.log.truncate()


def only_line(server: Running) -> str:
    """What is logged, which is one line. It comes after the answer."""
    eventually(lambda: server.log.getvalue().endswith("\n"))
    time.sleep(0.05)
    (line,) = server.log.getvalue().splitlines()
    return line


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("POST", CHAT, ONE),
        ("POST", CHAT, {**ONE, "stream": True}),
        ("POST", "/v1/completions", {"prompt": "Hi", "max_tokens": 1}),
        ("POST", SEQUENCE, {"operations": [["append", [1, 2]]], "max_tokens": 1}),
        ("POST", "/tokenize", {"prompt": "Hi"}),
        ("POST", "/detokenize", {"tokens": [70]}),
        ("POST", "/flush_cache", None),
        ("GET", "/v1/models", None),
        ("GET", "/cache/tree", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/metrics", None),
    ],
)
def test_a_success_is_one_line(tiny: Running, method: str, path: str, body: Any) -> None:
    forget(tiny)
    assert tiny.http.request(method, path, json=body).status_code == 200
    line = only_line(tiny)
    assert f" method={method} path={path} status=200 " in line and " total=" in line
    assert ("[debug" if path in ("/health", "/ready", "/metrics") else "[info") in line
    assert ("finish=length" in line) == (path in (CHAT, "/v1/completions", SEQUENCE))


@pytest.mark.parametrize(
    "method, path, body, status, code",
    [
        ("POST", CHAT, b"{", 400, "invalid_request_error"),
        ("POST", CHAT, {"messages": HELLO, "cache": 5}, 400, "invalid_cache"),
        ("POST", "/tokenize", {}, 400, "invalid_request_error"),
        ("GET", "/v1/nothing", None, 404, "not_found"),
        # What a client writes into a path does not become a line of its own.
        ("GET", "/a%0a2026-01-01%20[info]%20all%20is%20well%1b[0m" + "x" * 1000, None, 404, "not_found"),
        ("GET", CHAT, None, 405, "method_not_allowed"),
    ],
)
def test_a_refusal_is_one_line_and_is_counted(
    fake: Fake, method: str, path: str, body: Any, status: int, code: str
) -> None:
    server, _ = fake
    before = samples(server).get(f"akv:requests_refused_total {code}", 0)
    forget(server)
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    assert server.http.request(method, path, **content).status_code == status
    line = only_line(server)
    assert f" status={status} code={code} " in line and "message=" in line
    assert len(line) < 800 and "\x1b" not in line
    assert samples(server)[f"akv:requests_refused_total {code}"] == before + 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_is_one_line(fake: Fake, stream: bool) -> None:
    server, engine = fake
    engine.script = failing(RequestError(Reason.QUEUE_FULL, "the queue is full"))
    before = samples(server).get("akv:requests_refused_total queue_full", 0)
    forget(server)
    assert server.post(CHAT, {"messages": HELLO, "stream": stream}).status_code == 503
    line = only_line(server)
    assert " status=503 " in line and " code=queue_full " in line and " finish=queue_full " in line
    assert samples(server)["akv:requests_refused_total queue_full"] == before + 1


def test_what_never_gets_to_a_route_is_one_line_and_is_counted(model: Any) -> None:
    engine = FakeEngine(model)
    with running(engine, api_key="sesame", max_body_size=1000) as server:
        key = {"Authorization": "Bearer sesame"}
        for status, code, headers, ready in (
            (401, "invalid_api_key", {}, True),
            (413, "request_too_large", key, True),
            (503, "not_ready", key, False),
        ):
            forget(server)
            engine.ready = ready
            content = b"x" * 2000 if status == 413 else json.dumps(ONE).encode()
            assert server.http.post(CHAT, content=content, headers=headers).status_code == status
            assert f" path={CHAT} status={status} code={code} " in only_line(server)
            assert samples(server)[f"akv:requests_refused_total {code}"] == 1


def test_a_failure_of_ours_is_one_line_with_its_traceback(fake: Fake) -> None:
    server, engine = fake
    engine.script = failing(ZeroDivisionError("secret"))
    before = samples(server).get("akv:requests_refused_total server_error", 0)
    forget(server)
    assert server.post(CHAT, {"messages": HELLO}).status_code == 500
    eventually(lambda: "ZeroDivisionError: secret" in server.log.getvalue())
    time.sleep(0.05)
    (line,) = [line for line in server.log.getvalue().splitlines() if "request" in line and "method=" in line]
    assert "[error" in line and " status=500 " in line and " code=server_error " in line and " finish=error " in line
    assert server.log.getvalue().count("Traceback") == 1
    assert samples(server)["akv:requests_refused_total server_error"] == before + 1


def test_hanging_up_is_one_line(fake: Fake) -> None:
    server, engine = fake
    engine.script = silent
    body = json.dumps({"messages": HELLO}).encode()
    for connection_of in (lambda: send(server, body), lambda: send(server, body[:9], length=1000)):
        forget(server)
        connection = connection_of()
        time.sleep(0.1)
        connection.close()
        assert " status=499 " in only_line(server)


def test_unknown_fields_are_listed_once_each_wherever_they_stand(fake: Fake) -> None:
    server, engine = fake
    engine.script = failing(RequestError(Reason.QUEUE_FULL, "no"))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", "unread_g": 1}, "unread_f": 1}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "unread_b": 1}], "unread_a": 1},
            {"role": "assistant", "content": None, "unread_a": 2, "tool_calls": [call]},
        ],
        "stream_options": {"include_usage": True, "unread_c": 1},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {"type": "object"}, "unread_d": 1},
            "unread_e": 1,
        },
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "unread_h": 1}, "unread_i": 1}],
        "unread_j": 1,
    }
    forget(server)
    assert server.post(CHAT, body).status_code == 503
    line = only_line(server)
    assert "[warning" in line
    for path in (
        "messages.unread_a",
        "messages.content.unread_b",
        "stream_options.unread_c",
        "response_format.json_schema.unread_d",
        "response_format.unread_e",
        "messages.tool_calls.unread_f",
        "messages.tool_calls.function.unread_g",
        "tools.function.unread_h",
        "tools.unread_i",
        "'unread_j'",
    ):
        assert line.count(path) == 1
    assert line.count("unread_") == 10
    forget(server)
    assert server.post(CHAT, {**body, "unread_k": 1}).status_code == 503
    assert only_line(server).count("unread_") == 1


def test_invented_names_do_not_fill_the_memory() -> None:
    fields = UnknownFields(limit=3)
    assert fields.new(["b", "a", "b", "x" * 100]) == ["a", "b", "x" * 80]
    assert fields.new(["c", "a"]) == [] and len(fields.seen) == 3
