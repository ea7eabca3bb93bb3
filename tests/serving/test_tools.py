"""`tools` and `tool_choice` (DESIGN A1): calls that the grammar forces, read back out of the reply, and sent again."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest

from akv_jax.request import Output, Request
from tests.serving.fake_engine import USAGE, FakeEngine
from tests.serving.running import Running

HELLO: list[Any] = [{"role": "user", "content": "What is the weather?"}]
COLOURS = {"enum": ["red", "green <é>"]}


def tool(name: str, properties: Any, **fields: Any) -> Any:
    parameters = {"type": "object", "properties": properties, "required": list(properties), **fields}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


PAINT = tool("paint", {"colour": {"$ref": "#/$defs/c"}}, additionalProperties=False, **{"$defs": {"c": COLOURS}})
WAIT = tool("wait", {"long": {"type": "boolean"}}, additionalProperties=False)
NOTHING = {"type": "function", "function": {"name": "nothing"}}
TOOLS: list[Any] = [PAINT, WAIT, NOTHING]


def create(server: Running, **body: Any) -> Any:
    arguments: dict[str, Any] = {"model": "x", "messages": HELLO, "tools": TOOLS, "max_tokens": 300, **body}
    return server.client.chat.completions.create(**arguments)


def check_call(call: Any) -> None:
    arguments = json.loads(call.function.arguments)
    match call.function.name:
        case "paint":
            assert set(arguments) == {"colour"} and arguments["colour"] in COLOURS["enum"]
        case "wait":
            assert set(arguments) == {"long"} and type(arguments["long"]) is bool
        case name:
            assert (name, arguments) == ("nothing", {})
    assert call.type == "function" and call.id.startswith("call_")


def test_required_calls_one_of_the_tools_of_the_models_choice(roomy: Running) -> None:
    for name in ("paint", "wait", "nothing"):
        letter = roomy.post("/tokenize", {"prompt": name[0]}).json()["tokens"][0]
        body: dict[str, Any] = {"parallel_tool_calls": False, "logit_bias": {str(letter): 100}}
        choice = create(roomy, tool_choice="required", **body).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        check_call(call)
        assert call.function.name == name


@pytest.mark.parametrize("name", ["paint", "wait", "nothing"])
def test_a_named_function_is_called_once(roomy: Running, name: str) -> None:
    choice = create(roomy, tool_choice={"type": "function", "function": {"name": name}}).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == name and choice.finish_reason == "tool_calls"
    check_call(call)


def test_several_calls_have_ids_of_their_own(roomy: Running) -> None:
    """The newline after a call is made likelier than the end of the reply."""
    newline = roomy.post("/tokenize", {"prompt": "\n"}).json()["tokens"][0]
    choice = create(roomy, tool_choice="required", logit_bias={str(newline): 100}, max_tokens=400).choices[0]
    calls = choice.message.tool_calls
    assert len(calls) > 1 and len({call.id for call in calls}) == len(calls)
    for call in calls:
        check_call(call)
    # The last one was cut, and what is no whole call is content.
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").lstrip()[:11] in [*("<tool_call>"[:k] for k in range(12))]


def joined(stream: Any) -> tuple[str, list[dict[str, str]], str]:
    """Content, calls put together as clients do it, and the finish reason."""
    content, calls, reason = "", [], None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for delta in choice.delta.tool_calls or ():
                if delta.index == len(calls):
                    assert delta.id and delta.type == "function" and delta.function.name
                    calls.append({"name": delta.function.name, "arguments": ""})
                calls[delta.index]["arguments"] += delta.function.arguments or ""
    return content, calls, reason


def test_a_stream_has_the_same_calls(roomy: Running) -> None:
    newline = roomy.post("/tokenize", {"prompt": "\n"}).json()["tokens"][0]
    body: dict[str, Any] = {"tool_choice": "required", "logit_bias": {str(newline): 100}, "temperature": 0}
    whole = create(roomy, **body).choices[0]
    content, calls, reason = joined(create(roomy, stream=True, **body))
    assert calls == [{"name": c.function.name, "arguments": c.function.arguments} for c in whole.message.tool_calls]
    assert (content or None, reason) == (whole.message.content, whole.finish_reason)
    with roomy.client.chat.completions.stream(
        model="x",
        messages=HELLO,
        tools=TOOLS,
        max_tokens=300,
        tool_choice={"type": "function", "function": {"name": "wait"}},
    ) as stream:
        final = stream.get_final_completion().choices[0]
    check_call(final.message.tool_calls[0])
    assert final.finish_reason == "tool_calls"


def test_a_call_sent_back_renders_to_the_tokens_that_were_sampled(roomy: Running) -> None:
    """A5: the next prompt goes on where this one and its reply end."""
    extra = {"return_token_ids": True}
    messages = list(HELLO)
    prompt: list[int] = []
    for turn in range(3):
        answer = create(
            roomy, messages=messages, tool_choice="required", parallel_tool_calls=False, seed=turn, extra_body=extra
        )
        assert answer.prompt_token_ids[: len(prompt)] == prompt
        message = answer.choices[0].message
        prompt = answer.prompt_token_ids + answer.choices[0].token_ids
        messages.append(message.model_dump(exclude_unset=True))
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"result {turn}"})
    reasoned = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": messages[1]["tool_calls"],
    }
    ids = roomy.post("/tokenize", {"messages": [*HELLO, reasoned], "tools": TOOLS}).json()["tokens"]
    text = roomy.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert "<think>\nHm.\n</think>\n\n<tool_call>\n" in text


def test_tool_choice_does_not_change_the_prompt(roomy: Running) -> None:
    prompts = {
        tuple(create(roomy, max_tokens=1, extra_body={"tool_choice": c, "return_token_ids": True}).prompt_token_ids)
        for c in (None, "auto", "none", "required")
    }
    assert len(prompts) == 1


def test_a_reply_in_a_format_may_also_be_a_call(roomy: Running) -> None:
    """With tools at the model's choice, what constrains the content does not forbid to call."""
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": COLOURS}}
    opening = {kind: roomy.post("/tokenize", {"prompt": kind}).json()["tokens"][0] for kind in '<"'}
    for kind, token in opening.items():
        choice = create(roomy, response_format=wanted, logit_bias={str(token): 50}, parallel_tool_calls=False).choices[
            0
        ]
        if kind == "<":
            check_call(choice.message.tool_calls[0])
        else:
            assert json.loads(choice.message.content) in COLOURS["enum"] and not choice.message.tool_calls
        forced = create(roomy, response_format=wanted, tool_choice="none", logit_bias={str(token): 50}).choices[0]
        assert json.loads(forced.message.content) in COLOURS["enum"]


