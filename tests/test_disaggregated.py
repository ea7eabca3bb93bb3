"""Prefill and decode apart (DESIGN R5): what moves, what it saves, who waits for whom, and what goes wrong.

`tests/two_sides.py` holds every token's logits against the specification, and both pools against C7 after every step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any, cast

import numpy as np
import pytest

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import EngineConfig, RepositionMode
from akv_jax.disaggregated import DisaggregatedEngine
from akv_jax.engine import Engine
from akv_jax.errors import Reason, RequestError
from akv_jax.request import Request, Sampling
from akv_jax.side import Side
from spec.operations import Append, Drop, History, Reposition
from tests.two_layers import MODES, oracle, warm
from tests.two_sides import Asked, TwoSides, twin
from tests.virtual_lanes import VirtualDevice, VirtualLanes


def tokens(seed: int, size: int) -> Append:
    return Append(tuple(np.random.default_rng(seed).integers(64, size=size).tolist()))


def moved(sides: TwoSides) -> tuple[int, int]:
    """Pages so far, to the decode side and back."""
    stats = sides.engine.stats()
    return stats.pages_to_decode_total, stats.pages_to_prefill_total


# -- what moves --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_active_set_moves_and_what_was_generated_moves_back(mode: RepositionMode) -> None:
    """R5: not what was dropped; the next turn computes its new tokens alone, and moves only what is not there yet."""
    sides = TwoSides(mode, oracle())
    first = sides.ask((tokens(0, 20), Drop(frozenset(range(3, 9))), Reposition(), tokens(1, 3)), (5, 6, 7, 8))
    sides.drain()
    # The last token that was sampled has no K and V.
    assert moved(sides) == (20 + 3 - 6, 3)
    assert np.concatenate(sides.copiers[1].written).shape == (17,)
    second = sides.ask((*first.whole, tokens(2, 4)), (1, 2))
    sides.drain()
    assert second.usage.computed_tokens == 1 + 4
    assert moved(sides) == (17 + 5, 3 + 1)
    # A branch before the reply shares the prompt on both sides.
    sides.ask((*first.request.operations, tokens(3, 2)), (1, 2))
    sides.drain()
    assert moved(sides) == (22 + 2, 4 + 1)
    sides.end()


@pytest.mark.parametrize("mode", MODES)
def test_it_answers_and_counts_as_an_engine_with_one_side(mode: RepositionMode) -> None:
    """A4, A6: turns with drops and repositions, the same usage and the same tokens, sampled from the same seeds."""

    def served(engine: Engine | DisaggregatedEngine) -> list[Any]:
        outputs: list[Any] = []
        history: History = (tokens(0, 12),)
        for turn in range(5):
            name = f"turn {turn}"
            engine.submit(Request(name, history, Sampling(max_tokens=4, temperature=1.0, seed=turn, ignore_eos=True)))
            said: list[int] = []
            while engine.busy:
                for output in engine.step():
                    said += output.token_ids
                    outputs.append((output.token_ids, output.text, output.usage))
                engine.check()
            count = 12 + 7 * turn
            history = (*history, Append(tuple(said)), Drop(frozenset(range(count - 5, count - 1))), tokens(turn + 1, 3))
            if turn % 2:
                history = (*history, Reposition())
        return outputs

    plain = warm(mode).engine(disable_radix_cache=False)
    sides = TwoSides(mode)
    for side in (sides.prefill, sides.decode):
        side.executor = side.runner
    assert served(sides.engine) == served(plain)


def test_a_history_that_ends_with_an_operation_is_handed_over_a_token_later() -> None:
    """C2: the copies for the last view are made where the pages are that they are made of."""
    for mode, pages in zip(MODES, (11, 11), strict=True):
        sides = TwoSides(mode, oracle())
        sides.ask((tokens(0, 12), Drop(frozenset({2, 3})), Reposition()), (1, 2, 3, 4))
        sides.drain()
        assert moved(sides)[0] == pages
        sides.end()


def test_a_single_token_never_moves() -> None:
    sides = TwoSides(oracle=oracle())
    sides.ask((tokens(0, 12),), (1,))
    sides.drain()
    assert moved(sides) == (0, 0)
    sides.end()


# -- who waits ---------------------------------------------------------------------------------------------------------


def virtual(chunk: float = 10.0) -> tuple[DisaggregatedEngine, VirtualLanes]:
    """Chunks of 500 tokens that take ten seconds, decode steps of 0.02, copies that take a while on the way."""
    lanes, model = VirtualLanes(), dataclasses.replace(warm("on_read").model, params={})
    config = EngineConfig(context_length=100_000, num_pages=8000, max_running_requests=8, chunked_prefill_size=500)
    sides = []
    for step in (chunk, 0.02):
        device = VirtualDevice(config, lanes, step=step, copy=0.001, bring=0.3)
        sides.append(Side(model, config, cast(Any, device)))
    return DisaggregatedEngine(model, *sides, lanes=lanes, clock=lanes.clock), lanes


def said_at(engine: Any, clock: Any, coming: list[tuple[float, Request]], who: str) -> tuple[list[float], list[str]]:
    """Serve requests that come at these times; when each token of `who` came, and who had ended before the last."""
    times, ended = [], []
    while engine.busy or coming:
        while coming and (coming[0][0] <= clock() or not engine.busy):
            engine.submit(coming.pop(0)[1])
        for output in engine.step():
            assert output.error is None
            if output.request_id == who and output.token_ids:
                times.append(clock())
            if output.finish_reason is not None:
                ended.append(output.request_id)
                engine.check()
    return times, ended[: ended.index(who)]


def traffic() -> list[tuple[float, Request]]:
    """One that speaks for 72 seconds, and prompts of one or two chunks beside it that say little."""

    def request(name: str, size: int, outputs: int) -> Request:
        return Request(name, (tokens(len(name) + size, size),), Sampling(max_tokens=outputs, ignore_eos=True))

    beside = [(15.0 + 5 * n, request(f"beside {n}", 100 + 480 * (n % 2), 3 + n)) for n in range(4)]
    return [(0.0, request("speaker", 40, 3600)), *beside]


def test_nothing_makes_decode_wait_for_a_prefill() -> None:
    """R5: by the clock between tokens is a decode step, and what a copy takes of the decode side itself."""
    engine, lanes = virtual()
    times, ended = said_at(engine, lanes.clock, traffic(), "speaker")
    gaps = np.diff(times)[1:]
    assert len(ended) == 4, "prompts were computed and moved, and replies moved back, meanwhile"
    assert engine.stats().pages_to_prefill_total >= sum(2 + n for n in range(4))
    # Two copies at most can come between two steps: one in, one out.
    assert gaps.min() >= 0.02 - 1e-9 and gaps.max() <= 0.02 + 2 * 0.001 + 1e-9
    assert (gaps < 0.02 + 1e-9).mean() > 0.99


class BusyHost:
    """Makes the thread that plans both sides take time as well: seconds to read a request, to plan a chunk and to keep
    what it computed, to plan a decode step, and to find pages for a request that is handed over."""

    READ, CHUNK, KEEP, STEP, TAKE = 0.03, 0.05, 0.01, 0.002, 0.004

    def __init__(self, engine: DisaggregatedEngine, lanes: VirtualLanes) -> None:
        self._lanes = lanes
        self.chunks = 0
        for owner, call, seconds in (
            (engine, "submit", self.READ),
            (engine.prefill, "plan", self.CHUNK),
            (engine.prefill.scheduler, "advance", self.KEEP),
            (engine.decode, "plan", self.STEP),
            (engine.decode.scheduler, "receive", self.TAKE),
        ):
            setattr(owner, call, functools.partial(self._after, seconds, getattr(owner, call)))

    def _after(self, seconds: float, call: Any, *arguments: Any) -> Any:
        self._lanes.now += seconds
        self.chunks += seconds == self.CHUNK
        return call(*arguments)


@pytest.mark.parametrize("chunk", [10.0, 0.001], ids=["slow device", "fast device"])
def test_decode_waits_for_one_planning_of_a_chunk_at_most(chunk: float) -> None:
    """R5: one thread plans both sides, so that much, the end of the chunk before and a new request's reading may come
    between two tokens. However long chunks take, and however many there are, a decode step is planned after each."""
    engine, lanes = virtual(chunk)
    host = BusyHost(engine, lanes)
    long = Request("long", (tokens(1, 6000),), Sampling(max_tokens=2, ignore_eos=True))
    times, ended = said_at(engine, lanes.clock, [*traffic(), (40.0, long)], "speaker")
    gaps = np.diff(times)[1:]
    assert len(ended) == (5 if chunk < 1 else 4) and host.chunks >= 8
    undisturbed = 0.02 + host.STEP
    most = undisturbed + host.CHUNK + host.KEEP + host.READ + host.TAKE + 2 * 0.001
    assert undisturbed - 1e-9 <= gaps.min() and gaps.max() <= most + 1e-9
    # It does wait: planning a chunk takes longer than its own step. And no oftener than there is something to plan.
    late = gaps > undisturbed + 2 * 0.001 + 1e-9
    assert gaps.max() >= host.CHUNK and late.sum() <= 2 * host.chunks + 5 + 5


def test_with_one_side_decode_does_wait() -> None:
    """The same traffic with both on one device: what the test above would see."""
    lanes = VirtualLanes()
    config = EngineConfig(context_length=100_000, num_pages=8000, max_running_requests=8, chunked_prefill_size=500)
    device = VirtualDevice(config, lanes, step=0.02, copy=0.0, bring=0.0)

    class Mixed:
        def run(self, plan: Any, sampling: Any) -> Any:
            lanes.now += 10.0 if len(plan.tokens) > 20 else 0.02
            return device.run(plan, sampling)

    model = dataclasses.replace(warm("on_read").model, params={})
    engine = Engine(model, config, runner=cast(Any, device), clock=lanes.clock)
    engine.executor = Mixed()
    coming = [
        (at / 50, dataclasses.replace(r, sampling=Sampling(max_tokens=50, ignore_eos=True))) for at, r in traffic()
    ]
    times, _ = said_at(engine, lanes.clock, coming, "speaker")
    assert np.diff(times).max() >= 10.0


@pytest.mark.parametrize("mode", MODES)
def test_a_full_decode_side_lets_prefill_go_on(mode: RepositionMode) -> None:
    """R5: who waits for decode pages may lose its own to prompts, and all of them are served."""
    sides = TwoSides(mode, oracle(), prefill_pages=40, decode_pages=26)
    speakers = [sides.ask((tokens(n, 20),), (1, 2, 3)) for n in range(4)]
    last = sides.ask((tokens(9, 30),), (1,))
    parked = 0
    while sides.engine.busy:
        sides.step()
        parked = max(parked, sum(job.hold == "parked" for job in sides.prefill.scheduler.running))
        assert len(sides.decode.scheduler.running) <= 1
    assert parked and {asked.end for asked in (*speakers, last)} == {"finished"}
    sides.end()


# -- capacity ----------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_on_one_of_the_sides_is_refused() -> None:
    """A7: at once, whichever side it is; one token needs no decode side."""
    sides = TwoSides(oracle=oracle(), prefill_pages=40, decode_pages=20)
    assert sides.ask((tokens(0, 21),), (1, 2)).end == "refused"
    with pytest.raises(RequestError, match="decode side") as refused:
        sides.engine.submit(Request("x", (tokens(0, 21),), Sampling(max_tokens=2)))
    assert refused.value.reason is Reason.POOL_TOO_SMALL and refused.value.status == 503
    sides.drain()
    fits = [sides.ask((tokens(0, 21),), (1,)), sides.ask((tokens(0, 30), Drop(frozenset(range(12))), tokens(1, 1)))]
    full = sides.ask((tokens(3, 20),), (1, 2, 3))
    small = TwoSides(oracle=oracle(), prefill_pages=20, decode_pages=40)
    assert small.ask((tokens(0, 21),), (1, 2)).end == "refused"
    sides.drain()
    assert [asked.end for asked in fits] == ["finished"] * 2
    # As with one side: a full pool ends a request, which has the tokens that it got.
    assert full.end == "finished" and len(full.logits) == 1
    assert full.usage.completion_tokens == 1 and full.outputs[-1].finish_reason == "length"
    sides.end()


@pytest.mark.parametrize("mode", MODES)
def test_whoever_fills_the_decode_side_alone_ends(mode: RepositionMode) -> None:
    """A7: as if max_tokens had been reached; each token but the last has a page."""
    sides = TwoSides(mode, oracle(), decode_pages=20)
    asked = sides.ask((tokens(0, 10),), (1,) * 50)
    sides.drain()
    assert asked.end == "finished" and len(asked.logits) == 11
    sides.end()


@pytest.mark.parametrize("mode", MODES)
def test_whoever_loses_its_decode_pages_keeps_what_it_has_said(mode: RepositionMode) -> None:
    """A4: it is computed again on the prefill side and moves again; tokens come once each, in order."""
    sides = TwoSides(mode, oracle(), prefill_pages=100, decode_pages=48)
    history: History = (tokens(0, 10), Drop(frozenset({1, 2})), Reposition(), tokens(1, 3))
    speakers = [sides.ask((*history, tokens(n, 2)), (n, 7) * 9) for n in range(4)]
    sides.drain()
    assert sides.engine.stats().preemptions_total > 0
    for asked in speakers:
        assert tuple(token for output in asked.outputs for token in output.token_ids) == asked.forced
    sides.end()


def test_a_reply_that_finds_no_room_is_not_missed() -> None:
    """R5: running prompts lose nothing for it; the next turn computes it."""
    sides = TwoSides(oracle=oracle(), prefill_pages=30, chunked_prefill_size=2, choose=lambda lanes: lanes[0])
    first = sides.ask((tokens(0, 10),), (1, 2, 3, 4))
    while not first.logits:
        sides.step()
    # It takes all of the pool, and many steps.
    sides.ask((tokens(1, 30),), (1,))
    sides.drain()
    assert moved(sides)[1] == 0
    second = sides.ask((*first.whole, tokens(2, 2)), (1,))
    sides.drain()
    assert second.end == "finished" and second.usage.computed_tokens > 3
    sides.end()


# -- hang-ups and failures ---------------------------------------------------------------------------------------------


def played(mode: RepositionMode, steps: int | None) -> tuple[TwoSides, Asked, int]:
    """A request beside a neighbour that speaks, hung up after so many steps; how many there were."""
    sides = TwoSides(mode, oracle(), prefill_pages=60, decode_pages=60, chunked_prefill_size=8)
    sides.ask((tokens(0, 5),), (7,) * 9)
    sides.step()
    history: History = (tokens(1, 14), Drop(frozenset(range(2, 6))), Reposition(), tokens(2, 3))
    asked, taken = sides.ask(history, (1, 2, 3, 4)), 0
    while sides.engine.busy and taken != steps and not (steps is None and asked.end):
        sides.step()
        taken += 1
    return sides, asked, taken


@pytest.mark.parametrize("mode", MODES)
def test_hang_ups_at_every_moment(mode: RepositionMode) -> None:
    """C4, C7: waiting, computing, parked, on the way, decoding; the same is answered afterwards."""
    sides, _, last = played(mode, None)
    sides.end()
    stages = set()
    for steps in range(last):
        sides, asked, _ = played(mode, steps)
        for name, side in (("prefill", sides.prefill), ("decode", sides.decode)):
            jobs = [job for job in side.scheduler.running if job.job_id == asked.request.request_id]
            stages |= {(name, job.hold) for job in jobs}
        sides.abort(asked)
        again = sides.ask(asked.request.operations, (1, 2, 3, 4))
        sides.drain()
        assert again.end == "finished"
        sides.end()
    assert {("prefill", None), ("prefill", "moving"), ("decode", "moving"), ("decode", None)} <= stages


@pytest.mark.parametrize("call", ["copy_out", "bring", "copy_in"])
def test_a_transfer_that_fails_is_tried_again_and_then_given_up(call: str) -> None:
    """R5, C7: with an error that a client can try again after, and nothing is lost but the attempt."""
    sides = TwoSides(oracle=oracle())
    copier = sides.copiers[0 if call == "copy_out" else 1]
    copier.failures[call] = 1
    once = sides.ask((tokens(0, 9),), (1, 2, 3))
    sides.drain()
    assert once.end == "finished" and sides.engine.stats().transfers_failed_total == 1
    copier.failures[call] = 2
    twice = sides.ask((tokens(1, 9),), (1, 2, 3))
    beside = sides.ask((tokens(2, 9),), (1,))
    sides.drain()
    (error,) = [output.error for output in twice.outputs if output.error is not None]
    assert isinstance(error, RequestError) and (error.reason, error.status) == (Reason.TRANSFER_FAILED, 503)
    assert (twice.end, beside.end) == ("failed", "finished") and len(twice.logits) == 1
    again = sides.ask((tokens(1, 9),), (1, 2, 3))
    sides.drain()
    assert again.end == "finished" and again.usage.computed_tokens == 1
    sides.end()


@pytest.mark.parametrize("call", ["copy_out", "bring", "copy_in"])
def test_a_reply_that_gets_lost_is_computed_again(call: str) -> None:
    """R5, C7: the client does not notice."""
    sides = TwoSides(oracle=oracle())
    sides.copiers[1 if call == "copy_out" else 0].failures[call] = 1
    first = sides.ask((tokens(0, 9),), (1, 2, 3))
    sides.drain()
    assert first.end == "finished" and moved(sides)[1] == 0
    second = sides.ask((*first.whole, tokens(2, 2)), (1,))
    sides.drain()
    assert second.usage.computed_tokens == 3 + 2
    sides.end()


def test_what_is_hung_up_on_at_the_end_is_there_for_the_next_start(tmp_path: Any) -> None:
    """The prefill side's tree is stored, with the replies; what is in flight is waited for."""
    sides = TwoSides(oracle=oracle())
    asked = sides.ask((tokens(0, 9),), (1, 2, 3, 4))
    while len(asked.logits) < 3:
        sides.step()
    sides.engine.abort_all()
    sides.engine.check()
    assert not sides.engine.busy and not sides.prefill.cache.leased() and not sides.decode.cache.leased()
    # The third token was sampled, and not computed yet.
    assert sides.engine.save_cache(tmp_path) == 9 + 2
    fresh = TwoSides(oracle=oracle())
    assert fresh.engine.load_cache(tmp_path) == 9 + 2
    again = fresh.ask((*asked.request.operations, Append((1, 2, 3)), tokens(1, 1)), (5, 6))
    fresh.drain()
    assert again.usage.computed_tokens == 2
    fresh.end()


