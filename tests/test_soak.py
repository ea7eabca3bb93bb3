"""Many agents for many turns in a pool of about a third of what they work with: nothing breaks and nothing is left.

Each agent goes on turn by turn, drops its oldest tool message where it has twelve, moves the rest together every few
turns, and hangs up now and then: before its first token, between two, or by having its task cancelled (A4, A7, C7).
"""

from __future__ import annotations

import asyncio
import functools
import gc
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.request import Output, Request, Sampling
from spec.operations import Append, Drop, History, Reposition
from spec.state import run
from tests import tiny_engine, two_layers
from tests.tiny_engine import TinyEngine
from tests.two_layers import MODES

CONTEXT, CHUNK, RUNNING, PAGES = 512, 64, 16, 2_400
#: Tool messages that stay, turns between two repositions, and tokens of a reply.
KEPT, REPOSITION, REPLY = 12, 5, 5


@functools.cache
def warm(mode: RepositionMode) -> TinyEngine:
    return two_layers.sized(mode, CONTEXT, PAGES, RUNNING, CHUNK)


class Answer(NamedTuple):
    """To a request with this history: float32 [vocab] logits of its last token, and what was sampled."""

    history: History
    logits: np.ndarray
    tokens: tuple[int, ...]


@dataclass
class Agent:
    """One conversation, and every answer that came whole."""

    name: str
    generator: np.random.Generator
    history: History = ()
    count: int = 0
    #: Logical indices of tool messages that are not dropped.
    tools: list[range] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    hang_ups: int = 0

    def hear(self, tokens: tuple[int, ...]) -> range:
        """Append to the conversation; returns the logical indices."""
        start, self.count = self.count, self.count + len(tokens)
        self.history = (*self.history, Append(tokens))
        return range(start, self.count)

    async def live(self, engine: AsyncEngine, turns: int) -> None:
        for turn in range(turns):
            size = int(self.generator.integers(4, 13))
            self.tools.append(self.hear(tuple(self.generator.integers(64, size=size).tolist())))
            if len(self.tools) > KEPT:
                self.history = (*self.history, Drop(frozenset(self.tools.pop(0))))
            if turn % REPOSITION == REPOSITION - 1:
                self.history = (*self.history, Reposition())
            while not await self.ask(engine, f"{self.name}-{turn}-{self.hang_ups}"):
                self.hang_ups += 1

    async def ask(self, engine: AsyncEngine, name: str) -> bool:
        """One request; False if the agent hung up before it was answered."""
        patience = int(self.generator.integers(-1, REPLY)) if self.generator.random() < 0.15 else REPLY
        request = Request(name, self.history, Sampling(REPLY, temperature=0.0), return_logits=True)
        if patience < 0:
            task = asyncio.create_task(self.answered(engine, request, REPLY))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return False
        return await self.answered(engine, request, patience)

    async def answered(self, engine: AsyncEngine, request: Request, patience: int) -> bool:
        tokens: tuple[int, ...] = ()
        logits = np.zeros(0)
        async with aclosing(engine.generate(request)) as outputs:
            async for output in outputs:
                tokens += output.token_ids
                logits = logits if output.next_logits is None else output.next_logits
                if len(tokens) > patience:
                    return False
        assert len(tokens) == REPLY
        self.answers.append(Answer(request.operations, logits, tokens))
        self.hear(tokens)
        return True


def resident_bytes() -> int:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@dataclass(frozen=True)
class Half:
    """What a crowd leaves behind when all are gone and the cache is flushed, and some of what it was told."""

    objects: int
    bytes: int
    hang_ups: int
    answers: list[Answer]
    #: Tokens that the agents attend in their last turns, all together.
    working_set: int


async def crowd(engine: AsyncEngine, seed: int, agents: int, turns: int) -> tuple[int, list[Answer], int]:
    """That many agents at once, to their end; how often they hung up, a few of the answers, and the working set."""
    everybody = [Agent(f"{seed}.{n}", np.random.default_rng([seed, n])) for n in range(agents)]
    async with asyncio.timeout(3600):
        await asyncio.gather(*(agent.live(engine, turns) for agent in everybody))
    assert all(len(agent.answers) == turns for agent in everybody)
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_leased, stats.pages_private) == (0, 0, 0, 0)
    await engine.check()
    await engine.flush_cache()
    stats = await engine.stats()
    assert (stats.pages_free, stats.tombstones) == (engine.config.num_pages, 0)
    answers = [answer for agent in everybody for answer in agent.answers]
    chosen = np.random.default_rng(0).choice(len(answers), size=6, replace=False)
    active = sum(len(run(None, agent.history).state.active) for agent in everybody)
    return sum(agent.hang_ups for agent in everybody), [answers[place] for place in chosen.tolist()], active


def half(engine: AsyncEngine, seed: int, agents: int, turns: int) -> Half:
    hang_ups, answers, working_set = asyncio.run(crowd(engine, seed, agents, turns))
    gc.collect()
    return Half(len(gc.get_objects()), resident_bytes(), hang_ups, answers, working_set)


def audited(engine: Engine, every: int = 40) -> Engine:
    """Its books are checked every so many steps (C7)."""
    step, steps = engine.step, 0

    def stepping() -> list[Output]:
        nonlocal steps
        outputs = step()
        steps += 1
        if steps % every == 0:
            engine.check()
        return outputs

    engine.step = stepping  # type: ignore[method-assign]
    return engine


def soak(mode: RepositionMode, agents: int, turns: int, pages: int) -> None:
    """Two crowds, one after the other: the second must leave no more behind than the first did."""
    engine = AsyncEngine(lambda: audited(warm(mode).engine(disable_radix_cache=False, num_pages=pages)))
    engine.start()
    engine.wait_ready()
    try:
        first, second = (half(engine, seed, agents, turns) for seed in range(2))
        stats = asyncio.run(engine.stats())
    finally:
        engine.stop()
    assert engine.failure is None
    # It was crowded: the pool was a third of what they worked with, the copies of positions not counted.
    assert 0.25 < pages / first.working_set < 0.4 and 0.25 < pages / second.working_set < 0.4
    assert sum(stats.evicted_pages_total.values()) > 5 * pages
    assert stats.requests_aborted_total > 0 and first.hang_ups + second.hang_ups > agents * turns * 0.15
    # A few requests' worth of what Python and XLA keep for reuse, and nothing that grows with what was served.
    assert second.objects - first.objects < 1_000
    assert second.bytes - first.bytes < 12_000_000
    for number, answer in enumerate([*first.answers, *second.answers]):
        compare(mode, str(number), answer)


def compare(mode: RepositionMode, name: str, answer: Answer) -> None:
    """A4: the answer that was given is that of the request alone, computed from nothing."""
    request = Request(name, answer.history, Sampling(REPLY, temperature=0.0), return_logits=True)
    outputs = tiny_engine.run(warm(mode).engine(), [request])[name]
    np.testing.assert_allclose(answer.logits, tiny_engine.next_logits(outputs), atol=1e-4, rtol=0)
    assert answer.tokens == tiny_engine.generated(outputs)


@pytest.mark.parametrize("mode", MODES)
def test_seven_agents_of_sixteen_turns(mode: RepositionMode) -> None:
    soak(mode, agents=7, turns=16, pages=420)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_thirty_agents_of_forty_turns(mode: RepositionMode) -> None:
    soak(mode, agents=30, turns=40, pages=PAGES)