def test_a_begun_call_is_continued_and_read_as_a_whole(roomy: Running) -> None:
    begun = {"role": "assistant", "content": '<think>\nRed.\n</think>\n\n<tool_call>\n{"name": "pai'}
    extra = {"continue_final_message": True}
    body: dict[str, Any] = {"messages": [*HELLO, begun], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = create(roomy, extra_body=extra, **body).choices[0].message.tool_calls
    assert call.function.name == "paint"
    check_call(call)
    content, calls, reason = joined(create(roomy, stream=True, extra_body=extra, **body))
    assert (content, len(calls), reason) == ("", 1, "tool_calls")


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice.function.name"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        (
            {"tools": [WAIT, tool("f", {"a": {"type": "wizard"}})], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
             "tool_choice": "required"},
            "tools[0].function.parameters.type",
        ),
    ],
)  # fmt: skip
def test_bad_tools_are_a_400_that_names_them(roomy: Running, fields: Any, param: str) -> None:
    response = roomy.post("/v1/chat/completions", {"messages": HELLO, "tools": TOOLS, "max_tokens": 1, **fields})
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


def test_a_schema_that_nobody_has_to_fit_may_be_odd(roomy: Running) -> None:
    odd = [tool("f", {"a": {"type": "wizard"}})]
    assert create(roomy, tools=odd, max_tokens=1).choices[0].finish_reason
    wanted = {"type": "json_object"}
    assert create(roomy, tools=odd, max_tokens=1, response_format=wanted).choices[0].finish_reason


def saying(text: str, size: int) -> Any:
    """An engine that says `text`, so many characters an output."""

    async def script(request: Request) -> AsyncGenerator[Output, None]:
        for start in range(0, len(text), size):
            yield Output(request.request_id, (65,), text[start : start + size])
        yield Output(request.request_id, (2,), finish_reason="stop", usage=USAGE)

    return script


