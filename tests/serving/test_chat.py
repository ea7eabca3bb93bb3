"""The `openai` package against a running server with the real engine (DESIGN A1-A7, A10)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import openai
import pytest

from tests.serving.running import Running

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a page?"},
    {"role": "assistant", "content": "One token's KV."},
    {"role": "user", "content": "And a segment?"},
]
CACHE = {"drop": {"2": [1]}, "reposition": [2]}
GREEDY: dict[str, Any] = {"model": "whatever", "temperature": 0, "max_tokens": 8}


def text_of(stream: Any) -> tuple[str, list[Any]]:
    chunks = list(stream)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), chunks


def test_plain(tiny: Running) -> None:
    answer = tiny.client.chat.completions.create(messages=MESSAGES, **GREEDY)
    choice = answer.choices[0]
    assert answer.object == "chat.completion" and answer.model == "tiny-served"
    assert choice.message.role == "assistant" and isinstance(choice.message.content, str)
    assert choice.finish_reason in ("length", "stop")
    count = tiny.post("/tokenize", {"messages": MESSAGES}).json()["count"]
    assert answer.usage.prompt_tokens == count
    assert answer.usage.total_tokens == count + answer.usage.completion_tokens
    assert 1 <= answer.usage.completion_tokens <= 8
    again = tiny.client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert again.choices[0].message.content == choice.message.content


@pytest.mark.parametrize("cache", [None, CACHE])
def test_a_stream_says_what_a_whole_answer_says(tiny: Running, cache: Any) -> None:
    extra = {"return_token_ids": True, "cache": cache}
    arguments = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "extra_body": extra, **GREEDY}
    tiny.http.post("/flush_cache")
    whole = tiny.client.chat.completions.create(**arguments)
    tiny.http.post("/flush_cache")
    text, chunks = text_of(
        tiny.client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **arguments)
    )
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    # Both found the cache empty, so that even the counts of reuse agree.
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].cache == whole.cache
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[0].message_spans == whole.message_spans
    ids = [token_id for chunk in chunks if chunk.choices for token_id in chunk.choices[0].token_ids]
    assert ids == whole.choices[0].token_ids and len(ids) == whole.usage.completion_tokens
    entries = [
        e for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content
    ]
    assert [e.token for e in entries] == [e.token for e in whole.choices[0].logprobs.content]
    assert [e.logprob for e in entries] == pytest.approx(
        [e.logprob for e in whole.choices[0].logprobs.content], abs=1e-4
    )


def test_without_include_usage_the_cache_object_is_on_the_finish_chunk(tiny: Running) -> None:
    _, chunks = text_of(tiny.client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[-1].choices[0].finish_reason
    assert chunks[-1].cache["segments"] == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_raw_stream(tiny: Running) -> None:
    response = tiny.post("/v1/chat/completions", {"messages": MESSAGES, "stream": True, **GREEDY})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])


def test_spans_tile_the_prompt_and_token_ids_continue_it(tiny: Running) -> None:
    """A4: a reply sent back as token_ids is the prompt and the sampled ids, token for token."""
    extra = {"return_token_ids": True}
    first = tiny.client.chat.completions.create(messages=MESSAGES, extra_body=extra, **GREEDY)
    spans = first.message_spans
    assert len(spans) == len(MESSAGES) and spans[0][0] == 0
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] < len(first.prompt_token_ids) == first.usage.prompt_tokens
    sampled = first.choices[0].token_ids
    reply = {"role": "assistant", "token_ids": sampled}
    following: Any = [*MESSAGES, reply, {"role": "user", "content": "Go on."}]
    second = tiny.client.chat.completions.create(messages=following, extra_body=extra, **GREEDY)
    longer = first.prompt_token_ids + sampled
    assert second.prompt_token_ids[: len(longer)] == longer


def test_drop_and_reposition_free_positions_and_change_the_answer(tiny: Running) -> None:
    def ask(**fields: Any) -> Any:
        extra = {"return_token_ids": True, **fields}
        # What is resident already would be computed in no segment.
        tiny.http.post("/flush_cache")
        return tiny.client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=5, extra_body=extra, **GREEDY
        )

    plain, dropped, edited = ask(), ask(cache={"drop": {"2": [1]}}), ask(cache=CACHE)
    tokens = plain.usage.prompt_tokens
    gone = plain.message_spans[1][1] - plain.message_spans[1][0]
    assert plain.cache["active_tokens"] == plain.cache["next_position"] == tokens
    assert dropped.cache["active_tokens"] == tokens - gone and dropped.cache["next_position"] == tokens
    assert edited.cache["active_tokens"] == edited.cache["next_position"] == tokens - gone
    assert (plain.cache["segments"], edited.cache["segments"]) == (1, 2)
    assert edited.usage.prompt_tokens == tokens
    first = [answer.choices[0].logprobs.content[0].logprob for answer in (plain, dropped, edited)]
    assert len({round(value, 4) for value in first}) == 3
    for answer in (plain, dropped, edited):
        details = answer.usage.prompt_tokens_details
        counted = details.cached_tokens + details.drop_skipped_tokens + details.repos_tokens
        assert counted + answer.cache["computed_tokens"] == tokens
    synonym = ask(drop_message={"2": [1]}, reposition=[2])
    assert synonym.choices[0].token_ids == edited.choices[0].token_ids
    assert synonym.cache == edited.cache


def test_a_chat_is_the_sequence_that_it_is_lowered_to(tiny: Running) -> None:
    """A9: the same history through both routes gives the same tokens."""
    tiny.http.post("/flush_cache")
    chat = tiny.client.chat.completions.create(
        messages=MESSAGES, extra_body={"return_token_ids": True, "cache": CACHE}, **GREEDY
    )
    ids, (start, end) = chat.prompt_token_ids, chat.message_spans[1]
    boundary = chat.message_spans[2][1]
    dropped = list(range(start, end))
    operations = [["append", ids[:boundary]], ["drop", dropped], ["reposition"], ["append", ids[boundary:]]]
    tiny.http.post("/flush_cache")
    answer = tiny.post("/v1/sequence", {"operations": operations, "temperature": 0, "max_tokens": 8}).json()
    assert answer["choices"][0]["token_ids"] == chat.choices[0].token_ids
    assert answer["choices"][0]["text"] == chat.choices[0].message.content
    assert answer["cache"] == chat.cache


def test_logprobs(tiny: Running) -> None:
    answer = tiny.client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=4, **GREEDY)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 4
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        # Greedy takes the most likely token.
        assert entry.logprob == pytest.approx(values[0], abs=1e-5) and entry.logprob < 0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    plain = tiny.client.chat.completions.create(messages=MESSAGES, logprobs=True, **GREEDY)
    assert plain.choices[0].logprobs.content[0].top_logprobs == []
    assert tiny.client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].logprobs is None


def test_seed_decides_what_is_drawn(tiny: Running) -> None:
    def ask(seed: int) -> Any:
        return tiny.client.chat.completions.create(
            model="x", messages=MESSAGES, seed=seed, max_tokens=16, extra_body={"return_token_ids": True}
        )

    texts = [ask(seed).choices[0].token_ids for seed in (5, 5, 6, -(2**63), 2**63 - 1)]
    assert texts[0] == texts[1] != texts[2]


def test_logit_bias_stop_and_stop_token_ids(tiny: Running) -> None:
    a, b = (tiny.post("/tokenize", {"prompt": letter}).json()["tokens"][0] for letter in "AB")
    only_a: dict[str, Any] = {"messages": MESSAGES, "logit_bias": {str(a): 100}, **GREEDY}
    answer = tiny.client.chat.completions.create(**only_a)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("A" * 8, "length")
    answer = tiny.client.chat.completions.create(stop="AAA", extra_body={"return_token_ids": True}, **only_a)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.choices[0].token_ids == [a] * 3
    text, _ = text_of(tiny.client.chat.completions.create(stop=["x", "AAA"], stream=True, **only_a))
    assert text == ""
    answer = tiny.client.chat.completions.create(extra_body={"stop_token_ids": [b, a]}, **only_a)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.usage.completion_tokens == 1


def test_max_tokens_is_cut_to_what_fits(tiny: Running) -> None:
    a = tiny.post("/tokenize", {"prompt": "A"}).json()["tokens"][0]
    for huge in (10**6, 2**63 - 1, 10**30):
        messages = [{"role": "user", "content": "x" * 180}]
        body = {"messages": messages, "temperature": 0, "logit_bias": {str(a): 100}, "max_completion_tokens": huge}
        answer = tiny.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        # At most N - n tokens come out (A10).
        assert answer["usage"]["completion_tokens"] == 256 - answer["cache"]["next_position"]


def test_overflow_is_one_the_clients_recognise(tiny: Running) -> None:
    long: list[Any] = [*MESSAGES, {"role": "user", "content": "x" * 300}]
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.chat.completions.create(messages=long, **GREEDY)
    error = caught.value
    assert (error.code, error.param, error.type) == ("context_length_exceeded", "messages", "invalid_request_error")
    message = error.body["message"]
    assert message.startswith("This model's maximum context length is 256 tokens. However, your request has ")
    assert "which exceeds the context window (context_length_exceeded)." in message
    assert message.endswith("Please reduce the length of the messages or completion.")
    # Positions count, not logical length (A7).
    fits: list[Any] = [{"role": "user", "content": "y" * 180}, {"role": "user", "content": "z" * 150}]
    answer = tiny.client.chat.completions.create(
        messages=fits, extra_body={"cache": {"drop": {"0": [0]}, "reposition": [0]}}, **GREEDY
    )
    assert answer.usage.prompt_tokens > 256


def test_a_bad_cache_field_is_a_bad_request_with_its_path(tiny: Running) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.chat.completions.create(
            messages=MESSAGES, extra_body={"cache": {"drop": {"1": [0, True]}}}, **GREEDY
        )
    assert caught.value.param == "cache.drop.1[1]"
    assert caught.value.code == "invalid_cache"


def test_a_last_assistant_message_is_continued(tiny: Running) -> None:
    messages: list[Any] = [*MESSAGES[:2], {"role": "assistant", "content": "It is"}]
    extra = {"continue_final_message": True, "return_token_ids": True}
    answer = tiny.client.chat.completions.create(messages=messages, extra_body=extra, **GREEDY)
    assert tiny.post("/detokenize", {"tokens": answer.prompt_token_ids}).json()["prompt"].endswith("\nIt is")
    body = {"messages": messages, "add_generation_prompt": False}
    whole = tiny.post("/tokenize", body).json()["tokens"]
    assert whole[: len(answer.prompt_token_ids)] == answer.prompt_token_ids


def test_tools_are_shown_to_the_model(tiny: Running) -> None:
    tool: Any = {"type": "function", "function": {"name": "mend", "parameters": {"type": "object"}}}
    answer = tiny.client.chat.completions.create(
        messages=MESSAGES[:2], tools=[], extra_body={"return_token_ids": True}, **{**GREEDY, "max_tokens": 1}
    )
    tokens = tiny.post("/tokenize", {"messages": MESSAGES[:2], "tools": [tool]}).json()["tokens"]
    assert len(tokens) > answer.usage.prompt_tokens
    assert '"name": "mend"' in tiny.post("/detokenize", {"tokens": tokens}).json()["prompt"]
