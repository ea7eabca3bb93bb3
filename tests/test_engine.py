"""The engine on tiny random models: whatever else goes on, a request gets the same (DESIGN A4, A7, C7, R3, R7)."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.errors import Reason, RequestError
from akv_jax.request import Output, Request, Sampling
from spec import state as spec_state
from spec.operations import Append, Drop, History, Operation, Reposition
from spec.visibility import closure
from tests.random_histories import random_history
from tests.shared_engines import CHUNK, CONTEXT, PAGES, oracle, shared
from tests.tiny_engine import generated, next_logits, prompt_logits, run

MODES: tuple[RepositionMode, ...] = ("on_read", "copy")
PROMPT = (Append((1, 2, 3, 4, 5)),)


def request(
    name: str, history: History, *, logits: bool = False, return_logits: bool = False, **sampling: Any
) -> Request:
    """Greedy unless it says otherwise; `logits`: those of every prompt token are asked for."""
    count = sum(len(op.tokens) for op in history if isinstance(op, Append))
    looked_at = tuple(range(count)) if logits else ()
    settings = Sampling(**{"temperature": 0.0, "max_tokens": 1, **sampling})
    return Request(name, history, settings, return_logits=return_logits, logits_at=looked_at)


def serve(history: History, engine: Engine | None = None, **fields: Any) -> list[Output]:
    """One request alone."""
    return run(engine or shared().engine(), [request("alone", history, **fields)])["alone"]


def text(outputs: list[Output]) -> str:
    return "".join(output.text for output in outputs)


def refusal(history: History, engine: Engine | None = None, **fields: Any) -> RequestError:
    """What a request is refused with; the engine is as idle as before."""
    engine = engine or shared().engine()
    with pytest.raises(RequestError) as caught:
        engine.submit(request("refused", history, **fields))
    assert not engine.busy
    engine.check()
    return caught.value


def random_requests(seed: int, count: int, **fields: Any) -> list[Request]:
    """Of all kinds: greedy and sampled, cut, penalised, with and without operations."""
    generator = np.random.default_rng(seed)
    requests = []
    for number in range(count):
        sampling: dict[str, Any] = {"max_tokens": int(generator.integers(1, 12))}
        if generator.random() < 0.7:
            sampling |= {"temperature": 1.0, "seed": int(generator.integers(2**60)), "top_p": 0.9}
        if generator.random() < 0.3:
            sampling |= {"top_k": 5, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {3: 2.0}}
        if generator.random() < 0.3:
            sampling |= {"logprobs": True, "top_logprobs": 3}
        requests.append(request(f"r{number}", random_history(generator), **sampling, **fields))
    return requests


# -- what else goes on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_together_is_as_alone(mode: RepositionMode) -> None:
    """A4, R7: logits to 1e-5 and sampled tokens exactly, with neighbours that come and go and prompts in pieces."""
    requests = random_requests(1, 14, logits=True)
    arrivals = [number // 2 for number in range(len(requests))]
    together = run(shared(mode).engine(chunked_prefill_size=7), requests, arrivals)
    for one in requests:
        alone = run(shared(mode).engine(), [one])[one.request_id]
        mine = together[one.request_id]
        np.testing.assert_allclose(prompt_logits(mine), prompt_logits(alone), atol=1e-5)
        assert generated(mine) == generated(alone)
        assert text(mine) == text(alone)


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_too_small_for_all_changes_nothing_but_time(mode: RepositionMode) -> None:
    """A4: requests that lose their pages come back to where they were."""
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_tokens=25)) for r in random_requests(2, 8)
    ]
    ample = run(shared(mode).engine(), requests)
    engine = shared(mode).engine(num_pages=70)
    tight = run(engine, requests)
    assert engine.stats().preemptions_total > 0
    for one in requests:
        assert generated(tight[one.request_id]) == generated(ample[one.request_id])
        assert text(tight[one.request_id]) == text(ample[one.request_id])
        assert tight[one.request_id][-1].finish_reason == ample[one.request_id][-1].finish_reason


def test_a_retracted_prompt_gives_its_logits_once() -> None:
    """C6: also where it was taken back half-way."""
    requests = [request(f"r{n}", (Append(tuple(range(n, n + 30))),), logits=True, max_tokens=30) for n in range(4)]
    engine = shared().engine(num_pages=75, chunked_prefill_size=9)
    outputs = run(engine, requests)
    assert engine.stats().preemptions_total > 0
    for one in requests:
        np.testing.assert_allclose(
            prompt_logits(outputs[one.request_id]), prompt_logits(serve(one.operations, logits=True)), atol=1e-5
        )


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_any_time(steps: int) -> None:
    """C7: waiting, in the middle of a prompt, between two tokens or at the end, and nobody else is disturbed."""
    long = request(
        "long", (Append((1,) * 40), Drop(frozenset(range(10))), Reposition(), Append((2,) * 5)), max_tokens=3
    )
    other = request("other", PROMPT, max_tokens=10)
    engine = shared().engine(chunked_prefill_size=12)
    engine.submit(other)
    engine.submit(long)
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine.abort("long")
    engine.check()
    engine.abort("long")
    while engine.busy:
        outputs += engine.step()
        engine.check()
    assert engine.stats().pages_free == PAGES
    assert generated([o for o in outputs if o.request_id == "other"]) == generated(serve(PROMPT, max_tokens=10))
    assert engine.stats().requests_aborted_total == (
        0 if [o for o in outputs if o.request_id == "long" and o.usage] else 1
    )


def test_abort_of_somebody_unknown_is_nothing() -> None:
    engine = shared().engine()
    engine.abort("nobody")
    assert engine.stats().requests_aborted_total == 0


def test_a_request_id_is_used_once_at_a_time() -> None:
    engine = shared().engine()
    engine.submit(request("same", PROMPT))
    with pytest.raises(ValueError, match="in use"):
        engine.submit(request("same", PROMPT))
    while engine.busy:
        engine.step()
    assert run(engine, [request("same", PROMPT)])["same"]


def test_nothing_compiles_after_warm_up() -> None:
    """R3: 200 requests of every kind, with operations, penalties, logprobs and aborts."""
    tiny = shared()
    engine = tiny.engine(num_pages=100)
    before = tiny.runner.compilations.total
    requests = random_requests(3, 200)
    for number, one in enumerate(requests):
        engine.submit(
            dataclasses.replace(one, return_logits=number % 5 == 0, logits_at=(0,) if number % 7 == 0 else ())
        )
        engine.step()
        if number % 17 == 0:
            engine.abort(one.request_id)
        engine.check()
    while engine.busy:
        engine.step()
    assert tiny.runner.compilations.total == before
    assert engine.stats().requests_total == 200


# -- passes and pages --------------------------------------------------------------------------------------------------


def turns(count: int, length: int) -> History:
    """Each turn drops the one before the last and moves the rest together."""
    history: list[Operation] = []
    for turn in range(count):
        history.append(Append(tuple((7 * turn + i) % 64 for i in range(length))))
        if turn:
            history += [Drop(frozenset(range((turn - 1) * length, turn * length))), Reposition()]
    return tuple(history)


@pytest.mark.parametrize("mode", MODES)
def test_as_many_forwards_as_chunks(mode: RepositionMode) -> None:
    """R2: one for eight boundaries where the chunk is large enough, else ceil(computed / chunk)."""
    history = (*turns(9, 3), Append((5,)))
    computed = len(closure(history, ()))
    for chunk in (32, 28, 11, 5, 1):
        (output,) = serve(history, shared(mode).engine(chunked_prefill_size=chunk))
        assert output.usage is not None
        assert output.usage.forwards == -(-computed // chunk)
        assert output.usage.computed_tokens == computed
        assert output.usage.segments == 9


@pytest.mark.parametrize(("mode", "pages"), [("on_read", 40), ("copy", 60)])
def test_forty_turns_in_a_pool_that_just_holds_them(mode: RepositionMode, pages: int) -> None:
    """A7: 800 tokens, of which two turns are active at a time; the logits are the specification's."""
    history = turns(40, 20)
    outputs = serve(history, shared(mode).engine(num_pages=pages), logits=True)
    assert outputs[-1].usage is not None and outputs[-1].usage.computed_tokens == 800
    assert refusal(history, shared(mode).engine(num_pages=pages - 1), logits=True).reason is Reason.POOL_TOO_SMALL
    # The specification is slow: the first turns exactly, and the last ones against a pool with room for all.
    exact = spec_state.run(oracle(), turns(6, 20)).logits
    np.testing.assert_allclose(prompt_logits(outputs)[: len(exact)], exact, atol=2e-4)
    roomy = serve(history, shared(mode).engine(chunked_prefill_size=13), logits=True)
    np.testing.assert_allclose(prompt_logits(outputs), prompt_logits(roomy), atol=2e-5)


