"""Hostile and careless input: a clear 4xx or a 503, the pages balanced afterwards, and the next request right."""

from __future__ import annotations

import asyncio
import json
import select
import time
from collections.abc import Iterator
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.schemas import CACHE_FIELDS, ChatBody, CompletionBody, DetokenizeBody, SequenceBody, TokenizeBody
from tests.serving.bad_input import BODIES, CHAT, FIELDS, HELLO, OPERATIONS
from tests.serving.fake_engine import FakeEngine, endless
from tests.serving.running import Running, check_pages, running, send

CONTROL: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 5, "return_token_ids": True}


def reply_of(server: Running) -> list[int]:
    return server.post(CHAT, CONTROL).json()["choices"][0]["token_ids"]


@pytest.fixture
def sound(tiny: Running) -> Iterator[Running]:
    """The tiny server, which must be whole and answer as before afterwards."""
    expected = reply_of(tiny)
    yield tiny
    check_pages(tiny)
    assert reply_of(tiny) == expected


def refused(response: httpx.Response, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param is None or error["param"] == param
    return error


def test_bad_input_leaves_a_real_engine_whole(sound: Running) -> None:
    """Whatever is refused for its form, fields, operations or bodies, has left nothing behind (C7)."""
    for fields, param in FIELDS:
        refused(sound.post(CHAT, {"messages": HELLO, **fields}), param)
    for operations, param in OPERATIONS:
        refused(sound.post("/v1/sequence", {"operations": operations}), param)
    for body, says in BODIES:
        for path in (CHAT, "/v1/completions", "/v1/sequence", "/tokenize", "/detokenize"):
            assert says in refused(sound.post(path, body))["message"]


# -- wrong types, everywhere ------------------------------------------------------------------------------------------

#: A value of every JSON type, and for each field the ones that are of no use there.
VALUES: dict[str, Any] = {
    "string": "text", "number": 0.5, "integer": 3, "bool": True, "list": [{}], "object": {"a": [1]}, "nested": [[[]]],
}  # fmt: skip
ACCEPTED = {
    "model": {"string"}, "max_tokens": {"integer"}, "max_completion_tokens": {"integer"},
    "temperature": {"number"}, "top_p": {"number"}, "top_k": {"integer"}, "min_p": {"number"},
    "presence_penalty": {"number"}, "frequency_penalty": {"number"}, "repetition_penalty": {"number", "integer"},
    "seed": {"integer"}, "stop": {"string"}, "ignore_eos": {"bool"}, "cache_salt": {"string"}, "stream": {"bool"},
    "return_token_ids": {"bool"}, "return_logits": {"bool"}, "parallel_tool_calls": {"bool"},
    "add_generation_prompt": {"bool"}, "continue_final_message": set(), "stream_options": {"object"},
    "response_format": {"object"}, "prompt": {"string"}, "suffix": set(), "echo": set(),
    "logprobs": {"bool"}, "top_logprobs": {"integer"},
}  # fmt: skip


def wrong_types(schema: Any) -> list[tuple[str, str]]:
    accepted = ACCEPTED | ({"logprobs": {"integer"}} if schema is CompletionBody else {})
    return [(name, kind) for name in schema.model_fields for kind in VALUES if kind not in accepted.get(name, set())]


@pytest.mark.parametrize(
    "path, schema, body",
    [
        (CHAT, ChatBody, {"messages": HELLO, "logprobs": True}),
        ("/v1/completions", CompletionBody, {"prompt": "x"}),
        ("/v1/sequence", SequenceBody, {"operations": [["append", [1]]]}),
        ("/tokenize", TokenizeBody, {"messages": HELLO}),
        ("/detokenize", DetokenizeBody, {}),
    ],
    ids=["chat", "completions", "sequence", "tokenize", "detokenize"],
)
def test_wrong_types_at_every_field(sound: Running, path: str, schema: Any, body: Any) -> None:
    cases = wrong_types(schema)
    assert len(cases) >= 5 * len(schema.model_fields)
    for name, kind in cases:
        error = refused(sound.post(path, {**body, name: VALUES[kind]}))
        assert error["param"] and error["param"].startswith(name), (name, kind, error)


def with_message(role: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, **fields}]}


def with_call(**function: Any) -> dict[str, Any]:
    return with_message("assistant", tool_calls=[{"function": function}])


def with_tool(**function: Any) -> dict[str, Any]:
    return {"messages": HELLO, "tools": [{"type": "function", "function": function}]}


def with_schema(**fields: Any) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"schema": {}, **fields}}
    return {"messages": HELLO, "response_format": wanted}


