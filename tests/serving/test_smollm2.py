"""SmolLM2 with its own weights behind HTTP: what comes out of the server is what the engine gives for the history that
the body means, whose tokens and operations are written down by hand here (DESIGN A1-A6)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel
from akv_jax.request import Request, Sampling
from akv_jax.runtime.runner import Runner
from spec.operations import Append, Drop, Reposition
from spec.visibility import Usage, usage
from tests import tiny_engine
from tests.serving.mini_swe import run_episode
from tests.serving.running import Process, Running, check_pages, eventually, running

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada!"},
    {"role": "user", "content": "What is my name?"},
]
CACHE: dict[str, Any] = {"drop": {"2": [1]}, "reposition": [2]}
REPLY = 3


@pytest.fixture(scope="module")
def server(smollm2: LoadedModel, smollm2_runner: Runner) -> Iterator[Running]:
    engine = AsyncEngine(lambda: Engine(smollm2, smollm2_runner.config, runner=smollm2_runner))
    with running(engine) as server:
        engine.start()
        engine.wait_ready()
        yield server


def same_kinds(told: Any, cache: dict[str, int], meant: Usage) -> None:
    """A6."""
    details = told.prompt_tokens_details
    kinds = cache["computed_tokens"], details.drop_skipped_tokens, details.repos_tokens, details.cached_tokens
    assert kinds == tuple(map(len, (meant.computed, meant.drop_skipped, meant.repos, meant.cached)))
    assert told.prompt_tokens == sum(kinds) and told.completion_tokens == REPLY


def test_a_chat_with_drop_and_reposition(smollm2: LoadedModel, smollm2_runner: Runner, server: Running) -> None:
    """A4-A6, A10: tokens, logprobs and usage, computed from nothing and reused, whole and streamed."""
    encode = smollm2.tokenizer.encode
    turns = [encode(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n") for m in MESSAGES]
    spans = list(pairwise(accumulate(map(len, turns), initial=0)))
    history = (
        Append((*turns[0], *turns[1], *turns[2])),
        Drop(frozenset(range(*spans[1]))),
        Reposition(),
        Append((*turns[3], *encode("<|im_start|>assistant\n"))),
    )
    prompt = sum(len(step.tokens) for step in history if isinstance(step, Append))

    client = server.client.with_options(timeout=120)
    body: dict[str, Any] = {"model": "any", "messages": MESSAGES, "max_tokens": REPLY, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 5}
    extra = {"cache": CACHE, "return_token_ids": True, "ignore_eos": True}
    whole: Any = client.chat.completions.create(**body, extra_body=extra)
    chunks: list[Any] = list(
        client.chat.completions.create(**body, extra_body=extra, stream=True, stream_options={"include_usage": True})
    )
    check_pages(server)

    # The pool is the server's no longer: all of it has answered.
    request = Request("a", history, Sampling(REPLY, 0.0, ignore_eos=True, logprobs=True, top_logprobs=5))
    engine = Engine(smollm2, smollm2_runner.config, runner=smollm2_runner)
    direct = [output for output in tiny_engine.run(engine, [request])["a"] if output.token_ids]
    tokens = [token for output in direct for token in output.token_ids]
    logprobs = [entry for output in direct for entry in output.logprobs]

    assert whole.message_spans == [list(span) for span in spans]
    streamed = [chunk.choices[0] for chunk in chunks if chunk.choices]
    text = "".join(choice.delta.content or "" for choice in streamed)
    assert text == whole.choices[0].message.content == smollm2.tokenizer.decode(tokens)
    answers = (
        (whole.choices[0].token_ids, whole.choices[0].logprobs.content),
        (
            [token for choice in streamed for token in choice.token_ids or ()],
            [entry for choice in streamed if choice.logprobs for entry in choice.logprobs.content],
        ),
    )
    for ids, entries in answers:
        assert ids == tokens
        assert [e.logprob for e in entries] == pytest.approx([e.logprob for e in logprobs], abs=1e-3)
        for entry, meant in zip(entries, logprobs, strict=True):
            tops = [top.logprob for top in entry.top_logprobs]
            assert tops == pytest.approx([logprob for _, logprob in meant.top], abs=1e-3)

    same_kinds(whole.usage, whole.cache, usage(history, ()))
    same_kinds(chunks[-1].usage, chunks[-1].cache, usage(history, range(prompt)))
    for cache in (whole.cache, chunks[-1].cache):
        kept = prompt - len(turns[1])
        assert (cache["active_tokens"], cache["next_position"], cache["restored_tokens"]) == (kept, kept, 0)
    assert (whole.cache["segments"], whole.cache["forwards"]) == (2, 1)
    assert (chunks[-1].cache["segments"], chunks[-1].cache["forwards"]) == (1, 1)


@pytest.mark.long
@pytest.mark.parametrize("forced", [False, True])
def test_a_mini_swe_agent_episode(
    litellm: Any, smollm2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    """Hopeless, but whole: twelve replies, as they come and as calls of its tool, and no error of the protocol."""
    config = EngineConfig(context_length=8192, num_pages=16384, max_running_requests=2)
    engine = AsyncEngine(lambda: Engine(smollm2, config))
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False} if forced else {}
    with running(engine) as server:
        engine.start()
        engine.wait_ready()
        _, shell = run_episode(server, tmp_path, monkeypatch, steps=12, **fields)
        assert shell.commands or not forced
        check_pages(server)


@pytest.mark.long
def test_four_devices_say_what_one_says(model_cache: Path, smollm2: LoadedModel) -> None:
    """R5: the command with `--tp`, 9 query and 3 KV heads over 4 devices of a CPU."""
    answers = []
    for tp in ("1", "4"):
        flags = ["--dtype", "float32", "--tp", tp, "--max-total-tokens", "2048", "--chunked-prefill-size", "64"]
        server = Process(*flags, "--max-running-requests", "1", cache=model_cache.parent, quick=False)
        try:
            eventually(lambda server=server: server.status("/ready") == 200, 600)
            answers.append([ask(server, cache) for cache in (None, CACHE)])
            code, err = server.terminate()
            assert code == 0 and "Traceback" not in err, err
            layout = "4 × cpu (cpu), mesh data 1 × model 4, 3 KV heads in 4 slots"
            assert (layout in " ".join(err.split())) == (tp == "4"), err
        finally:
            server.process.kill()
    (plain, edited), over_four = answers
    assert [plain, edited] == over_four
    assert len(plain) == len(edited) == 24 and plain != edited


def ask(server: Process, cache: dict[str, Any] | None) -> list[int]:
    """The greedy reply's tokens."""
    body = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body | ({"cache": cache} if cache else {}),
        headers={"Authorization": "Bearer sesame"},
        timeout=300,
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]
