"""Too many pages asked for, with a cache that keeps (DESIGN A7, A10, C4, C7): who waits, who is refused, who hangs up.

`WatchedEngine` holds every logit, page, lease and number of these scenes against the specification after every step;
`test_scheduler.py` has what concerns the queue and the budget of a step alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.config import RepositionMode
from spec.operations import Append, Drop, History, Reposition
from tests.two_layers import MODES, oracle, warm
from tests.watched_engine import Asked, WatchedEngine


def tokens(seed: int, size: int) -> Append:
    return Append(tuple(np.random.default_rng(seed).integers(64, size=size).tolist()))


def watched(mode: RepositionMode, *, logits: bool = True, **settings: int) -> WatchedEngine:
    engine = warm(mode).engine(disable_radix_cache=False, **settings)
    return WatchedEngine(engine, oracle() if logits else None)


def end(watched: WatchedEngine) -> None:
    """All are served, and the pool is whole."""
    watched.drain()
    watched.engine.flush_cache()
    assert watched.engine.stats().pages_free == watched.engine.config.num_pages


@pytest.mark.parametrize("mode", MODES)
def test_small_requests_do_not_starve_a_large_one(mode: RepositionMode) -> None:
    """A10: it needs nearly every page, and something small comes in every step before it and after it."""
    engine = watched(mode, logits=False, num_pages=44, chunked_prefill_size=8)
    for seed in range(6):
        engine.ask((tokens(seed, 6),), (0,) * 6)
        engine.step()
    large, steps = engine.ask((tokens(100, 40),), (0,) * 2), 0
    while large.end is None:
        engine.ask((tokens(200 + steps, 6),), (0,) * 6)
        engine.step()
        steps += 1
        assert steps <= 6 * 6 + 40 // 8 + 2, "those before it, its own chunks and its own tokens"
    # Whoever came after it waited, and is served.
    assert engine.live
    end(engine)


@pytest.mark.parametrize("mode", MODES)
def test_large_requests_do_not_starve_a_small_one(mode: RepositionMode) -> None:
    """A10: each of them needs nearly every page, and another comes as soon as one has gone."""
    engine = watched(mode, logits=False, num_pages=44, chunked_prefill_size=8)
    for seed in range(2):
        engine.ask((tokens(seed, 40),), (0,) * 2)
    small, steps = engine.ask((tokens(100, 3),), (0,)), 0
    while small.end is None:
        if len(engine.live) < 5:
            engine.ask((tokens(200 + steps, 40),), (0,) * 2)
        engine.step()
        steps += 1
        assert steps <= 2 * (40 // 8 + 2) + 2, "the two before it, and its own token"
    end(engine)


@pytest.mark.parametrize("mode", MODES)
def test_what_can_never_fit_is_refused_in_the_middle_of_it_all(mode: RepositionMode) -> None:
    """A7: at once, by what is active at one moment; neither cache nor neighbours are touched, and it may try again."""
    engine = watched(mode, num_pages=30, chunked_prefill_size=4)
    engine.ask((tokens(0, 12),), (1, 2))
    engine.drain()
    speaking = engine.ask((tokens(0, 12), Drop(frozenset(range(4))), Reposition(), tokens(1, 2)), (3,) * 8)
    engine.step()
    too_large: History = (tokens(0, 12), tokens(2, 20))
    for history in (too_large, (*too_large, Drop(frozenset(range(25)))), (*too_large, Reposition(), tokens(3, 1))):
        assert engine.ask(history).end == "refused"
        engine.step()
    # As many tokens, of which fewer are active at a time.
    fits = engine.ask((tokens(0, 12), Drop(frozenset(range(10))), tokens(2, 20)))
    engine.drain()
    assert (speaking.end, fits.end) == ("finished", "finished")
    end(engine)


@pytest.mark.parametrize("mode", MODES)
def test_a_shared_beginning_takes_its_pages_once(mode: RepositionMode) -> None:
    """R6: whoever begins as a running request does needs room for the rest alone, turned copies included."""
    # Of each: 20 tokens of the beginning, one or two of its own, and what it says; in copy mode 4 survivors turned.
    engine = watched(mode, num_pages=64 if mode == "on_read" else 76, chunked_prefill_size=32)
    start = (tokens(0, 20), tokens(1, 20))
    speakers = [engine.ask((*start, tokens(2, 2)), (1,) * 12)]
    engine.step()
    for seed in range(3, 6):
        speakers.append(engine.ask((*start, tokens(seed, 2)), (seed,) * 3))
    speakers.append(engine.ask((*start, Drop(frozenset(range(4, 40))), Reposition(), tokens(6, 1)), (3,) * 3))
    engine.step()
    engine.step()
    assert [len(asked.outputs) > 0 and asked.end is None for asked in speakers] == [True] * 5
    end(engine)
    # Nobody else's beginning is free.
    speakers = [engine.ask((tokens(seed, 40),), (1,) * 3) for seed in range(7, 9)]
    engine.step()
    engine.step()
    assert not speakers[1].computed
    end(engine)


def with_holes(mode: RepositionMode) -> tuple[WatchedEngine, History]:
    """An engine that gave up the middle of a message when somebody had dropped it, and a history that keeps it."""
    engine = watched(mode, num_pages=80, chunked_prefill_size=3)
    start = tokens(0, 20)
    engine.ask((start, Drop(frozenset(range(2, 18))), Reposition(), tokens(1, 4)), (4, 5, 6))
    engine.drain()
    assert engine.engine.cache.evict(16) == 16
    return engine, (start, Drop(frozenset({0, 5})), Reposition(), tokens(3, 5))


def played(mode: RepositionMode, steps: int | None) -> tuple[WatchedEngine, Asked, int]:
    """That history beside a neighbour that speaks, hung up after so many steps; how many there were."""
    engine, history = with_holes(mode)
    engine.ask((tokens(0, 12), tokens(9, 3)), (7,) * 12)
    engine.step()
    asked, taken = engine.ask(history, (1, 2, 3, 4)), 0
    while asked.end is None and taken != steps:
        engine.step()
        taken += 1
    return engine, asked, taken


@pytest.mark.parametrize("mode", MODES)
def test_aborts_at_every_moment_of_a_restore(mode: RepositionMode) -> None:
    """C4, C7: while it waits, at every boundary of a chunk, between two tokens; its neighbour speaks on, and the same
    request is answered afterwards."""
    engine, whole, last = played(mode, None)
    usage = whole.outputs[-1].usage
    assert usage is not None and usage.restored_tokens == 16 and usage.forwards >= 7
    end(engine)
    stages = set()
    for steps in range(last):
        engine, asked, _ = played(mode, steps)
        stages.add((bool(asked.computed), len(asked.logits)))
        engine.abort(asked)
        engine.step()
        again = engine.ask(asked.history, (1, 2, 3, 4))
        engine.drain()
        assert again.end == "finished"
        end(engine)
    assert stages == {(False, 0), (True, 0), (True, 1), (True, 2), (True, 3)}


@pytest.mark.parametrize("mode", MODES)
def test_whoever_loses_its_pages_keeps_what_it_has_said(mode: RepositionMode) -> None:
    """A4, A7: tokens come once each and in order, and their logits are those of the uninterrupted request."""
    engine = watched(mode, num_pages=48, chunked_prefill_size=16)
    start = tokens(0, 10)
    speakers = [
        engine.ask((start, Drop(frozenset({n, n + 1})), *((Reposition(),) * (n % 2)), tokens(n, 3)), (n, 7) * 8)
        for n in range(5)
    ]
    said_before_it_stopped = 0
    while engine.engine.busy:
        before = {job.job_id for job in engine.engine.scheduler.running}
        engine.step()
        lost = [engine.asked[job.job_id] for job in engine.engine.scheduler.waiting if job.job_id in before]
        said_before_it_stopped = max(said_before_it_stopped, *(len(asked.outputs) for asked in lost), 0)
    assert engine.engine.scheduler.preemptions > 0 and said_before_it_stopped > 2
    for asked in speakers:
        assert asked.end == "finished"
        assert tuple(token for output in asked.outputs for token in output.token_ids) == asked.forced
        assert "".join(output.text for output in asked.outputs) == "".join(chr(48 + token) for token in asked.forced)
    end(engine)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_leased_for_later_gives_way_to_holes_before_it(mode: RepositionMode) -> None:
    """A4, A7: a request that fits when nothing is resident fits when anything is: it starts over, and is right."""
    engine = watched(mode, num_pages=12, chunked_prefill_size=8)
    shared: History = (tokens(0, 10), Drop(frozenset(range(5))), tokens(1, 5))
    asked = [
        engine.ask((*shared, Drop(frozenset(range(5, 10))), tokens(2, 1))),
        # This one takes the pages of what was dropped.
        engine.ask((tokens(3, 6),)),
        engine.ask((*shared, tokens(4, 2))),
    ]
    engine.drain()
    assert [one.end for one in asked] == ["finished"] * 3
    end(engine)
