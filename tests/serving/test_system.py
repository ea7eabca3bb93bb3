"""Models, tokens, metrics, flushing, and what happens to the engine when clients go."""

from __future__ import annotations

import io
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.logging import create_logger
from tests.serving.running import Running, eventually, send

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def samples(server: Running) -> dict[str, float]:
    """Sample name, with its labels' values, to value."""
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_models(tiny: Running) -> None:
    model = tiny.client.models.list().data[0]
    assert (model.id, model.object, model.max_model_len) == ("tiny-served", "model", 256)


@pytest.mark.parametrize("text", ["", "Hello", "  naïve 👩‍👩‍👧 한국어\r\n\x1b[0m", "<|im_start|>user"])
def test_tokenize_and_back(tiny: Running, text: str) -> None:
    answer = tiny.post("/tokenize", {"prompt": text}).json()
    assert answer["count"] == len(answer["tokens"])
    assert tiny.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokenize_wants_one_of_prompt_and_messages(tiny: Running) -> None:
    for body in ({}, {"prompt": "x", "messages": HELLO}):
        assert tiny.post("/tokenize", body).status_code == 400
    assert tiny.post("/detokenize", {"tokens": [1, 99999]}).json()["error"]["param"] == "tokens[1]"
    assert tiny.post("/detokenize", {"tokens": [1, 2.0]}).json()["error"]["param"] == "tokens[1]"


@pytest.mark.parametrize("field", [{"cache": {"drop": {"0": [0]}}}, {"reposition": [0]}])
def test_tokenize_refuses_edits_of_a_plain_text(tiny: Running, field: dict[str, Any]) -> None:
    """A3: nothing is silently ignored."""
    error = tiny.http.post("/tokenize", json={"prompt": "A", **field}).json()["error"]
    assert error["param"] == next(iter(field)) and "no messages to name" in error["message"]


def test_metrics_count_requests_and_nothing_compiles_after_warm_up(tiny: Running) -> None:
    before = samples(tiny)
    answer = tiny.client.chat.completions.create(model="x", messages=HELLO, max_tokens=5)
    eventually(lambda: samples(tiny)["akv:num_requests_running"] == 0)
    after = samples(tiny)
    assert after["akv:compilations_total"] == before["akv:compilations_total"] > 0
    assert after["akv:prompt_tokens_total"] - before["akv:prompt_tokens_total"] == answer.usage.prompt_tokens
    assert (
        after["akv:generation_tokens_total"] - before["akv:generation_tokens_total"] == answer.usage.completion_tokens
    )
    for histogram in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        name = f"akv:{histogram}_count"
        assert after[name] - before[name] == 1
    pages = [after[f"akv:pages {state}"] for state in ("free", "cached", "leased", "private")]
    assert sum(pages) == 1024 and pages[3] == 0
    assert after["akv:num_requests_waiting"] == 0
    finish = f"akv:request_success_total {answer.choices[0].finish_reason}"
    assert after[finish] - before.get(finish, 0) == 1


def test_one_line_a_request(tiny: Running) -> None:
    tiny.log.seek(0)
    tiny.log.truncate()
    answer = tiny.client.chat.completions.create(model="x", messages=HELLO, max_tokens=2)
    # It comes after the answer.
    eventually(lambda: answer.id in tiny.log.getvalue())
    lines = [line for line in tiny.log.getvalue().splitlines() if answer.id in line]
    assert len(lines) == 1
    for key in ("prompt", "computed", "cached", "output", "ttft", "total", "finish"):
        assert f" {key}=" in lines[0]
    assert f"output={answer.usage.completion_tokens}" in lines[0]


def test_flush_cache(tiny: Running) -> None:
    assert tiny.http.post("/flush_cache").json()["freed_pages"] >= 0
    assert tiny.http.get("/flush_cache").status_code == 405


@pytest.mark.parametrize("stream", [False, True])
def test_hanging_up_frees_the_engine(tiny: Running, stream: bool) -> None:
    """The request would run to the last position; the client leaves at once."""
    before = samples(tiny)["akv:requests_aborted_total"]
    a = tiny.post("/tokenize", {"prompt": "A"}).json()["tokens"][0]
    body = {"messages": HELLO, "logit_bias": {str(a): 100}, "stream": stream}
    connection = send(tiny, json.dumps(body).encode())
    eventually(lambda: samples(tiny)["akv:num_requests_running"] == 1)
    connection.close()
    eventually(lambda: samples(tiny)["akv:requests_aborted_total"] == before + 1)
    after = samples(tiny)
    assert after["akv:num_requests_running"] == 0
    assert after["akv:pages private"] == 0


def test_many_at_once_each_get_their_own_answer(tiny: Running) -> None:
    """More clients than the batch has room for."""
    letters = "ABCDEFGHIJKL"
    ids = [tiny.post("/tokenize", {"prompt": letter}).json()["tokens"][0] for letter in letters]

    def ask(token_id: int) -> str:
        answer = tiny.client.chat.completions.create(
            model="x", messages=HELLO, max_tokens=6, logit_bias={str(token_id): 100}, temperature=0
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(len(ids)) as pool:
        assert list(pool.map(ask, ids)) == [letter * 6 for letter in letters]


@pytest.mark.parametrize("level, kinds", [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_log_levels(level: str, kinds: int) -> None:
    stream = io.StringIO()
    log = create_logger(level, stream)
    log.debug("one")
    log.info("two")
    log.warning("three")
    assert stream.getvalue().count("\n") == kinds
