"""The real engine against this specification: a tiny random model of every variety, float32 against float64.

Each example serves a batch of random histories together, with a random chunk size, page pool and arrival times, then
each history again alone, continued by what was generated. All that comes out is compared: logits of prompt tokens and
of generated ones, usage, forwards, and the page accounting after every step (DESIGN C7).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st

from akv_jax.config import Disaggregation, RepositionMode
from akv_jax.engine import ServingEngine
from akv_jax.planning.peak import peak_pages
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request, Sampling, Usage
from spec.model import Model, random_params
from spec.operations import Append, Drop, History, Operation, Reposition
from spec.state import Result, apply, run, segments
from spec.varieties import varieties
from spec.visibility import closure, usage
from tests import tiny_engine
from tests.tiny_engine import ROWS, TinyEngine, TinySides

#: Of every logit, absolute.
TOLERANCE = 2e-4
#: Greedy decoding must take the spec's best token where it leads by more.
LEAD = 1e-3
#: Most prompt tokens of a history: fewer than the engine's rows, so that one forward can be asked for.
MOST_TOKENS = 110
#: Histories of one example, examples of one case.
BATCH, EXAMPLES, LONG_EXAMPLES, INTERPRETED_EXAMPLES = 4, 6, 36, 3

#: A variety, how it repositions, and an attention backend that is not the engine's own choice.
Case = tuple[str, RepositionMode] | tuple[str, RepositionMode, str]
ON_READ: list[Case] = [(name, "on_read") for name in varieties()]
#: Copies differ in how K gets to where it is read, so the varieties of rotations, windows and everything at once.
COPY: list[Case] = [(n, "copy") for n in ("half", "yarn", "window_and_full", "window_everywhere", "everything")]
ALL: list[Case] = ON_READ + [(name, "copy") for name in varieties()]
#: Interpreted kernels take long to compile, and this variety has almost every kind of layer.
INTERPRETED: list[Case] = [("everything", "on_read", "pallas_triton_interpret")]
LONG_LISTS: list[Case] = [(n, "on_read") for n in ("half", "window_and_full", "everything")]


@dataclass(frozen=True)
class Asked:
    """One request, and the step before which it arrives. looked_at: prompt tokens whose logits it asks for."""

    history: History
    looked_at: tuple[int, ...]
    max_tokens: int
    temperature: float
    arrival: int


@dataclass(frozen=True)
class Batch:
    """Requests served together. The pool holds the `fitting` most demanding prompts and `spare` pages more."""

    asked: tuple[Asked, ...]
    chunk: int
    fitting: int
    spare: int
    max_running: int


@st.composite
def edited(draw: st.DrawFn) -> History:
    """Appends of 1 to 40 tokens, drops of a stretch or of any few tokens, and repositions."""
    history: list[Operation] = []
    appended = 0
    for _ in range(draw(st.integers(1, 9))):
        kind = draw(st.sampled_from(["append", "append", "stretch", "few", "reposition"])) if appended else "append"
        if kind == "append":
            size = min(draw(st.integers(1, 6) | st.integers(1, 40)), MOST_TOKENS - appended)
            if size == 0:
                continue
            # One draw for all of them: much cheaper than a list of integers.
            history.append(Append(tuple(byte % 64 for byte in draw(st.binary(min_size=size, max_size=size)))))
            appended += size
        elif kind == "stretch":
            start = draw(st.integers(0, appended - 1))
            history.append(Drop(frozenset(range(start, draw(st.integers(start, appended))))))
        elif kind == "few":
            history.append(Drop(draw(st.frozensets(st.integers(0, appended - 1), max_size=6))))
        else:
            history.append(Reposition())
    return tuple(history)


@st.composite
def asks(draw: st.DrawFn) -> Asked:
    history = draw(edited())
    count = appended(history)
    some = st.frozensets(st.integers(0, count - 1), min_size=1, max_size=5).map(sorted).map(tuple)
    return Asked(
        history,
        looked_at=draw(st.just(tuple(range(count))) | st.just(()) | some),
        max_tokens=draw(st.integers(1, 3) | st.integers(1, 6) | st.integers(5, 16)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0])),
        arrival=draw(st.integers(0, 6)),
    )


BATCHES = st.builds(
    Batch,
    asked=st.tuples(*[asks()] * BATCH),
    # The smallest are by far the slowest, and few of them meet every boundary.
    chunk=st.integers(4, 40) | st.integers(1, ROWS) | st.integers(1, 3) | st.integers(4, ROWS),
    fitting=st.integers(1, BATCH),
    spare=st.integers(0, 4),
    max_running=st.integers(1, BATCH),
)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[TinyEngine]]]:
    """A warm engine of each case that this session tests, compiled one after another while others are tested."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == request.path]
    items = [item for item in items if "engines" in item.fixturenames]
    names = "name", "mode", "backend"
    wanted: dict[Any, None] = dict.fromkeys(
        tuple(item.callspec.params[name] for name in names if name in item.callspec.params) for item in items
    )
    text = request.config.getoption("--disaggregation")
    split = None if text is None else Disaggregation.parse(text)
    # Long runs do not save on compiling.
    quick = not any(item.get_closest_marker("long") for item in items)
    with tiny_engine.quick_compiles(quick), ThreadPoolExecutor(max_workers=1) as pool:
        devices = request.config.getoption("--tp")
        yield {case: pool.submit(_warm, split, devices, *case) for case in wanted}
        pool.shutdown(cancel_futures=True)


