"""KV reused between requests gives what the specification gives (DESIGN A4, C1-C6), on a tiny model.

Random conversations go on turn by turn, branch, are edited, share their beginnings and lose pages to evictions, in one
engine with a radix tree; every answer's logits are compared with the spec's, and what was computed with the closure.
"""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.engine import Engine
from akv_jax.errors import RequestError
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Request, Sampling
from spec.operations import Append, Drop, History, Reposition
from spec.state import run
from spec.visibility import usage
from tests.copy_usage import copy_usage
from tests.random_histories import random_history
from tests.shared_engines import CONTEXT, config, oracle, shared

WINDOWS = tuple(layer.window for layer in config().layers)
TOLERANCE = 2e-4


def versions(engine: Engine, history: History) -> set[tuple[int, int]]:
    """(logical index, position) of what the cache has that this history could read."""
    timeline = Timeline(history)
    match = engine.cache.match(timeline, "")
    views = [timeline.view(epoch) for epoch in range(timeline.num_epochs)]
    found = engine.cache.lease_versions(match, timeline, "", views)
    there = {(index, int(match.encoded[index])) for index in np.flatnonzero(match.pages >= 0).tolist()}
    for view, pages in zip(views, found, strict=True):
        there |= set(zip(view.indices[pages >= 0].tolist(), view.positions[pages >= 0].tolist(), strict=True))
    engine.cache.release(match, timeline)
    return there


def turn(engine: Engine, name: str, history: History, *, max_tokens: int = 3) -> tuple[int, ...]:
    """Serve one request alone; compare all that can be compared; returns the sampled tokens."""
    at_hand = versions(engine, history)
    greedy = Sampling(max_tokens=max_tokens, temperature=0.0)
    engine.submit(Request(name, history, greedy, return_logits=True))
    outputs = []
    while engine.busy:
        outputs += engine.step()
        engine.check()
    expected = run(oracle(), history)
    assert outputs[0].next_logits is not None and outputs[-1].usage is not None
    np.testing.assert_allclose(outputs[0].next_logits, expected.logits[-1], atol=TOLERANCE, rtol=0)
    told = outputs[-1].usage
    if engine.config.reposition == "copy":
        meant = copy_usage(history, at_hand, WINDOWS)
    else:
        meant = usage(history, {index for index, _ in at_hand}, WINDOWS)
    kinds = told.computed_tokens, told.drop_skipped_tokens, told.repos_tokens, told.cached_tokens
    assert kinds == tuple(map(len, (meant.computed, meant.drop_skipped, meant.repos, meant.cached)))
    return tuple(token for output in outputs for token in output.token_ids)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 60))])
@pytest.mark.parametrize("mode", ["on_read", "copy"])
def test_random_conversations(mode, seed: int) -> None:
    """A4: the same request gives the same logits whatever is resident."""
    generator = np.random.default_rng(seed)
    engine = shared(mode).engine(disable_radix_cache=False, chunked_prefill_size=int(generator.choice([3, 8, 32])))
    told: list[History] = [random_history(generator, max_operations=4)]
    for step in range(25):
        history = told[int(generator.integers(len(told)))]
        history = (*history, *random_history(generator, max_operations=4))
        if generator.random() < 0.5:
            known = len(run(None, history).queries)
            history = (
                *history,
                Drop(frozenset(generator.integers(known, size=3).tolist())),
                Reposition(),
                Append((7,)),
            )
        if run(None, history).state.n + 5 > CONTEXT or len(run(None, history).queries) > 75:
            history = random_history(generator, max_operations=4)
        tokens = turn(engine, f"{seed}-{step}", history)
        # The last token sampled has no K and V yet; the client sends it back all the same.
        told.append((*history, Append(tokens)))
        if generator.random() < 0.3:
            engine.cache.evict(int(generator.integers(1, 60)))
            engine.check()
    stats = engine.cache.stats
    hits = engine.stats()
    assert hits.prefix_cache_hits_exact_total and hits.prefix_cache_hits_rotated_total
    assert bool(stats.rotations and stats.versions) == (mode == "copy")
    engine.flush_cache()
    assert engine.stats().pages_free == engine.config.num_pages


