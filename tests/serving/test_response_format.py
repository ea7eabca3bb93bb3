"""`response_format` (DESIGN A1): replies that fit a JSON schema, whatever the model would rather say."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.serving.running import Running

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def form(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema, **fields}}


def ask(server: Running, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(server: Running, **body: Any) -> tuple[str, str]:
    stream = server.client.chat.completions.create(
        model="x", messages=body.pop("messages", HELLO), stream=True, extra_body={"max_tokens": 100, **body}
    )
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    return "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason


@pytest.fixture
def compact(tiny: Running) -> dict[str, int]:
    """A `logit_bias` against the white space that JSON may have anywhere: random weights love it, up to max_tokens."""
    return {str(tiny.post("/tokenize", {"prompt": space}).json()["tokens"][0]): -100 for space in " \n\r\t"}


POINT = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["on", "colour"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_reply_fits_its_schema_and_ends_with_it(tiny: Running, compact: dict[str, int], temperature: float) -> None:
    body = {"response_format": form(POINT, strict=True), "temperature": temperature, "logit_bias": compact}
    for seed in range(3):
        choice = ask(tiny, **body, seed=seed)
        assert choice["finish_reason"] == "stop"
        value = json.loads(choice["message"]["content"])
        assert set(value) == {"on", "colour"}
        assert type(value["on"]) is bool and value["colour"] in ("red", "green")


def test_json_object(tiny: Running) -> None:
    """It must be an object; whether random weights ever close it is another matter."""
    for seed in range(3):
        content = ask(tiny, response_format={"type": "json_object"}, seed=seed)["message"]["content"]
        assert content.startswith("{")
    text = ask(tiny, response_format={"type": "text"}, seed=0)["message"]["content"]
    assert not text.startswith("{")


def test_the_openai_package_parses_it(tiny: Running, compact: dict[str, int]) -> None:
    class Point(pydantic.BaseModel):
        on: bool
        level: int = pydantic.Field(ge=0, le=9)

    answer = tiny.client.chat.completions.parse(
        model="x", messages=HELLO, response_format=Point, max_tokens=200, logit_bias=compact
    )
    assert isinstance(answer.choices[0].message.parsed, Point)


WORDS = ["👩‍👩‍👧 family", "한국어 각", "é ạ̈ ̧", "naïve 🏳️‍🌈", "\U0001f468\U0001f3fd", "aaab aab"]


@pytest.mark.parametrize("word", WORDS)
def test_a_stream_says_what_a_whole_answer_says(tiny: Running, word: str) -> None:
    """Characters and stop strings split over tokens: each token here is a byte."""
    wanted = form({"const": word})
    whole = ask(tiny, response_format=wanted)
    assert json.loads(whole["message"]["content"]) == word
    assert streamed(tiny, response_format=wanted) == (whole["message"]["content"], "stop")
    text = whole["message"]["content"]
    for start in range(1, len(word) - 1):
        # One, two and three characters long.
        stop = word[start : start + 1 + start % 3]
        assert streamed(tiny, response_format=wanted, stop=["never", stop]) == (text.partition(stop)[0], "stop")
    shortest = ask(tiny, response_format=wanted, stop=[word[1:3]])
    assert shortest["message"]["content"] == text.partition(word[1:3])[0]


def test_logprobs_stay_the_models_own(tiny: Running) -> None:
    """A10: before the mask, so the forced token is as unlikely as the model finds it."""
    free = ask(tiny, temperature=0, logprobs=True, top_logprobs=20, max_tokens=1)["logprobs"]["content"][0]
    forced = ask(tiny, temperature=0, logprobs=True, top_logprobs=20, max_tokens=1, response_format=form({"const": 1}))
    forced = forced["logprobs"]["content"][0]
    assert forced["token"] == "1" != free["token"]
    assert forced["logprob"] < free["logprob"]
    assert [e["token"] for e in forced["top_logprobs"]] == [e["token"] for e in free["top_logprobs"]]
    assert [e["logprob"] for e in forced["top_logprobs"]] == pytest.approx([e["logprob"] for e in free["top_logprobs"]])


def test_logit_bias_cannot_break_the_form_and_the_end_waits_for_it(tiny: Running, compact: dict[str, int]) -> None:
    ids = [tiny.post("/tokenize", {"prompt": text}).json()["tokens"][0] for text in ("<|im_end|>", "x")]
    bias = compact | {str(token): 100 for token in ids}
    choice = ask(tiny, response_format=form(POINT), logit_bias=bias, ignore_eos=True)
    assert set(json.loads(choice["message"]["content"])) == {"on", "colour"} and choice["finish_reason"] == "stop"


def test_a_cut_reply_says_so(tiny: Running) -> None:
    choice = ask(tiny, response_format=form({"const": "long enough"}), max_tokens=5)
    assert (choice["message"]["content"], choice["finish_reason"]) == ('"long', "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_continued_message_fits_as_a_whole(tiny: Running, compact: dict[str, int], stream: bool) -> None:
    messages = [*HELLO, {"role": "assistant", "content": '{"on": true, "col'}]
    body: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": True,
        "response_format": form(POINT),
        "logit_bias": compact,
    }
    text = streamed(tiny, **body)[0] if stream else ask(tiny, **body)["message"]["content"]
    assert text.startswith('our"')
    assert json.loads('{"on": true, "col' + text)["on"] is True


def test_a_continued_message_that_cannot_fit_is_a_400(tiny: Running) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "response_format": form(POINT)}
    response = tiny.post("/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "schema, says",
    [
        ({"type": "wizard"}, "wizard"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"$ref": "#/nowhere"}, "does not exist"),
        ({"$ref": "http://example.com/x.json"}, "not present"),
        ({"$ref": "#"}, ""),
        ({"enum": []}, "Unsatisfiable"),
        ({"properties": 5}, "properties must be an object"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_compile_is_a_400_with_the_reason(
    tiny: Running, schema: Any, says: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.chat.completions.create(
            model="x", messages=HELLO, response_format=form(schema), stream=stream, max_tokens=2
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert says in caught.value.body["message"] and len(caught.value.body["message"]) < 700


def test_strict_decides_about_keywords_that_cannot_be_checked(tiny: Running) -> None:
    schema = {"const": 1, "not": {"const": 2}}
    assert ask(tiny, response_format=form(schema))["message"]["content"] == "1"
    response = tiny.post("/v1/chat/completions", {"messages": HELLO, "response_format": form(schema, strict=True)})
    assert response.status_code == 400 and "not" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "value, param",
    [
        ("json_object", "response_format"),
        ({"type": 5}, "response_format.type"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}, "response_format.json_schema.strict"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": 1}}, "response_format.json_schema.name"),
    ],
)
def test_a_bad_format_is_a_400_that_names_it(tiny: Running, value: Any, param: str) -> None:
    response = tiny.post("/v1/chat/completions", {"messages": HELLO, "response_format": value})
    assert response.status_code == 400 and response.json()["error"]["param"] == param