def _warm(split: Disaggregation | None, devices: int | None, *case: Any) -> TinyEngine:
    name, mode, backend = (*case, "xla")[:3]
    config = varieties()[name]
    params, options = random_params(config, seed=7), {"reposition": mode, "attention_backend": backend}
    if split is None:
        tiny = TinyEngine(config, params, devices, **options)
    else:
        tiny = TinySides(config, params, split, **options)
    tiny_engine.run(tiny.engine(), [tiny_engine.score("first", (Append((0,)),))])
    return tiny


@pytest.mark.parametrize(("name", "mode"), ON_READ + COPY)
def test_engine(engines, models, record_property, name: str, mode: RepositionMode) -> None:
    """The random batches; `record_property` makes it a law of each variety (see conftest.py)."""
    record_property("law", f"R2: the engine computes what the spec says: {name}")
    conforms(engines[name, mode].result(), models[name], EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode"), ALL)
def test_engine_long(engines, models, record_property, name: str, mode: RepositionMode) -> None:
    """Many more of them."""
    record_property("law", f"R2: the engine computes what the spec says: {name}")
    conforms(engines[name, mode].result(), models[name], LONG_EXAMPLES)


@pytest.mark.parametrize(("name", "mode", "backend"), INTERPRETED)
def test_engine_on_gpu_kernels(engines, models, record_property, name: str, mode: RepositionMode, backend: str) -> None:
    """A few of them with the kernels for GPUs, interpreted (R4)."""
    record_property("law", f"R4: the engine computes what the spec says with {backend}: {name}")
    conforms(engines[name, mode, backend].result(), models[name], INTERPRETED_EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mode", "backend"), [(*case, "pallas_triton_interpret") for case in ALL])
def test_engine_on_gpu_kernels_long(
    engines, models, record_property, name: str, mode: RepositionMode, backend: str
) -> None:
    """And all varieties."""
    record_property("law", f"R4: the engine computes what the spec says with {backend}: {name}")
    conforms(engines[name, mode, backend].result(), models[name], EXAMPLES)


@pytest.mark.parametrize(("name", "mode"), LONG_LISTS)
def test_lists_longer_than_a_block(engines, models, name: str, mode: RepositionMode) -> None:
    """R3: a view of any length is read, block by block."""
    tiny, model = engines[name, mode].result(), models[name]
    tokens = tuple(np.random.default_rng(5).integers(0, 64, 330).tolist())
    history = (
        *(Append(tokens[:275]), Drop(frozenset(range(3, 12))), Reposition(), Append(tokens[275:300])),
        *(Drop(frozenset({1, 299})), Append(tokens[300:302]), Reposition(), Append(tokens[302:])),
    )
    batch = Batch((Asked(history, tuple(range(330)), 3, 0.0, 0),), chunk=ROWS, fitting=1, spare=2, max_running=1)
    results = [run(model, history)]
    assert len(results[0].state.active) > 256
    check_together(engine_of(tiny, batch, results), model, batch, results)


@pytest.mark.parametrize(("name", "mode"), [("window_everywhere", "on_read"), ("window_everywhere", "copy")])
def test_what_no_window_reaches_is_left_out(engines, models, name: str, mode: RepositionMode) -> None:
    """C6, L6: where every layer has a window, what lies outside the windows of all that is computed is not computed."""
    tiny, model = engines[name, mode].result(), models[name]
    # The second append is 6 positions past what is active of the first, and all of the first is dropped in the end.
    history = (
        *(Append(tuple(range(10))), Drop(frozenset({0})), Reposition(), Drop(frozenset(range(4, 10)))),
        *(Append(tuple(range(10, 20))), Drop(frozenset({1, 2, 3})), Append((20, 21, 22))),
    )
    batch = Batch((Asked(history, (), 3, 0.0, 0),), chunk=ROWS, fitting=1, spare=3, max_running=1)
    results = [run(model, history)]
    engine = engine_of(tiny, batch, results)
    check_together(engine, model, batch, results)
    assert engine.stats().computed_tokens_total == 13 + 2  # and two of the three that it generated


@pytest.mark.parametrize(("name", "mode"), [("half", "on_read"), ("half", "copy")])
def test_retraction(engines, models, name: str, mode: RepositionMode) -> None:
    """A4, A7: a request whose pages are taken for others, and that waits again, gives the same logits and tokens."""
    tiny, model = engines[name, mode].result(), models[name]
    tokens = tuple(range(30))
    history = (Append(tokens), Drop(frozenset({3, 4, 20})), Reposition(), Append(tokens[:3]))
    # Once copies are made, what they were made of makes room: it takes more tokens to fill the pool.
    outputs = 20 if mode == "on_read" else 60
    asked = tuple(Asked(history, (), outputs, 0.0, arrival) for arrival in range(BATCH))
    batch = Batch(asked, chunk=20, fitting=2, spare=4, max_running=BATCH)
    results = [run(model, history)] * BATCH
    engine = engine_of(tiny, batch, results)
    check_together(engine, model, batch, results)
    assert engine.stats().preemptions_total > 0


def conforms(tiny: TinyEngine, model: Model, examples: int, smallest_chunk: int = 1) -> None:
    """Run that many batches."""

    @settings(
        max_examples=examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(BATCHES)
    def batch_conforms(batch: Batch) -> None:
        batch = replace(batch, chunk=max(batch.chunk, smallest_chunk))
        note(f"{model.config.name}, {tiny.settings.reposition}")
        results = [run(model, asked.history) for asked in batch.asked]
        engine = engine_of(tiny, batch, results)
        wholes = check_together(engine, model, batch, results)
        event(f"retractions: {min(engine.stats().preemptions_total, 3)}")
        for number, (asked, whole) in enumerate(zip(batch.asked, wholes, strict=True)):
            # One of them in chunks, the others in one piece.
            check_alone(tiny, model, asked, whole, chunk=ROWS if number else batch.chunk)

    batch_conforms()


def engine_of(tiny: TinyEngine, batch: Batch, results: list[Result]) -> ServingEngine:
    """An engine with the batch's chunk size and pool. Where not all fit, some wait, and some are retracted."""
    mode = tiny.settings.reposition
    needed = sorted(most_pages(asked.history, result, mode) for asked, result in zip(batch.asked, results, strict=True))
    return tiny.engine(
        num_pages=sum(needed[-batch.fitting :]) + batch.spare,
        chunked_prefill_size=batch.chunk,
        max_running_requests=batch.max_running,
    )


def check_together(engine: ServingEngine, model: Model, batch: Batch, results: list[Result]) -> list[Result]:
    """Serve the batch in one engine and check all that comes out.

    Returns the spec's results once it has appended the tokens that the engine chose.
    """
    requests = [
        Request(
            str(number),
            asked.history,
            Sampling(asked.max_tokens, asked.temperature, seed=number, logprobs=True, top_logprobs=20),
            logits_at=asked.looked_at,
            return_logits=True,
        )
        for number, asked in enumerate(batch.asked)
    ]
    outputs = tiny_engine.run(engine, requests, [asked.arrival for asked in batch.asked])
    wholes = []
    for number, (asked, result) in enumerate(zip(batch.asked, results, strict=True)):
        own = outputs[str(number)]
        assert all(output.error is None for output in own)
        tokens, count = tiny_engine.generated(own), len(result.queries)
        # Even alone it cannot go on once the pool is full; an entry may have a page at its birth and another moved.
        entries = len(result.state.active) * (2 if engine.config.reposition == "copy" else 1)
        assert min(asked.max_tokens, engine.config.num_pages - entries + 1) <= len(tokens) <= asked.max_tokens
        whole = continued(model, result, tokens)
        check_logits(own, asked.looked_at, whole.logits[:count])
        check_generated(own, whole.logits[count - 1 :], greedy=asked.temperature == 0)
        check_usage(own[-1].usage, model, asked.history, result, asked.looked_at)
        wholes.append(whole)
    return wholes


def check_alone(tiny: TinyEngine, model: Model, asked: Asked, whole: Result, chunk: int) -> None:
    """The history and what was generated after it as one prompt, served alone: how many forwards it takes (R2).

    All its logits are asked for, but where that has been done: then only those of what was generated, and the rest may
    be left out (C6).
    """
    count = appended(asked.history)
    generated = tuple(range(count, len(whole.queries)))
    looked_at = generated if len(asked.looked_at) == count else tuple(range(len(whole.queries)))
    history = (*asked.history, Append(tuple(whole.queries[index].token for index in generated)))
    request = Request("alone", history, Sampling(1, 0.0), logits_at=looked_at, return_logits=True)
    own = tiny_engine.run(tiny.engine(chunked_prefill_size=chunk), [request])["alone"]
    check_logits(own, looked_at, whole.logits)
    check_usage(own[-1].usage, model, history, whole, looked_at)
    assert own[-1].usage is not None
    assert own[-1].usage.forwards == -(-own[-1].usage.computed_tokens // chunk)


def check_logits(own: list[Output], looked_at: tuple[int, ...], expected: np.ndarray) -> None:
    """The logits asked for, and those of the last prompt token, against the spec's of all prompt tokens."""
    if looked_at:
        assert_close(tiny_engine.prompt_logits(own), expected[list(looked_at)])
    assert_close(tiny_engine.next_logits(own), expected[-1])


def check_generated(own: list[Output], expected: np.ndarray, *, greedy: bool) -> None:
    """The log-probabilities of what was generated and of the 20 likeliest; row i of `expected` led to token i."""
    reported = [logprob for output in own for logprob in output.logprobs]
    for logprob, logits in zip(reported, expected):
        right = logits - np.log(np.exp(logits).sum())
        second, best = np.sort(logits)[-2:]
        if greedy and best - second > LEAD:
            assert logprob.token_id == np.argmax(logits)
        ids, values = zip(*logprob.top, strict=True)
        assert_close(np.array([logprob.logprob, *values]), right[[logprob.token_id, *ids]])
        assert len(set(ids)) == 20
        assert np.delete(right, ids).max() <= min(values) + TOLERANCE


def check_usage(
    counted: Usage | None, model: Model, history: History, result: Result, looked_at: tuple[int, ...]
) -> None:
    """A6 of a request that finds nothing resident."""
    assert counted is not None
    windows = [layer.window for layer in model.config.layers]
    count = len(result.queries)
    computed = closure(history, (), {*looked_at, count - 1}, windows)
    assert counted.prompt_tokens == count
    assert counted.computed_tokens == len(computed)
    assert counted.active_tokens == len(result.state.active)
    assert counted.next_position == result.state.n
    assert counted.segments == sum(any(index in computed for index in s.queries) for s in result.segments)
    assert counted.restored_tokens == 0
    kinds = counted.drop_skipped_tokens, counted.repos_tokens, counted.cached_tokens
    assert counted.computed_tokens + sum(kinds) == count
    if not looked_at:
        right = usage(history, (), windows)
        assert kinds == (len(right.drop_skipped), len(right.repos), len(right.cached))


def continued(model: Model, result: Result, tokens: tuple[int, ...]) -> Result:
    """The spec's result when it is given the tokens that the engine chose."""
    state = apply(result.state, Append(tokens), model)
    logits = np.array([query.logits for query in state.trajectory])
    return Result(state, logits, state.trajectory, segments(state.trajectory))


def most_pages(history: History, result: Result, mode: RepositionMode) -> int:
    """A7: a pool of the largest active set of any moment is enough. Where copies are made, what the engine says is."""
    if mode == "on_read":
        return max(len(query.view) for query in result.queries)
    timeline = Timeline(history)
    return peak_pages(timeline, np.ones(timeline.count, bool), mode)


def appended(history: History) -> int:
    return sum(len(operation.tokens) for operation in history if isinstance(operation, Append))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