def test_copies_are_shared_by_those_who_run() -> None:
    """C2: agents with one repositioned beginning, at the same time; the logits of each are those of its history."""
    engine = shared("copy").engine(disable_radix_cache=False)
    start = (Append(tuple(range(30))), Drop(frozenset(range(4, 12))), Reposition(), Append((40, 41)))
    turn(engine, "first", start)
    histories = [(*start, Append((agent, agent + 1))) for agent in range(6)]
    rotations, first = engine.cache.stats.rotations, {}
    for agent, history in enumerate(histories):
        engine.submit(Request(str(agent), history, Sampling(max_tokens=8, temperature=0.0), return_logits=True))
    while engine.busy:
        for output in engine.step():
            if output.next_logits is not None:
                first[output.request_id] = output.next_logits
        engine.check()
    assert engine.cache.stats.rotations == rotations
    for agent, history in enumerate(histories):
        np.testing.assert_allclose(first[str(agent)], run(oracle(), history).logits[-1], atol=TOLERANCE, rtol=0)


def test_the_second_time_costs_one_token_and_says_the_same() -> None:
    """A10: an unchanged request has identical usage from its second time on."""
    engine = shared().engine(disable_radix_cache=False)
    history = (Append(tuple(range(40))), Drop(frozenset(range(5, 20))), Reposition(), Append((1, 2, 3)))
    seen = []
    for time in range(3):
        engine.submit(Request(f"r{time}", history, Sampling(max_tokens=4, temperature=0.0)))
        outputs = []
        while engine.busy:
            outputs += engine.step()
        seen.append((outputs[-1].usage, tuple(t for o in outputs for t in o.token_ids)))
    assert seen[1] == seen[2] and seen[0][1] == seen[1][1]
    assert seen[0][0].computed_tokens == 43 and seen[1][0].computed_tokens == 1


def test_what_was_generated_is_reused() -> None:
    """A4: the next turn begins with what was sampled, and computes only the last sampled token and what is new."""
    engine = shared().engine(disable_radix_cache=False)
    prompt = tuple(range(30))
    tokens = turn(engine, "one", (Append(prompt),), max_tokens=10)
    engine.submit(Request("two", (Append(prompt + tokens + (4, 5)),), Sampling(max_tokens=1)))
    outputs = []
    while engine.busy:
        outputs += engine.step()
    assert outputs[-1].usage.computed_tokens == 3 and outputs[-1].usage.cached_tokens == 39


def test_many_at_once_in_a_small_pool() -> None:
    """Agents that share a beginning and drop different parts of it, more of them than the pool holds at once."""
    engine = shared().engine(disable_radix_cache=False, num_pages=100)
    generator = np.random.default_rng(0)
    start = Append(tuple(generator.integers(64, size=30).tolist()))
    histories = []
    for agent in range(12):
        gone = frozenset(generator.integers(30, size=10).tolist())
        history = (start, Drop(gone), Reposition(), Append(tuple(generator.integers(64, size=15).tolist())))
        histories.append(history)
        engine.submit(Request(str(agent), history, Sampling(max_tokens=20, temperature=0.0), return_logits=True))
    first = {}
    while engine.busy:
        for output in engine.step():
            if output.next_logits is not None:
                first[output.request_id] = output.next_logits
            assert output.error is None
        engine.check()
    for agent, history in enumerate(histories):
        np.testing.assert_allclose(first[str(agent)], run(oracle(), history).logits[-1], atol=TOLERANCE, rtol=0)


def test_a_disabled_cache_keeps_nothing() -> None:
    engine = shared().engine()
    for name in "ab":
        turn(engine, name, (Append((1, 2, 3)),))
    assert engine.stats().pages_free == engine.config.num_pages


def test_a_request_that_does_not_fit_is_refused_and_leaves_the_cache_alone() -> None:
    engine = shared().engine(disable_radix_cache=False, num_pages=50)
    turn(engine, "one", (Append(tuple(range(20))),))
    cached = engine.stats().pages_cached
    with pytest.raises(RequestError):
        engine.submit(Request("two", (Append((1,) * 60),)))
    assert engine.stats().pages_cached == cached
