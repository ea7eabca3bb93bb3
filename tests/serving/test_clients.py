"""Other people's clients against the real server: litellm and a whole mini-swe-agent episode (openai is all over)."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import openai
import pytest

from akv_jax.errors import Reason, RequestError
from akv_jax.request import Request
from tests.serving.fake_engine import FakeEngine, failing
from tests.serving.mini_swe import run_episode
from tests.serving.running import Running, check_pages

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"far": {"type": "boolean"}},
            "required": ["far"],
            "additionalProperties": False,
        },
    },
}


#: The ways in which litellm reaches a server such as this one.
PROVIDERS = ("openai", "hosted_vllm")


def arguments(server: Running, provider: str = "openai", **fields: Any) -> dict[str, Any]:
    where = {"model": f"{provider}/any", "api_base": f"{server.url}/v1", "api_key": "any", "num_retries": 0}
    return {**where, "messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_plain_and_streamed(litellm: Any, roomy: Running, provider: str) -> None:
    answer = litellm.completion(**arguments(roomy, provider, logprobs=True, top_logprobs=2))
    plain = roomy.client.chat.completions.create(model="x", messages=HELLO, max_tokens=8, temperature=0)
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens
    assert answer.choices[0].finish_reason == plain.choices[0].finish_reason
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **arguments(roomy, provider)))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    rebuilt = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert rebuilt.usage.completion_tokens == plain.usage.completion_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_calls_a_tool_and_sends_the_result(litellm: Any, roomy: Running, provider: str) -> None:
    forced: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}
    # It takes additionalProperties out of some schemas, and random weights would go on to invent properties.
    brace = roomy.post("/tokenize", {"prompt": "}"}).json()["tokens"][0]
    forced |= {"max_tokens": 100, "logit_bias": {str(brace): 100}}
    first = litellm.completion(**arguments(roomy, provider, **forced))
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "look" and type(json.loads(call.function.arguments)["far"]) is bool
    chunks = list(litellm.completion(stream=True, **arguments(roomy, provider, **forced)))
    (streamed,) = litellm.stream_chunk_builder(chunks, messages=HELLO).choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments and streamed.function.name == "look"
    result = {"role": "tool", "tool_call_id": call.id, "content": "nothing to see"}
    second = litellm.completion(**arguments(roomy, provider, messages=[*HELLO, message, result], tools=[TOOL]))
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_sends_the_cache_field(litellm: Any, roomy: Running, provider: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Well?"}]
    extra = {"cache": {"drop": {"1": [0]}, "reposition": [1]}}
    edited = litellm.completion(**arguments(roomy, provider, messages=messages, extra_body=extra))
    assert edited.cache["active_tokens"] < edited.usage.prompt_tokens
    wrong = {"cache": {"drop": {"0": [1]}}}
    with pytest.raises(litellm.BadRequestError, match=r"cache\.drop\.0\[0\]"):
        litellm.completion(**arguments(roomy, provider, extra_body=wrong))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("stream", [False, True])
def test_litellm_knows_an_overflow(litellm: Any, tiny: Running, provider: str, stream: bool) -> None:
    for size in (300, 50_000):
        long = [{"role": "user", "content": "x" * size}]
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(**arguments(tiny, provider, messages=long, stream=stream))


def test_what_clients_try_again(litellm: Any, fake: tuple[Running, FakeEngine]) -> None:
    """A full queue is tried again, what is wrong for good is not."""
    server, engine = fake
    tries = 0

    def counting(error: Exception) -> Any:
        async def script(request: Request) -> AsyncGenerator[Any, None]:
            nonlocal tries
            tries += 1
            async for output in failing(error)(request):
                yield output

        return script

    client = server.client.with_options(max_retries=1)
    for reason, expected in ((Reason.QUEUE_FULL, 2), (Reason.POOL_TOO_SMALL, 1), (Reason.CONTEXT_LENGTH_EXCEEDED, 1)):
        engine.script, tries = counting(RequestError(reason, "no")), 0
        with pytest.raises(openai.APIStatusError):
            client.chat.completions.create(model="x", messages=HELLO)
        assert tries == expected, reason
    engine.script = counting(RequestError(Reason.QUEUE_FULL, "no"))
    with pytest.raises((litellm.ServiceUnavailableError, litellm.InternalServerError)):
        litellm.completion(**arguments(server))


def test_the_api_key_through_litellm(litellm: Any, model: Any) -> None:
    from tests.serving.running import running

    with running(FakeEngine(model), api_key="sesame") as server, pytest.raises(litellm.AuthenticationError):
        litellm.completion(**arguments(server))


@pytest.mark.parametrize("forced", [False, True])
def test_a_mini_swe_agent_episode(
    litellm: Any, roomy: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """Hopeless with random weights, but to its end, and without an error of the protocol."""
    fields: dict[str, Any] = {"max_tokens": 100}
    if forced:
        # Every reply is then a call, with a command of random letters, which must come to an end.
        quote, brace = roomy.post("/tokenize", {"prompt": '"}'}).json()["tokens"]
        bias = {str(quote): 100, str(brace): 100}
        fields = {"tool_choice": "required", "parallel_tool_calls": False, "logit_bias": bias, "max_tokens": 200}
    agent, shell = run_episode(roomy, tmp_path, monkeypatch, steps=5, **fields)
    assert (len(shell.commands) > 0) == forced
    assert [message["role"] for message in agent.messages].count("tool" if forced else "user") >= 5
    check_pages(roomy)
