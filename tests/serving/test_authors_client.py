"""The client of AKV's authors (package `akvalgo`) against this server: bodies of its shape, and the fields it reads.

It is on no package index and wants Python 3.12, so this is a description of it in code; docs/api.md says what the
package itself did against this server. It POSTs to `<base>/v1/chat/completions` through urllib, always streaming, with
the whole history, UTF-8 unescaped, `Accept: text/event-stream`. A policy adds `drop_message` (trigger to messages,
cumulative: a tool result is dropped when the K-th one after it arrives, also in the middle of a batch of results) and
`reposition` (ends of batches: after so many calls, then every so many). Of the stream it reads `id`, at most one
choice, deltas of text, reasoning and tool calls (whose ids, names and arguments it concatenates), `finish_reason` and
`usage`; it wants `[DONE]` last, and knows an overflow by `"context_length_exceeded"` in the text of the error. It reads
no `cache` object and no `usage` that it has not asked for.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from akv_jax.errors import Reason, RequestError
from akv_jax.request import Output, Request
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import Running, check_pages

Messages = list[dict[str, Any]]

SEARCH: dict[str, Any] = {
    "type": "function",
    # A client's own key beside OpenAI's.
    "mcp_server_name": "default",
    "function": {
        "name": "search",
        "description": "Looks something up.",
        "parameters": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}
START: Messages = [
    {"role": "system", "content": "You look things up."},
    {"role": "user", "content": "Who wrote “Faust”? – Warum?"},
]


@dataclass
class Reply:
    """What the client makes of a stream."""

    content: str | None = None
    reasoning: str | None = None
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str | None = None
    response_id: str | None = None
    usage: dict[str, Any] | None = None

    def message(self) -> dict[str, Any]:
        """The assistant message that it sends back."""
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in self.calls.values()
        ]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


def ask(server: Running, body: dict[str, Any]) -> Reply:
    """As the client does. Raises urllib.error.HTTPError for an error status."""
    raw = json.dumps({"model": "any", **body, "stream": True}, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", raw, headers, method="POST")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = ""
    with opener.open(request, timeout=60) as response:
        while piece := response.read1(1 << 16):
            text += piece.decode()
    events = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data:")]
    assert events.pop() == "[DONE]"
    reply = Reply()
    for event in events:
        read(reply, json.loads(event))
    return reply


def read(reply: Reply, chunk: dict[str, Any]) -> None:
    """One event; everything that the client would refuse is a failure."""
    assert isinstance(chunk, dict) and chunk.get("error") is None and chunk.get("object") != "error"
    reply.response_id = str(chunk["id"])
    usage = chunk.get("usage")
    assert usage is None or isinstance(usage, dict)
    reply.usage = usage or reply.usage
    choices = chunk.get("choices") or []
    assert len(choices) <= 1
    for choice in choices:
        delta = choice.get("delta") or {}
        assert choice.get("index") == 0 and isinstance(delta, dict)
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        if delta.get("content") is not None:
            reply.content = (reply.content or "") + delta["content"]
        if delta.get("reasoning_content") is not None:
            reply.reasoning = (reply.reasoning or "") + delta["reasoning_content"]
        for piece in delta.get("tool_calls") or []:
            assert type(piece["index"]) is int
            call = reply.calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
            # An id or a name that comes twice would be doubled.
            call["id"] += piece.get("id") or ""
            call["name"] += piece["function"].get("name") or ""
            call["arguments"] += piece["function"].get("arguments") or ""


def tool_results(messages: Messages) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "tool"]


def rolling_drop(messages: Messages, keep: int) -> dict[str, list[int]]:
    """Keep the last so many tool results: each arrival drops the one that is now too old."""
    results, schedule = tool_results(messages), {}
    for place in range(keep, len(results)):
        schedule[str(results[place])] = [results[place - keep]]
    return schedule


def repositions(messages: Messages, after: int, every: int) -> list[int]:
    """The ends of the batches of tool results, from the one with that number on."""
    ends = [index for index in tool_results(messages) if index + 1 not in tool_results(messages)]
    return ends[after - 1 :: every]


def body_of(messages: Messages, **fields: Any) -> dict[str, Any]:
    """With the policy's fields only where there is something to do, as the client sends them."""
    context = {"drop_message": rolling_drop(messages, keep=3), "reposition": repositions(messages, after=3, every=2)}
    return {
        "messages": messages,
        "tools": [SEARCH],
        "temperature": 0,
        "max_tokens": 120,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": True},
        "reasoning_effort": "medium",
        **{name: value for name, value in context.items() if value},
        **fields,
    }


def computed(usage: dict[str, Any]) -> int:
    """Prompt tokens less those of the details (DESIGN A6)."""
    return usage["prompt_tokens"] - sum(usage["prompt_tokens_details"].values())


def answered(messages: Messages, reply: Reply) -> None:
    """Append the reply and the results of its calls."""
    messages.append(reply.message())
    for call in reply.calls.values():
        text = f"Result {len(messages)}: " + "Goethe, 1808. " * 4
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def two_calls(messages: Messages) -> None:
    """A turn with a batch of two results, the first of which is a trigger in the middle of it."""
    calls = [
        {"id": name, "type": "function", "function": {"name": "search", "arguments": '{"deep": true}'}}
        for name in ("call_a", "call_b")
    ]
    messages.append({"role": "assistant", "content": None, "tool_calls": calls})
    for name in ("call_a", "call_b"):
        messages.append({"role": "tool", "tool_call_id": name, "content": f"Both {name}. " * 5})


