"""Messages and tools as clients send them (DESIGN A1, A4, A10)."""

import json

import pytest

from akv_jax.chat.messages import Message, Tool, ToolCall, parse_messages, parse_tools
from akv_jax.errors import Reason, RequestError


def one(**fields) -> Message:
    return parse_messages([{"role": "assistant", **fields}], vocab_size=100)[0]


@pytest.mark.parametrize(
    ("given", "role"),
    [
        ("system", "system"),
        ("developer", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
        ("function", "tool"),
    ],
)
def test_roles(given: str, role: str) -> None:
    assert parse_messages([{"role": given, "content": "x"}])[0].role == role


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "\nb"}], "a\nb"),
        ([{"text": "no type"}], "no type"),
        (["bare", {"type": "input_text", "text": " part"}], "bare part"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}], "x"),
        ("a\r\nb\rc\x00\x1b[31md\x7f\u2028", "a\r\nb\rc\x00\x1b[31md\x7f\u2028"),
    ],
)
def test_content_in_every_form(content: object, text: str) -> None:
    assert one(content=content).content == text


def test_absent_content_and_extra_keys() -> None:
    message = one(tool_calls=None, audio=None, annotations=[], function_call=None, provider_specific_fields={"x": 1})
    assert message == Message("assistant")


def test_reasoning_under_either_name() -> None:
    assert one(reasoning_content="r", reasoning="other").reasoning == "r"
    assert one(reasoning="r", reasoning_content=None).reasoning == "r"
    assert one(reasoning=None).reasoning == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a":1,  "b": "é"}', '{"a":1,  "b": "é"}'),
        ({"a": 1, "b": "é"}, '{"a": 1, "b": "é"}'),
        ("", "{}"),
        (None, "{}"),
        ('{"a": ', json.dumps('{"a": ')),
        ("[1]", '"[1]"'),
        ("[" * 20_000, json.dumps("[" * 20_000)),
    ],
)
def test_arguments_as_text_or_object(arguments: object, text: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert one(tool_calls=[call]).tool_calls == (ToolCall("f", text, "c1"),)


def test_older_function_call() -> None:
    assert one(function_call={"name": "f", "arguments": "{}"}).tool_calls == (ToolCall("f", "{}"),)


def test_token_ids() -> None:
    assert one(token_ids=[5, 0, 99]).token_ids == (5, 0, 99)
    assert one(token_ids=[]).token_ids == ()
    assert one(token_ids=None).token_ids is None


NESTED: dict = {}
_inner = NESTED
for _ in range(20_000):
    _inner["a"] = {}
    _inner = _inner["a"]

ILL_FORMED = {
    "no list": ({"role": "user"}, "messages"),
    "absent": (None, "messages"),
    "empty": ([], "messages"),
    "message string": (["hi"], "messages[0]"),
    "message null": ([{"role": "user", "content": "x"}, None], "messages[1]"),
    "no role": ([{"content": "x"}], "messages[0].role"),
    "role number": ([{"role": 1}], "messages[0].role"),
    "role list": ([{"role": ["user"]}], "messages[0].role"),
    "role word": ([{"role": "User"}], "messages[0].role"),
    "content number": ([{"role": "user", "content": 5}], "messages[0].content"),
    "content object": ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
    "content false": ([{"role": "user", "content": False}], "messages[0].content"),
    "image": (
        [{"role": "user", "content": "x"}] * 3
        + [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
        "messages[3].content[0]",
    ),
    "part number": ([{"role": "user", "content": [{"type": "text", "text": "x"}, 4]}], "messages[0].content[1]"),
    "part type": ([{"role": "user", "content": [{"type": None, "text": "x"}]}], "messages[0].content[0]"),
    "part text": ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    "surrogate": ([{"role": "user", "content": "x\ud800"}], "messages[0].content"),
    "surrogate in part": ([{"role": "user", "content": [{"text": "\udfff"}]}], "messages[0].content[0].text"),
    "surrogate in reasoning": ([{"role": "assistant", "reasoning": "\ud800"}], "messages[0].reasoning"),
    "reasoning number": ([{"role": "assistant", "reasoning_content": 4}], "messages[0].reasoning_content"),
    "reasoning of a user": ([{"role": "user", "reasoning": "r"}], "messages[0].reasoning"),
    "name number": ([{"role": "user", "name": 3}], "messages[0].name"),
    "call id": ([{"role": "tool", "tool_call_id": 3}], "messages[0].tool_call_id"),
    "calls object": ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
    "call string": ([{"role": "assistant", "tool_calls": ["f"]}], "messages[0].tool_calls[0]"),
    "call without function": ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    "call without name": (
        [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
        "messages[0].tool_calls[0].function.name",
    ),
    "arguments number": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    "arguments nested": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": NESTED}}]}],
        "messages[0].tool_calls[0].function.arguments",
    ),
    "calls of a user": (
        [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}],
        "messages[0].tool_calls",
    ),
    "token_ids string": ([{"role": "assistant", "token_ids": "1"}], "messages[0].token_ids"),
    "token_ids bool": ([{"role": "assistant", "token_ids": [1, True]}], "messages[0].token_ids[1]"),
    "token_ids float": ([{"role": "assistant", "token_ids": [1.0]}], "messages[0].token_ids[0]"),
    "token_ids negative": ([{"role": "assistant", "token_ids": [-1]}], "messages[0].token_ids[0]"),
    "token_ids too large": ([{"role": "assistant", "token_ids": [100]}], "messages[0].token_ids[0]"),
    "token_ids of a user": ([{"role": "user", "token_ids": [1]}], "messages[0].token_ids"),
}


@pytest.mark.parametrize("name", ILL_FORMED)
def test_ill_formed_is_refused_with_its_path(name: str) -> None:
    messages, param = ILL_FORMED[name]
    with pytest.raises(RequestError) as caught:
        parse_messages(messages, vocab_size=100)
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_REQUEST, param)


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "d<é>", "parameters": {}}, "strict": False}
    assert parse_tools([tool]) == (Tool("f", json.dumps(tool, ensure_ascii=False), {}),)
    assert parse_tools(None) == parse_tools([]) == ()


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        (["f"], "tools[0]"),
        ([{"type": "web_search"}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {"name": 3}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "f"}, "x": "\ud800"}], "tools[0]"),
        ([{"type": "function", "function": {"name": "f", "parameters": NESTED}}], "tools[0]"),
    ],
)
def test_ill_formed_tools(tools: object, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_tools(tools)
    assert caught.value.param == param