def with_entry(**fields: Any) -> dict[str, Any]:
    return {"messages": HELLO, "cache": {"drop": {"0": [fields]}}}


#: Within objects: where a value stands, the body that has it there, and the types that are of use.
NESTED: dict[str, tuple[Any, set[str]]] = {
    "messages[0]": (lambda v: {"messages": [v]}, set()),
    "messages[0].role": (lambda v: {"messages": [{"role": v}]}, set()),
    "messages[0].content": (lambda v: with_message("user", content=v), {"string"}),
    "messages[0].content[0]": (lambda v: with_message("user", content=[{"type": v, "text": "x"}]), {"string"}),
    "messages[0].content[0].text": (lambda v: with_message("user", content=[{"text": v}]), {"string"}),
    "messages[0].name": (lambda v: with_message("user", name=v), {"string"}),
    "messages[0].tool_call_id": (lambda v: with_message("tool", tool_call_id=v), {"string"}),
    "messages[0].reasoning_content": (lambda v: with_message("assistant", reasoning_content=v), {"string"}),
    "messages[0].reasoning": (lambda v: with_message("assistant", reasoning=v), {"string"}),
    "messages[0].token_ids": (lambda v: with_message("assistant", token_ids=v), set()),
    "messages[0].tool_calls": (lambda v: with_message("assistant", tool_calls=v), set()),
    "messages[0].tool_calls[0].id": (
        lambda v: with_message("assistant", tool_calls=[{"id": v, "function": {"name": "f"}}]), {"string"}
    ),
    "messages[0].tool_calls[0].function": (lambda v: with_message("assistant", tool_calls=[{"function": v}]), set()),
    "messages[0].tool_calls[0].function.name": (lambda v: with_call(name=v), {"string"}),
    "messages[0].tool_calls[0].function.arguments": (lambda v: with_call(name="f", arguments=v), {"string", "object"}),
    "messages[0].function_call": (lambda v: with_message("assistant", function_call=v), set()),
    "stream_options.include_usage": (lambda v: {"messages": HELLO, "stream_options": {"include_usage": v}}, {"bool"}),
    "response_format.type": (lambda v: {"messages": HELLO, "response_format": {"type": v}}, {"string"}),
    "response_format.json_schema": (
        lambda v: {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": v}}, set()
    ),
    "response_format.json_schema.name": (lambda v: with_schema(name=v), {"string"}),
    "response_format.json_schema.schema": (lambda v: with_schema(schema=v), {"object"}),
    "response_format.json_schema.strict": (lambda v: with_schema(strict=v), {"bool"}),
    "tools[0]": (lambda v: {"messages": HELLO, "tools": [v]}, set()),
    "tools[0].type": (lambda v: {"messages": HELLO, "tools": [{"type": v, "function": {"name": "f"}}]}, set()),
    "tools[0].function": (lambda v: {"messages": HELLO, "tools": [{"function": v}]}, set()),
    "tools[0].function.name": (lambda v: with_tool(name=v), {"string"}),
    "tools[0].function.parameters": (lambda v: with_tool(name="f", parameters=v), {"object"}),
    "tools[0].function.strict": (lambda v: with_tool(name="f", strict=v), {"bool"}),
    "cache.drop": (lambda v: {"messages": HELLO, "cache": {"drop": v}}, set()),
    "cache.drop.0": (lambda v: {"messages": HELLO, "cache": {"drop": {"0": v}}}, set()),
    "cache.drop.0[0]": (lambda v: {"messages": HELLO, "cache": {"drop": {"0": [v]}}}, set()),
    "cache.drop.0[0].message": (lambda v: with_entry(message=v), set()),
    "cache.drop.0[0].part": (lambda v: with_entry(message=0, part=v), set()),
    "cache.drop.0[0].tokens": (lambda v: with_entry(message=0, tokens=v), set()),
    "cache.drop.0[0].tokens[0]": (lambda v: with_entry(message=0, tokens=[v, None]), {"integer"}),
    "cache.drop.0[0].tokens[1]": (lambda v: with_entry(message=0, tokens=[0, v]), {"integer"}),
    "cache.reposition": (lambda v: {"messages": HELLO, "cache": {"reposition": v}}, set()),
    "cache.reposition[0]": (lambda v: {"messages": HELLO, "cache": {"reposition": [v]}}, {"integer"}),
    "cache.report": (lambda v: {"messages": HELLO, "cache": {"report": v}}, set()),
}  # fmt: skip


def test_wrong_types_within_objects(sound: Running) -> None:
    for place, (body_with, accepted) in NESTED.items():
        for kind in VALUES.keys() - accepted:
            error = refused(sound.post(CHAT, body_with(VALUES[kind])))
            assert error["param"].startswith(place), (place, kind, error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = [*ChatBody.model_fields, "drop", "unknown"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), JSON, JSON)
def test_no_body_makes_the_server_fail(fake: tuple[Running, FakeEngine], body: Any, cache: Any, message: Any) -> None:
    """Whatever is wrong, it is the client's fault and said so; what is right reaches the engine."""
    server, engine = fake
    engine.script = endless
    for extra in ({}, {"messages": HELLO, "cache": cache}, {"messages": [message]}):
        # The engine never ends here: what it accepts is streamed and left.
        with server.http.stream("POST", CHAT, json={**body, **extra, "stream": True}) as response:
            assert response.status_code in (200, 400)


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_fifty_megabytes(sound: Running, path: str) -> None:
    """Too long for the model, and that is what the answer says: 413 only where a limit was set."""
    huge = "x" * 50_000_000
    body = {"messages": [{"role": "user", "content": huge}]} if path == CHAT else {"prompt": huge}
    started = time.monotonic()
    error = refused(sound.post(path, body))
    assert error["code"] == "context_length_exceeded" and "maximum context length is 256 tokens" in error["message"]
    assert time.monotonic() - started < 20


def test_fifty_megabytes_and_a_limit(model: Any) -> None:
    with running(FakeEngine(model), max_body_size=1_000_000) as server:
        response = server.post(CHAT, b'{"messages": "' + b"x" * 50_000_000 + b'"}')
        assert response.status_code == 413 and response.json()["error"]["code"] == "request_too_large"
        assert server.http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    "body, param",
    [
        ('{"messages": M, "cache": {"drop": {"0": [0], "0": []}}}', "cache.drop.0"),
        ('{"messages": M, "cache": {"drop": {"0": [0], "\\u0030": []}}}', "cache.drop.0"),
        ('{"messages": M, "cache": {"drop": {}, "drop": {}}}', "cache.drop"),
        ('{"messages": M, "cache": {"reposition": [0], "reposition": []}}', "cache.reposition"),
        ('{"messages": M, "cache": {"drop": {"0": [{"message": 0, "message": 0}]}}}', "cache.drop.0[0].message"),
        ('{"messages": M, "cache": {"drop": {"0": [0]}}, "cache": null}', "cache"),
        ('{"messages": M, "drop_message": {"0": [0], "0": [0]}}', "drop_message.0"),
    ],
)
def test_a_key_twice_in_the_cache_field_is_a_400(sound: Running, body: str, param: str) -> None:
    error = refused(sound.post(CHAT, body.replace("M", json.dumps(HELLO)).encode()), param)
    assert error["code"] == "invalid_cache" and "twice" in error["message"]


