"""Bad input gets a 400 that names the field; failures get the right status; nothing leaks (DESIGN A3, A7, A10)."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import openai
import pytest

from akv_jax.errors import Reason, RequestError
from tests.serving.bad_input import BODIES, CHAT, FIELDS, HELLO, OPERATIONS, SEQUENCE
from tests.serving.fake_engine import USAGE, FakeEngine, failing
from tests.serving.running import Running, eventually, running

Fake = tuple[Running, FakeEngine]


def error_of(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize("fields, param", FIELDS)
def test_a_bad_field_is_a_400_that_names_it(fake: Fake, fields: dict[str, Any], param: str) -> None:
    server, engine = fake
    error = error_of(server.post(CHAT, {"messages": HELLO, **fields}))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(param)
    assert engine.running == 0


@pytest.mark.parametrize("operations, param", OPERATIONS)
def test_a_bad_operation_is_a_400_that_names_it(fake: Fake, operations: Any, param: str) -> None:
    server, _ = fake
    assert error_of(server.post(SEQUENCE, {"operations": operations}))["param"] == param


@pytest.mark.parametrize("body, says", BODIES)
@pytest.mark.parametrize("path", [CHAT, SEQUENCE, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_object_is_a_400(fake: Fake, path: str, body: bytes, says: str) -> None:
    server, _ = fake
    assert says in error_of(server.post(path, body))["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb({"operations": msgpack.ExtType(5, b"x")}),
        msgpack.packb({1: 2}),
        b"\x81\xa1a\xa2\xff\xfe",
        b"\x91" * 5000,
    ],
)
def test_bad_msgpack_is_a_400(fake: Fake, body: bytes) -> None:
    server, _ = fake
    response = server.http.post(SEQUENCE, content=body, headers={"Content-Type": "application/msgpack"})
    error_of(response)


def test_nan_in_msgpack_is_a_400(fake: Fake) -> None:
    server, _ = fake
    body = msgpack.packb({"operations": [["append", [1]]], "temperature": float("nan")})
    response = server.http.post(SEQUENCE, content=body, headers={"Content-Type": "application/msgpack"})
    assert error_of(response)["param"] == "temperature"


def test_unknown_routes_and_methods(fake: Fake) -> None:
    server, _ = fake
    assert error_of(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    response = server.http.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"
    with pytest.raises(openai.NotFoundError):
        server.client.embeddings.create(model="tiny", input="x")


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_by_the_engine_keeps_its_text_code_and_status(fake: Fake, stream: bool) -> None:
    server, engine = fake
    text = "This model's maximum context length is 128 tokens. However, your request has 200 tokens (...)"
    engine.script = failing(RequestError(Reason.CONTEXT_LENGTH_EXCEEDED, text, "messages"))
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model="tiny", messages=HELLO, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.body["message"] == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "reason, header",
    [
        (Reason.QUEUE_FULL, ("retry-after", "1")),
        (Reason.SHUTTING_DOWN, ("retry-after", "5")),
        (Reason.POOL_TOO_SMALL, ("x-should-retry", "false")),
    ],
)
def test_unavailable_is_a_503_that_says_whether_to_retry(
    fake: Fake, reason: Reason, header: tuple[str, str], stream: bool
) -> None:
    server, engine = fake
    engine.script = failing(RequestError(reason, "no"))
    response = server.post(CHAT, {"messages": HELLO, "stream": stream})
    assert error_of(response, 503)["code"] == reason.value
    assert response.headers[header[0]] == header[1]
    assert "Retry-After" in response.headers or reason is Reason.POOL_TOO_SMALL


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_of_ours_is_a_500_with_its_traceback_in_the_log_alone(fake: Fake, stream: bool) -> None:
    server, engine = fake
    engine.script = failing(ZeroDivisionError("secret"))
    response = server.post(CHAT, {"messages": HELLO, "stream": stream})
    error = error_of(response, 500)
    assert error["type"] == "server_error"
    assert "secret" not in response.text and "Traceback" not in response.text
    eventually(lambda: "ZeroDivisionError: secret" in server.log.getvalue())
    assert "finish=error" in server.log.getvalue()


def test_a_failure_within_a_stream_is_an_error_event(fake: Fake) -> None:
    server, engine = fake
    engine.script = failing(ZeroDivisionError("secret"), after=3)
    response = server.post(CHAT, {"messages": HELLO, "stream": True})
    assert response.status_code == 200
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "[DONE]" not in response.text
    with pytest.raises(openai.APIError):
        list(server.client.chat.completions.create(model="tiny", messages=HELLO, stream=True))


def test_a_message_that_cannot_be_continued_is_refused_whole(fake: Fake) -> None:
    server, _ = fake
    body = {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True}
    error = error_of(server.post(CHAT, {**body, "add_generation_prompt": True}))
    assert error["param"] == "add_generation_prompt"


def test_body_limit_is_a_413_only_where_it_is_set(model: Any) -> None:
    body = {"messages": HELLO, "metadata": "x" * 200_000, "stop": 5}
    with running(FakeEngine(model), max_body_size=100_000) as server:
        assert error_of(server.post(CHAT, body), 413)["code"] == "request_too_large"
        assert server.http.get("/health").status_code == 200
    with running(FakeEngine(model)) as server:
        assert error_of(server.post(CHAT, body))["param"] == "stop"


def test_api_key(model: Any) -> None:
    with running(FakeEngine(model), api_key="sesame") as server:
        response = server.http.get("/v1/models")
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert error_of(server.post(CHAT, b"{"), 401)["code"] == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            server.client.models.list()
        assert [m.id for m in server.client.with_options(api_key="sesame").models.list()] == ["tiny"]
        for path in ("/health", "/ready", "/metrics"):
            assert server.http.get(path).status_code == 200


def test_a_loading_server_is_alive_and_not_ready(fake: Fake) -> None:
    server, engine = fake
    engine.ready = False
    assert server.http.get("/health").status_code == 200
    response = server.http.get("/ready")
    assert error_of(response, 503)["code"] == "not_ready"
    assert response.headers["retry-after"] == "5"
    assert error_of(server.post(CHAT, {"messages": HELLO}), 503)["code"] == "not_ready"
    engine.ready = True
    assert server.http.get("/ready").status_code == 200


def test_accounts_are_named_as_the_api_names_them(fake: Fake) -> None:
    """A6 and A10 to the letter, `cache.report: "active"` included."""
    server, engine = fake

    async def script(request: Any) -> Any:
        from akv_jax.request import Output

        yield Output(request.request_id, (65, 66), "ab", finish_reason="stop", usage=USAGE)

    engine.script = script
    body = server.post(CHAT, {"messages": HELLO}).json()
    details = {"cached_tokens": 1, "drop_skipped_tokens": 3, "repos_tokens": 2}
    counts = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
    assert body["usage"] == {**counts, "prompt_tokens_details": details}
    assert body["cache"] == {
        "computed_tokens": 4,
        "restored_tokens": 1,
        "active_tokens": 7,
        "next_position": 8,
        "segments": 2,
        "forwards": 1,
    }
    body = server.post(CHAT, {"messages": HELLO, "cache": {"report": "active"}}).json()
    assert body["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": details,
    }