def test_both_ways_to_reposition_agree() -> None:
    """C8: the same logits, and the same tokens after them."""
    for one in random_requests(4, 6, logits=True):
        read, copied = (run(shared(mode).engine(), [one])[one.request_id] for mode in MODES)
        np.testing.assert_allclose(prompt_logits(read), prompt_logits(copied), atol=1e-5)
        assert generated(read) == generated(copied)


def test_a_lone_request_that_fills_the_pool_ends() -> None:
    """A7: with what it has, as if max_tokens had been reached; each token but the last has a page."""
    outputs = serve((Append((1,) * 10),), shared().engine(num_pages=20), max_tokens=50)
    assert len(generated(outputs)) == 11
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].usage is not None and outputs[-1].usage.completion_tokens == 11


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_the_context_length_message() -> None:
    """A7: the text that the usual clients recognise, by positions and not by tokens."""
    error = refusal((Append((1,) * (CONTEXT - 3)), Append((2,) * 4)))
    assert (error.reason, error.status) == (Reason.CONTEXT_LENGTH_EXCEEDED, 400)
    assert re.fullmatch(
        r"This model's maximum context length is 128 tokens\. However, your request has 130 tokens \([^()]*\), which "
        r"exceeds the context window \(context_length_exceeded\)\. Please reduce the length of the messages or "
        r"completion\.",
        error.message,
    )