# -- in threads --------------------------------------------------------------------------------------------------------


def test_behind_the_server_with_a_thread_a_lane() -> None:
    """R3, R5: requests that come at once, one that hangs up; nothing compiles after warm-up, and all adds up."""
    tiny = warm("on_read")
    engine = DisaggregatedEngine(tiny.model, *(Side(tiny.model, tiny.settings, twin(tiny.runner)) for _ in range(2)))
    serving = AsyncEngine(lambda: engine)
    serving.start()
    serving.wait_ready()

    async def answer(number: int, history: History, until: int = 99) -> tuple[list[int], Any]:
        said: list[int] = []
        usage = None
        sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
        outputs = serving.generate(Request(f"{number}", history, sampling))
        async for output in outputs:
            said += output.token_ids
            usage = output.usage
            if len(said) >= until:
                break
        await outputs.aclose()
        return said, usage

    async def talk() -> tuple[Any, Any]:
        compiled = (await serving.stats()).compilations_total
        first = await asyncio.gather(*(answer(n, (tokens(n, 10 + n),), 3 if n == 2 else 99) for n in range(5)))
        turns = [(tokens(n, 10 + n), Append(tuple(said)), tokens(50, 2)) for n, (said, _) in enumerate(first)]
        second = await asyncio.gather(*(answer(n + 10, turns[n]) for n in (0, 1, 3, 4)))
        assert (await serving.stats()).compilations_total == compiled
        while (await serving.stats()).num_running:
            await asyncio.sleep(0.01)
        await serving.check()
        assert (await serving.cache_tree(100, 100)).nodes
        return first, second

    first, second = asyncio.run(talk())
    serving.stop()
    serving.wait_finished()
    assert serving.failure is None
    # The reply's last token and two new ones, though each goes on as soon as it has the reply's end.
    assert [usage.computed_tokens for _, usage in second] == [3] * 4
    model = oracle()
    for number, (said, _) in enumerate(first):
        logits = model.logits((tokens(number, 10 + number), Append(tuple(said))))[9 + number : -1]
        assert said == np.argmax(logits, axis=-1).tolist()