def test_an_agent_with_rolling_drop_and_reposition_by_call_count(roomy: Running) -> None:
    """Every turn computes no more than what is new in it, and says the same as with our own field."""
    roomy.http.post("/flush_cache")
    messages, before, seen = [*START], 0, {"drop_skipped_tokens": 0, "repos_tokens": 0}
    one_call = {"tool_choice": "required", "parallel_tool_calls": False}
    generation_prompt = len("<|im_start|>assistant\n")
    for turn in range(8):
        body = body_of(messages, **one_call)
        reply = ask(roomy, body)
        assert reply.finish_reason == "tool_calls" and not reply.content
        (call,) = reply.calls.values()
        assert call["name"] == "search" and type(json.loads(call["arguments"])["deep"]) is bool
        assert reply.response_id and reply.usage is not None
        count = roomy.post("/tokenize", {"messages": messages, "tools": [SEARCH]}).json()["count"]
        assert reply.usage["prompt_tokens"] == count
        assert reply.usage["completion_tokens"] == reply.usage["total_tokens"] - count > 0
        assert 1 <= computed(reply.usage) <= count - before + generation_prompt
        for name in seen:
            seen[name] = max(seen[name], reply.usage["prompt_tokens_details"][name])
        if turn in (3, 7):
            same_as_ours(roomy, body)
        before = count
        if turn == 4:
            two_calls(messages)
        else:
            answered(messages, reply)
    assert len(tool_results(messages)) == 9 and len(repositions(messages, 3, 2)) == 3
    assert seen["drop_skipped_tokens"] > 0 and seen["repos_tokens"] > 0
    check_pages(roomy)


def same_as_ours(server: Running, body: dict[str, Any]) -> None:
    """The names of the client and the `cache` field mean one thing: the same reply and usage, seen twice each."""
    names = {"drop": "drop_message", "reposition": "reposition"}
    cache = {ours: body[theirs] for ours, theirs in names.items() if theirs in body}
    ours = {key: value for key, value in body.items() if key not in names.values() and key != "stream_options"}
    answer = server.post("/v1/chat/completions", {**ours, "cache": cache}).json()
    again = ask(server, body)
    assert [call["arguments"] for call in again.calls.values()] == [
        call["function"]["arguments"] for call in answer["choices"][0]["message"]["tool_calls"]
    ]
    assert again.usage == answer["usage"]


def test_what_is_dropped_is_not_attended(roomy: Running) -> None:
    """The reply after a schedule differs from the one without, by far more than rounding."""
    messages = [*START]
    for _ in range(4):
        two_calls(messages)
    body = body_of(messages, logprobs=True, top_logprobs=5, max_tokens=1, tools=None)
    names = ("drop_message", "reposition")
    assert all(name in body for name in names)

    def logprob(**without: Any) -> float:
        sent = {key: value for key, value in body.items() if key not in without and key != "stream_options"}
        answer = roomy.post("/v1/chat/completions", sent).json()
        return answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["logprob"]

    assert abs(logprob() - logprob(drop_message=0, reposition=0)) > 1e-3
    assert abs(logprob() - logprob(reposition=0)) > 1e-3


def test_assistant_messages_roll_too(roomy: Running) -> None:
    """Whose results are all gone; then one trigger drops several messages, in ascending order."""
    messages = [*START]
    for _ in range(3):
        two_calls(messages)
    drops = {"7": [3], "9": [2, 4], "10": [6]}
    reply = ask(roomy, body_of(messages, drop_message=drops, reposition=[10]))
    assert reply.usage is not None and reply.finish_reason is not None


def test_histories_as_the_client_keeps_them(roomy: Running) -> None:
    """An empty reply is null; metadata of its own stays on messages; its text mode leaves results without their call,
    under the tool's name, and calls without their results."""
    calls = [{"id": "c", "type": "function", "function": {"name": "search", "arguments": '{"deep": false}'}}]
    recovered = {"contextualize_recovered_tool_calls": {"source": "content", "tool_calls": calls}}
    for extra in (
        [{"role": "assistant", "content": None}],
        [{"role": "assistant", "content": "<use_mcp_tool>…", **recovered}, {"role": "user", "content": "Result."}],
        [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": calls}],
        [{"role": "tool", "tool_call_id": "c", "name": "search", "content": "An orphan."}],
    ):
        messages = [*START, *extra, {"role": "user", "content": "Go on."}]
        assert ask(roomy, body_of(messages, max_tokens=2)).finish_reason is not None


def test_no_usage_unless_it_is_asked_for(roomy: Running) -> None:
    reply = ask(roomy, body_of([*START], max_tokens=2, stream_options=None))
    assert reply.usage is None and reply.finish_reason == "length"


def test_it_knows_an_overflow(tiny: Running, fake: tuple[Running, FakeEngine]) -> None:
    """By the code, in quotes, in the body of an error and in the event of a stream that has begun."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(tiny, {"messages": [{"role": "user", "content": "long " * 200}]})
    assert caught.value.code == 400 and b'"context_length_exceeded"' in caught.value.read()

    async def overflows(request: Request) -> AsyncGenerator[Output, None]:
        yield Output(request.request_id, (65,), "A")
        raise RequestError(Reason.CONTEXT_LENGTH_EXCEEDED, "too long")

    server, engine = fake
    engine.script = overflows
    body = {"messages": START, "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    error = json.loads(events[-1])
    assert error["error"] is not None and '"context_length_exceeded"' in json.dumps(error)
