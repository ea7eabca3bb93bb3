"""A long chat with eight boundaries over HTTP: as many forwards as chunks, whatever the operations (DESIGN R2)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel
from akv_jax.runtime.runner import Runner
from tests.serving.running import Running, check_pages, running
from tests.tiny_engine import quick_compiles

CONTEXT, CHUNK = 2560, 256
#: A token a character. Nothing reads the first message, which is dropped at its end; each of the others but the last is
#: read by the next one, then dropped; and each time what is left moves together.
MESSAGES: list[dict[str, Any]] = [{"role": "system", "content": "s" * 300}]
MESSAGES += [{"role": ("user", "assistant")[k % 2], "content": chr(97 + k) * 200} for k in range(8)]
CACHE = {"drop": {"0": [0]} | {str(k): [k - 1] for k in range(2, 9)}, "reposition": [0, *range(2, 9)]}


@pytest.fixture(scope="module")
def runner(model: LoadedModel) -> Runner:
    """One executable, whose steps have room for the whole prompt."""
    sizes = {"context_length": CONTEXT, "num_pages": CONTEXT, "max_running_requests": 2, "max_list_entries": 1 << 15}
    config = EngineConfig(**sizes, token_buckets=(CONTEXT,))
    with quick_compiles():
        runner = Runner(model.config, model.params, config)
        runner.warm_up()
    return runner


def ask(server: Running) -> Any:
    body: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
    extra = {"cache": CACHE, "return_token_ids": True, "ignore_eos": True}
    answer = server.client.chat.completions.create(**body, logprobs=True, extra_body=extra)
    check_pages(server)
    return answer


def test_as_many_forwards_as_chunks(model: LoadedModel, runner: Runner) -> None:
    answers = []
    for chunk in (CHUNK, CONTEXT):
        config = dataclasses.replace(runner.config, chunked_prefill_size=chunk)
        engine = AsyncEngine(lambda config=config: Engine(model, config, runner=runner))
        with running(engine) as server:
            engine.start()
            engine.wait_ready()
            answers.append(ask(server))
    spans = answers[0].message_spans
    unread = spans[0][1]
    for answer, forwards in zip(answers, (-(-answers[0].cache["computed_tokens"] // CHUNK), 1), strict=True):
        prompt, cache = answer.usage.prompt_tokens, answer.cache
        assert 1900 < prompt < 2300
        # Eight boundaries, nine segments; the first computes nothing.
        assert (cache["computed_tokens"], cache["segments"]) == (prompt - unread, 8)
        assert cache["next_position"] == cache["active_tokens"] == prompt - spans[7][1]
        assert cache["forwards"] == forwards
    # What is dropped unread counts: it would have been a forward more.
    assert -(-prompt // CHUNK) > answers[0].cache["forwards"] > 1
    cut, whole = (answer.choices[0] for answer in answers)
    assert cut.token_ids == whole.token_ids
    logprobs = ([entry.logprob for entry in choice.logprobs.content] for choice in (cut, whole))
    assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)