@pytest.mark.parametrize("left", [1, 2])
def test_as_long_as_one_position_is_left(left: int) -> None:
    """A7: n + 1 <= N, and N - n tokens come out at most."""
    outputs = serve((Append((1,) * (CONTEXT - left)),), max_tokens=1000)
    assert len(generated(outputs)) == left
    assert outputs[-1].finish_reason == "length"


def test_the_fullest_moment_counts_though_it_is_past() -> None:
    """A7: the largest n anywhere, computed or not."""
    history = (Append((1,) * CONTEXT), Drop(frozenset(range(CONTEXT - 5))), Reposition(), Append((2,)))
    assert refusal(history).reason is Reason.CONTEXT_LENGTH_EXCEEDED


def test_max_tokens_is_cut_to_what_fits_after_a_reposition() -> None:
    """A7: N - n with n as it is now."""
    history = (Append((1,) * 100), Drop(frozenset(range(90))), Reposition())
    outputs = serve(history, max_tokens=10**9)
    assert len(generated(outputs)) == CONTEXT - 10
    assert len(generated(serve(history, max_tokens=None))) == CONTEXT - 10


def test_more_logical_tokens_than_positions() -> None:
    """A7: over-length is never a matter of logical length."""
    (output,) = serve(turns(10, 40))
    assert output.usage is not None and output.usage.prompt_tokens == 400 and output.usage.next_position == 40


def test_a_request_that_no_pool_of_this_size_holds() -> None:
    """A7: 503, and it says how to help."""
    error = refusal((Append((1,) * 61),), shared().engine(num_pages=60))
    assert (error.reason, error.status) == (Reason.POOL_TOO_SMALL, 503)
    assert "61" in error.message and "60" in error.message and "--max-total-tokens" in error.message
    assert serve((Append((1,) * 60),), shared().engine(num_pages=60))


def test_a_full_queue() -> None:
    """503 QUEUE_FULL; whoever is in is served."""
    engine = shared().engine(max_queued_requests=2)
    engine.submit(request("one", PROMPT))
    engine.submit(request("two", PROMPT))
    with pytest.raises(RequestError) as caught:
        engine.submit(request("three", PROMPT))
    assert (caught.value.reason, caught.value.status) == (Reason.QUEUE_FULL, 503)
    assert {output.request_id for output in engine.step()} == {"one", "two"}
    engine.submit(request("three", PROMPT))
    assert engine.step()


@pytest.mark.parametrize(
    "history",
    [
        (),
        (Append(()),),
        (Reposition(),),
        (Append((1, 64)),),
        (Append((-1, 2)),),
        (Append((1, 2**40)),),
        (Append((1, 2)), Drop(frozenset({2})), Append((3,))),
        (Append((1, 2)), Drop(frozenset({-1}))),
        (Append((1, 2)), Drop(frozenset({2**70}))),
    ],
    ids=str,
)
def test_a_history_that_means_nothing(history: History) -> None:
    """L2, A3: INVALID_REQUEST that names the field."""
    error = refusal(history)
    assert (error.reason, error.param, error.status) == (Reason.INVALID_REQUEST, "operations", 400)


