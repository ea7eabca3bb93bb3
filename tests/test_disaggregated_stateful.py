"""Everything at once with prefill and decode apart: any order of ends, hang-ups, failing transfers, full pools.

Hypothesis plays episodes; the books of both sides are checked after every step (C7), and every token's logits are held
against the specification run from the history alone (A4). `tests/two_sides.py` is what the rules are played on.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    multiple,
    precondition,
    rule,
)

from akv_jax.config import RepositionMode
from spec.operations import Append, History, Reposition
from tests.episodes import play
from tests.test_stateful import BEGINNINGS, LONGEST, Told, count_of, dropping, drops, places, replies, some, tokens
from tests.two_layers import MODES, oracle
from tests.two_sides import Asked, TwoSides

pools = st.sampled_from([12, 16, 20, 24, 32, 48, 120])
few = st.integers(0, 12)


class Agents(RuleBasedStateMachine):
    """See the module. Histories in `told` include what the request was made to sample."""

    told: Bundle[Told] = Bundle("told")

    def __init__(self, mode: RepositionMode) -> None:
        super().__init__()
        self.mode: RepositionMode = mode
        self.sides: TwoSides
        self.sound = True

    @initialize(
        target=told,
        prefill=pools,
        decode=pools,
        chunk=st.sampled_from([2, 8, 32]),
        running=st.sampled_from([1, 2, 4, 8]),
        seed=st.integers(0, 1000),
    )
    def start(self, prefill: int, decode: int, chunk: int, running: int, seed: int) -> Any:
        sizes = {"chunked_prefill_size": chunk, "max_running_requests": running}
        self.sides = TwoSides(
            self.mode, oracle(), random.Random(seed).choice, prefill_pages=prefill, decode_pages=decode, **sizes
        )
        return multiple(*(("", history) for history in BEGINNINGS))

    @rule(target=told, before=told, tokens=tokens, reply=replies, steps=few, salt=st.sampled_from(["", "", "other"]))
    def ask(self, before: Told, tokens: tuple[int, ...], reply: tuple[int, ...], steps: int, salt: str) -> Any:
        return self._ask((salt or before[0], before[1]), (Append(tokens),), reply, steps)

    @rule(target=told, before=told, gone=drops, tokens=some, reply=replies, steps=few, reposition=st.booleans())
    def edit(
        self,
        before: Told,
        gone: list[int],
        tokens: tuple[int, ...],
        reply: tuple[int, ...],
        steps: int,
        reposition: bool,
    ) -> Any:
        edits = (dropping(before[1], gone), *((Reposition(),) * reposition), Append(tokens))
        return self._ask(before, edits, reply, steps)

    @rule(crowd=st.lists(st.tuples(told, tokens), min_size=2, max_size=5))
    def crowd(self, crowd: list[tuple[Told, tuple[int, ...]]]) -> None:
        """Several that have much to say: more than the pools may hold."""
        for before, more in crowd:
            self._ask(before, (Append(more),), (0, 1, 1) * 5, 2)
        self._steps(25)

    @precondition(lambda self: self.sides.live)
    @rule(which=places)
    def abort(self, which: int) -> None:
        live = self.sides.live
        asked = live[which % len(live)]
        event(f"aborted while {self._stage(asked)}")
        self.sides.abort(asked)

    @rule(call=st.sampled_from(["copy_out", "bring", "copy_in"]), side=st.integers(0, 1), times=st.integers(1, 3))
    def fail(self, call: str, side: int, times: int) -> None:
        self.sides.copiers[side].failures[call] += times

    @rule()
    def flush(self) -> None:
        able = sum(side.cache.evictable() for side in (self.sides.prefill, self.sides.decode))
        assert self.sides.engine.flush_cache() == able
        self.sides.engine.check()

    @rule(steps=st.sampled_from([1, 3, 10, 500]))
    def step(self, steps: int) -> None:
        self._steps(steps)

    def _ask(self, before: Told, more: History, reply: tuple[int, ...], steps: int) -> Any:
        salt, history = before[0], (*before[1], *more)
        if count_of(history) > LONGEST:
            return multiple()
        self.sound = False
        asked = self.sides.ask(history, reply, salt=salt)
        self.sound = True
        self._steps(steps)
        return multiple() if asked.end == "refused" else (salt, (*history, Append(reply)))

    def _steps(self, count: int) -> None:
        self.sound = False
        for _ in range(count):
            if not self.sides.engine.busy:
                break
            self.sides.step()
            for asked in self.sides.asked.values():
                # Only a transfer that fails twice is the end of a request before its time.
                assert asked.end != "failed" or sum(sum(copier.failed.values()) for copier in self.sides.copiers) > 1
        self.sound = True

    def _stage(self, asked: Asked) -> str:
        for name, side in (("prefill", self.sides.prefill), ("decode", self.sides.decode)):
            for job in side.scheduler.running:
                if job.job_id == asked.request.request_id:
                    return f"{job.hold or 'running'} on the {name} side"
        return "waiting"

    def teardown(self) -> None:
        if not hasattr(self, "sides") or not self.sound:
            return
        for copier in self.sides.copiers:
            copier.failures = dict.fromkeys(copier.failures, 0)
        self.sides.end()
        stats = self.sides.engine.stats()
        event(f"retractions: {min(stats.preemptions_total, 3)}")
        event(f"transfers failed: {min(stats.transfers_failed_total, 3)}")


@pytest.mark.parametrize("mode", MODES)
def test_episodes(mode: RepositionMode) -> None:
    """A4, A7, C4, C7, R5: the same episodes every time."""
    play(lambda: Agents(mode), 5, 20, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_many_episodes(mode: RepositionMode) -> None:
    """The same, new ones every time."""
    play(lambda: Agents(mode), 1_000, 20, derandomize=False)
