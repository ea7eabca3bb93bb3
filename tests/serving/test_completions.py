"""`POST /v1/completions` (DESIGN A8) by the `openai` package and by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.running import Running

PROMPT = "Once upon a time é"
GREEDY: dict[str, Any] = {"model": "any", "temperature": 0, "max_tokens": 12}


def ids_of(server: Running, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_every_form_of_a_prompt_is_the_same_prompt(tiny: Running) -> None:
    ids = ids_of(tiny, PROMPT)
    answers = [tiny.client.completions.create(prompt=p, **GREEDY) for p in (PROMPT, ids, [PROMPT], [ids])]
    first = answers[0]
    assert first.object == "text_completion" and first.model == "tiny-served"
    assert first.usage.prompt_tokens == len(ids) and first.usage.completion_tokens <= 12
    assert first.cache["next_position"] == len(ids)
    assert {answer.choices[0].text for answer in answers} == {first.choices[0].text}
    operations = {"operations": [["append", ids]], "temperature": 0, "max_tokens": 12}
    assert tiny.post("/v1/sequence", operations).json()["choices"][0]["text"] == first.choices[0].text


def test_sixteen_tokens_where_none_are_asked_for(tiny: Running) -> None:
    a = ids_of(tiny, "A")[0]
    answer = tiny.client.completions.create(model="x", prompt=PROMPT, logit_bias={str(a): 100}, temperature=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("A" * 16, "length")
    text = tiny.client.completions.create(
        model="x", prompt=PROMPT, logit_bias={str(a): 100}, temperature=0, stop="AA"
    ).choices[0]
    assert (text.text, text.finish_reason) == ("", "stop")


@pytest.mark.parametrize("include_usage", [False, True])
def test_a_stream_says_what_a_whole_answer_says(tiny: Running, include_usage: bool) -> None:
    arguments: dict[str, Any] = {"prompt": PROMPT, "logprobs": 3, "extra_body": {"return_token_ids": True}, **GREEDY}
    tiny.http.post("/flush_cache")
    whole = tiny.client.completions.create(**arguments)
    tiny.http.post("/flush_cache")
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    chunks = list(tiny.client.completions.create(stream=True, **options, **arguments))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert [t for choice in choices for t in choice.token_ids] == whole.choices[0].token_ids
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids == ids_of(tiny, PROMPT)
    for name in ("tokens", "text_offset"):
        joined = [x for choice in choices if choice.logprobs for x in getattr(choice.logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)
    assert chunks[-1].cache == whole.cache
    if include_usage:
        assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in (chunks[:-1] if include_usage else chunks))


def test_logprobs(tiny: Running) -> None:
    answer = tiny.client.completions.create(prompt=PROMPT, logprobs=4, **GREEDY).choices[0].logprobs
    count = len(answer.tokens)
    assert count == len(answer.token_logprobs) == len(answer.top_logprobs) == len(answer.text_offset) > 0
    for token, logprob, top in zip(answer.tokens, answer.token_logprobs, answer.top_logprobs, strict=True):
        # Greedy takes the likeliest; bytes that are no character have names of their own.
        assert len(top) == 4 and max(top, key=top.__getitem__) == token
        assert top[token] == pytest.approx(logprob, abs=1e-5)
    sampled = tiny.client.completions.create(prompt=PROMPT, logprobs=0, **GREEDY).choices[0].logprobs
    assert sampled.token_logprobs == answer.token_logprobs and sampled.top_logprobs is None
    assert tiny.client.completions.create(prompt=PROMPT, **GREEDY).choices[0].logprobs is None


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 99999]}, "prompt[1]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"cache": {"reposition": [0]}}, "cache"),
        ({"drop_message": {"0": [0]}}, "drop_message"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(tiny: Running, fields: dict[str, Any], param: str) -> None:
    response = tiny.post("/v1/completions", {"prompt": "x", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["error"]["message"].startswith(param)


def test_what_asks_for_nothing_special_is_fine(tiny: Running) -> None:
    body = {"prompt": "x", "echo": False, "suffix": None, "best_of": 1, "n": 1, "cache_salt": "a", "max_tokens": 1}
    assert tiny.post("/v1/completions", body).status_code == 200
    long = tiny.post("/v1/completions", {"prompt": [5] * 256})
    assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
    assert tiny.post("/v1/completions", {"prompt": [5] * 255}).json()["usage"]["completion_tokens"] == 1