@pytest.mark.parametrize("index", [-1, 5])
def test_logits_of_a_token_that_is_not_there(index: int) -> None:
    engine = shared().engine()
    with pytest.raises(RequestError, match="5 tokens are appended") as caught:
        engine.submit(Request("refused", PROMPT, logits_at=(index,)))
    assert caught.value.param == "logits_at"


# -- output ------------------------------------------------------------------------------------------------------------


def test_logits_that_were_asked_for() -> None:
    """C6: in the order asked, twice if asked twice, dropped tokens' too; the last append's by themselves."""
    history = (Append((1, 2, 3, 4)), Drop(frozenset({1})), Reposition(), Append((5, 6)))
    exact = spec_state.run(oracle(), history).logits
    engine = shared().engine()
    asked = Request("r", history, Sampling(max_tokens=3, temperature=0.0), return_logits=True, logits_at=(4, 1, 1))
    outputs = run(engine, [asked])["r"]
    np.testing.assert_allclose(prompt_logits(outputs), exact[[4, 1, 1]], atol=2e-5)
    np.testing.assert_allclose(next_logits(outputs), exact[5], atol=2e-5)
    assert outputs[0].next_logits is not None and all(output.next_logits is None for output in outputs[1:])
    assert all(output.next_logits is None and output.prompt_logits is None for output in serve(history))


def test_the_logits_of_a_last_token_that_is_dropped() -> None:
    """C6: computed even if dropped since; what follows does not see it."""
    history = (Append((1, 2, 3)), Drop(frozenset({2})))
    outputs = serve(history, return_logits=True, max_tokens=4)
    np.testing.assert_allclose(next_logits(outputs), spec_state.run(oracle(), history).logits[2], atol=2e-5)
    check_greedy(history, generated(outputs))


def check_greedy(history: History, tokens: tuple[int, ...]) -> None:
    logits = spec_state.run(oracle(), (*history, Append(tokens[:-1]))).logits[-len(tokens) :]
    assert logits.argmax(axis=1).tolist() == list(tokens)


@pytest.mark.parametrize("mode", MODES)
def test_generation_is_a_series_of_appends(mode: RepositionMode) -> None:
    """L1: also right after a reposition at the very end."""
    for tail in [(), (Drop(frozenset({0, 2})), Reposition()), (Drop(frozenset({1})),)]:
        history = (Append((9, 8, 7, 6)), *tail)
        check_greedy(history, generated(serve(history, shared(mode).engine(), max_tokens=8)))


def test_stop_token_ids_and_eos() -> None:
    """The token that ends a reply is reported and has no text."""
    tokens = generated(serve(PROMPT, max_tokens=12))
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    end = tokens.index(stop) + 1
    outputs = serve(PROMPT, max_tokens=12, stop_token_ids=(stop,))
    assert generated(outputs) == tokens[:end] and outputs[-1].finish_reason == "stop"
    assert text(outputs) == "".join(chr(48 + token) for token in tokens[: end - 1])
    model = dataclasses.replace(shared().model, eos_token_ids=(stop,))
    engine = Engine(model, shared().settings, None, shared().runner)
    outputs = serve(PROMPT, engine, max_tokens=12)
    assert generated(outputs) == tokens[:end] and outputs[-1].finish_reason == "stop"
    outputs = serve(PROMPT, engine, max_tokens=12, ignore_eos=True)
    assert generated(outputs) == tokens and outputs[-1].finish_reason == "length"
    outputs = serve(PROMPT, engine, max_tokens=12, ignore_eos=True, stop_token_ids=(stop,))
    assert generated(outputs) == tokens[:end]


def test_a_stop_string_over_several_tokens() -> None:
    """Nothing of it is in any piece of text, and every sampled token is reported."""
    whole = serve(PROMPT, max_tokens=12)
    stop = text(whole)[3:6]
    first = text(whole).index(stop)
    outputs = serve(PROMPT, max_tokens=12, stop=("never", stop))
    assert text(outputs) == text(whole)[:first]
    assert generated(outputs) == generated(whole)[: first + 3]
    assert outputs[-1].finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    whole = text(serve(PROMPT, max_tokens=6))
    outputs = serve(PROMPT, max_tokens=6, stop=(whole[-2:] + "~",))
    assert text(outputs) == whole and outputs[-1].finish_reason == "length"