CALL = '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>'
SAID = "<think>\nLet me see.\n</think>\n\nI paint.\n" + CALL + "\n" + CALL


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_reasoning_content_and_calls_are_told_apart(fake: tuple[Running, FakeEngine], size: int) -> None:
    server, engine = fake
    engine.script = saying(SAID, size)
    choice = create(server).choices[0]
    assert (choice.message.content, choice.message.reasoning_content) == ("I paint.", "Let me see.")
    assert [c.function.arguments for c in choice.message.tool_calls] == ['{"colour": "red"}'] * 2
    assert choice.finish_reason == "tool_calls"
    chunks = list(create(server, stream=True))
    content, calls, reason = joined(chunks)
    assert (content, len(calls), reason) == ("I paint.", 2, "tool_calls")
    assert "".join(getattr(c.choices[0].delta, "reasoning_content", "") for c in chunks) == "Let me see."


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}])
def test_where_no_calls_are_wanted_none_are_looked_for(fake: tuple[Running, FakeEngine], fields: Any) -> None:
    server, engine = fake
    engine.script = saying(CALL, 5)
    choice = create(server, **fields).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (CALL, None, "stop")


def test_the_openai_package_refuses_nothing_of_it(roomy: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        create(roomy, tool_choice={"type": "function", "function": {"name": "fly"}})


def strict(one: Any, value: Any = True) -> Any:
    return {**one, "function": {**one["function"], "strict": value}}


#: The reply goes on where a call has just begun, which a random model never would.
BEGUN: list[Any] = [*HELLO, {"role": "assistant", "content": "Let me see. <tool_call>"}]


def test_a_strict_tools_call_fits_at_the_models_choice(roomy: Running) -> None:
    """And ends the reply where one call is all that may be made."""
    body = {"continue_final_message": True}
    for letter in "pw":
        bias = {str(roomy.post("/tokenize", {"prompt": letter}).json()["tokens"][0]): 100}
        answer = create(
            roomy,
            messages=BEGUN,
            tools=[strict(PAINT), WAIT],
            parallel_tool_calls=False,
            logit_bias=bias,
            extra_body=body,
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        check_call(call)
        assert call.function.name[0] == letter


def test_text_around_strict_calls_is_free(roomy: Running) -> None:
    """What follows a call is the model's business again, and so is a reply that calls nothing."""
    body = {"continue_final_message": True}
    a = roomy.post("/tokenize", {"prompt": "A"}).json()["tokens"][0]
    tools = [strict(WAIT)]
    choice = create(roomy, messages=BEGUN, tools=tools, logit_bias={str(a): 100}, extra_body=body).choices[0]
    check_call(choice.message.tool_calls[0])
    assert choice.message.content.endswith("A" * 100) and choice.finish_reason == "length"
    choice = create(roomy, tools=tools, logit_bias={str(a): 100}, max_tokens=20).choices[0]
    assert choice.message.content == "A" * 20 and not choice.message.tool_calls
    # Not for a tool that is not: the mask would be in the way.
    loose = create(roomy, messages=BEGUN, tools=[WAIT], logit_bias={str(a): 100}, max_tokens=20, extra_body=body)
    assert loose.choices[0].message.content.endswith("A" * 20)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_strict_refuses_what_cannot_be_checked(roomy: Running, choice: str) -> None:
    unchecked = tool("f", {"x": {"type": "array", "uniqueItems": True}})
    create(roomy, tools=[strict(unchecked, False)], tool_choice=choice, max_tokens=1)
    with pytest.raises(openai.BadRequestError) as caught:
        create(roomy, tools=[WAIT, strict(unchecked)], tool_choice=choice, max_tokens=1)
    assert caught.value.param == "tools[1].function.parameters"
    with pytest.raises(openai.BadRequestError) as caught:
        create(roomy, tools=[strict(WAIT, "yes")], tool_choice=choice, max_tokens=1)
    assert caught.value.param == "tools[0].function.strict"
    create(roomy, tools=[strict(unchecked)], tool_choice="none", max_tokens=1)