def test_a_key_twice_elsewhere_is_not_our_business(sound: Running) -> None:
    body = b'{"max_tokens": 1, "max_tokens": 2, "messages": %s, "cache": {"drop": {"0": [0]}}, "n": %s}'
    messages = json.dumps(HELLO).encode()
    assert sound.post(CHAT, body % (messages, b"1")).json()["usage"]["completion_tokens"] <= 2
    # Many digits are no trouble to the second look that the field gets.
    refused(sound.post(CHAT, body % (messages, b"1" * 300)), "n")


def test_the_cache_field_is_told_first(sound: Running) -> None:
    """Of several things that are wrong, the one that an agent can mend."""
    wrong = {"n": 2, "response_format": {"type": "xml"}, "max_tokens": "many", "messages": 5}
    refused(sound.post(CHAT, {"messages": HELLO, **wrong, "cache": {"drop": []}}), "cache.drop")


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [2, 1, 0])
def test_prompts_that_leave_few_positions(sound: Running, left: int) -> None:
    """A7: n + 1 <= N, and at most N - n tokens come out."""
    prompt = {"prompt": [70] * (256 - left), "temperature": 0, "logit_bias": {"70": 100}}
    for max_tokens in (1, 2, 3, 100):
        response = sound.post("/v1/completions", {**prompt, "max_tokens": max_tokens})
        if left == 0:
            assert refused(response)["code"] == "context_length_exceeded"
            continue
        answer = response.json()
        assert answer["usage"]["completion_tokens"] == min(left, max_tokens)
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("max_tokens", [0, -1, -(10**30), 1.5, "1"])
def test_useless_max_tokens(sound: Running, max_tokens: Any) -> None:
    refused(sound.post(CHAT, {"messages": HELLO, "max_tokens": max_tokens}), "max_tokens")