def test_logprobs() -> None:
    """A10: the model's own, of the token and of the likeliest, under any sampling."""
    outputs = serve(PROMPT, max_tokens=5, temperature=1.5, seed=3, logit_bias={7: 3.0}, logprobs=True, top_logprobs=4)
    tokens = generated(outputs)
    logits = spec_state.run(oracle(), (*PROMPT, Append(tokens[:-1]))).logits[-len(tokens) :]
    meant = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, output in enumerate(outputs):
        (logprob,) = output.logprobs
        assert logprob.token_id == tokens[row]
        assert logprob.logprob == pytest.approx(meant[row, tokens[row]], abs=2e-5)
        assert [token for token, _ in logprob.top] == np.argsort(-meant[row])[:4].tolist()
        np.testing.assert_allclose([p for _, p in logprob.top], -np.sort(-meant[row])[:4], atol=2e-5)
    assert all(not output.logprobs for output in serve(PROMPT, max_tokens=2))


def test_penalties_count_what_they_should() -> None:
    """Presence and frequency over what was generated, repetition over the prompt too, dropped tokens included."""
    history = (Append((1, 2, 3, 4, 5)), Drop(frozenset({0})))
    options = {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logit_bias": {9: 0.5}}
    tokens = generated(serve(history, max_tokens=20, **options))
    assert tokens != generated(serve(history, max_tokens=20))
    logits = spec_state.run(oracle(), (*history, Append(tokens[:-1]))).logits[-len(tokens) :]
    for row, token in enumerate(tokens):
        scores = logits[row].copy()
        seen = [*{1, 2, 3, 4, 5, *tokens[:row]}]
        scores[seen] = np.where(scores[seen] > 0, scores[seen] / 1.3, scores[seen] * 1.3)
        for before in set(tokens[:row]):
            scores[before] -= 0.7 + 0.4 * tokens[:row].count(before)
        scores[9] += 0.5
        assert scores.argmax() == token


def test_seeds() -> None:
    """R7: a request's own, else the engine's, else a fresh one for each; every step draws anew."""

    def draw(seed: int | None = None, **settings: Any) -> tuple[int, ...]:
        return generated(serve(PROMPT, shared().engine(**settings), temperature=1.0, seed=seed, max_tokens=30))

    assert draw(5) == draw(5) != draw(6)
    assert draw(seed=8) == draw(seed=8, num_pages=100)
    assert draw() != draw()
    engine = shared().engine(seed=9)
    assert generated(serve(PROMPT, engine, temperature=1.0, max_tokens=30)) == draw(9)
    # So hot that the model has no say.
    assert len({*generated(serve(PROMPT, temperature=1e6, seed=5, max_tokens=60))}) > 20


def test_usage_and_stats() -> None:
    """A6: the kinds of prompt token sum to all of them, and the counters of /metrics follow."""
    history = (Append((1,) * 10), Drop(frozenset(range(10))), Reposition(), Append((2, 3, 4)))
    engine = shared().engine()
    outputs = serve(history, engine, max_tokens=4)
    usage = outputs[-1].usage
    assert usage is not None and all(output.usage is None for output in outputs[:-1])
    assert (usage.prompt_tokens, usage.computed_tokens, usage.drop_skipped_tokens) == (13, 3, 10)
    assert usage.computed_tokens + usage.drop_skipped_tokens + usage.repos_tokens + usage.cached_tokens == 13
    assert (usage.active_tokens, usage.next_position, usage.completion_tokens) == (3, 3, 4)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_private, stats.pages_free) == (0, 0, 0, PAGES)
    assert (stats.forwards_total, stats.computed_tokens_total) == (1 + 3, 3 + 3)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total, stats.requests_total) == (13, 4, 1)


def test_more_requests_than_may_run() -> None:
    """Waiting ones follow as others end."""
    engine = shared().engine(max_running_requests=3)
    requests = random_requests(6, 9)
    for one in requests:
        engine.submit(one)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running + stats.num_waiting <= 9) and stats.num_waiting >= 9 - 3 - 3 and stats.num_running <= 3
    outputs: dict[str, list[Output]] = {one.request_id: [] for one in requests}
    while engine.busy:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert all(output[-1].finish_reason for output in outputs.values() if output)


def test_a_step_is_never_larger_than_its_executable() -> None:
    """R3: with every slot decoding and prompts coming."""
    engine = shared().engine()
    outputs = run(engine, random_requests(7, 40), [number // 3 for number in range(40)])
    assert all(output[-1].finish_reason for output in outputs.values())
    assert engine.runner.largest_bucket == CHUNK