def test_no_and_many_stop_strings(sound: Running) -> None:
    a = sound.post("/tokenize", {"prompt": "A"}).json()["tokens"][0]
    body = {"messages": HELLO, "logit_bias": {str(a): 100}, "max_tokens": 8, "temperature": 0}
    assert sound.post(CHAT, {**body, "stop": []}).json()["choices"][0]["message"]["content"] == "A" * 8
    hundred = [f"{k}" * 10 for k in range(99)]
    choice = sound.post(CHAT, {**body, "stop": [*hundred, "AAAAA"]}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    choice = sound.post(CHAT, {**body, "stop": ["A" * 1024] * 256}).json()["choices"][0]
    assert choice["message"]["content"] == "A" * 8


def test_a_bias_on_every_token(sound: Running) -> None:
    size = sound.state.engine.model.config.vocab_size
    bias = {str(token): -100 for token in range(size)}
    assert sound.post(CHAT, {"messages": HELLO, "logit_bias": bias, "max_tokens": 3}).status_code == 200
    refused(sound.post(CHAT, {"messages": HELLO, "logit_bias": bias | {str(size): 1}}), f"logit_bias.{size}")


# -- crowds and deserters ----------------------------------------------------------------------------------------------


async def _crowd(url: str, count: int) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        bodies = [{**CONTROL, "max_tokens": 2 + k % 3, "ignore_eos": True, "stream": k % 2 == 0} for k in range(count)]
        return await asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))


def test_three_hundred_at_once(sound: Running) -> None:
    """Each is answered, or told that the queue is full and when to come again."""
    responses = asyncio.run(_crowd(sound.url, 300))
    statuses = [response.status_code for response in responses]
    assert set(statuses) <= {200, 503} and statuses.count(200) >= 200
    for response in responses:
        if response.status_code == 503:
            assert response.json()["error"]["code"] == "queue_full" and int(response.headers["retry-after"]) >= 1
        elif "data:" in response.text:
            assert response.text.endswith("data: [DONE]\n\n")
        else:
            assert response.json()["usage"]["completion_tokens"] >= 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue(sound: Running, stream: bool) -> None:
    """More requests than there is room for, all of them long: the last ones are refused at once, with Retry-After."""
    config = sound.state.engine.config
    room = config.max_queued_requests + config.max_running_requests
    body = json.dumps({"messages": HELLO, "ignore_eos": True, "stream": stream}).encode()
    crowd = [send(sound, body) for _ in range(room + 60)]
    answers: list[bytes] = []
    try:
        deadline = time.monotonic() + 20
        while not any(b" 503 " in answer for answer in answers):
            assert time.monotonic() < deadline
            answers += [connection.recv(4096) for connection in select.select(crowd, [], [], 1)[0]]
    finally:
        for connection in crowd:
            connection.close()
    refusal = next(answer for answer in answers if b" 503 " in answer)
    assert b"retry-after: 1" in refusal
    check_pages(sound)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("constrained", [False, True])
def test_hanging_up_at_any_moment(sound: Running, stream: bool, constrained: bool) -> None:
    form: Any = {"response_format": {"type": "json_object"}} if constrained else {}
    body = json.dumps({"messages": [{"role": "user", "content": "Hi " * 40}], "stream": stream, **form}).encode()
    for round_ in range(25):
        connection = send(sound, body[: len(body) // 2] if round_ % 5 == 4 else body, length=len(body))
        time.sleep(0.003 * round_)
        connection.close()
    check_pages(sound)


def test_every_name_of_the_field_is_checked_first() -> None:
    """The names that are told first are those that the chat body has."""
    assert set(CACHE_FIELDS) <= set(ChatBody.model_fields)


@pytest.mark.parametrize(
    "body",
    [
        {b"messages": HELLO},
        {"messages": [{b"role": "user"}]},
        {"messages": HELLO, "cache": {b"drop": {}}},
        {"messages": HELLO, "cache": {"drop": {b"0": [0]}}},
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": b"\xff"}}}]},
        {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": b"\xff"}}}},
        {"messages": HELLO, "logit_bias": {b"1": 1}},
        {"messages": HELLO, b"\xff": 1, "temperature": float("nan")},
    ],
)
def test_bytes_where_msgpack_has_them(sound: Running, body: Any) -> None:
    """Any route takes msgpack, which can say more than JSON."""
    headers = {"Content-Type": "application/msgpack"}
    response = sound.http.post(CHAT, content=msgpack.packb(body), headers=headers)
    refused(response)
