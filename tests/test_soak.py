"""Many agents for many turns in a pool that holds a third of what they work with: nothing breaks and nothing is left.

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

import numpy as np
import pytest

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.request import Output, Request, Sampling
from spec.operations import Append, Drop, History, Reposition
from tests import tiny_engine
from tests.test_stateful import model_config, params
from tests.tiny_engine import TinyEngine, quick_compiles

MODES: tuple[RepositionMode, ...] = ("on_read", "copy")
CONTEXT, CHUNK, RUNNING, PAGES = 512, 64, 16, 2_400
#: Tool messages that stay, turns between two repositions, and tokens of a reply.
KEPT, REPOSITION, REPLY = 12, 5, 5


@functools.cache
def warm(mode: RepositionMode) -> TinyEngine:
    made = TinyEngine(
        model_config(),
        params(),
        context_length=CONTEXT,
        num_pages=PAGES,
        max_running_requests=RUNNING,
        chunked_prefill_size=CHUNK,
        token_buckets=(CHUNK,),
        reposition=mode,
    )
    with quick_compiles():
        made.engine().warm_up()
    return made


@dataclass
class Agent:
    """One conversation, and every answer that came whole: its request's history, first logits and tokens."""

    name: str
    generator: np.random.Generator
    history: History = ()
    count: int = 0
    #: Logical indices of tool messages that are not dropped.
    tools: list[range] = field(default_factory=list)
    answers: list[tuple[History, np.ndarray, tuple[int, ...]]] = field(default_factory=list)
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
        self.answers.append((request.operations, logits, tokens))
        self.hear(tokens)
        return True


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@dataclass(frozen=True)
class Left:
    """What is there when nobody is served and the cache was flushed."""

    objects: int
    bytes: int


async def half(engine: AsyncEngine, seed: int, agents: int, turns: int) -> tuple[list[Agent], Left]:
    """That many agents at once, to their end, and what they leave."""
    crowd = [Agent(f"{seed}.{n}", np.random.default_rng([seed, n])) for n in range(agents)]
    await asyncio.gather(*(agent.live(engine, turns) for agent in crowd))
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.pages_leased, stats.pages_private) == (0, 0, 0, 0)
    await engine.check()
    await engine.flush_cache()
    assert (await engine.stats()).pages_free == engine.config.num_pages
    answers = [agent.answers for agent in crowd]
    gc.collect()
    # What the agents themselves remember is theirs.
    return crowd, Left(len(gc.get_objects()) - sum(map(len, answers)), resident_bytes())


def checked(engine: Engine, every: int = 40) -> Engine:
    """Its books are audited every so many steps (C7)."""
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
    """Twice as many agents as named, in two halves; the second must leave no more behind than the first did."""
    made: list[Engine] = []

    def make() -> Engine:
        made.append(checked(warm(mode).engine(disable_radix_cache=False, num_pages=pages)))
        return made[0]

    engine = AsyncEngine(make)
    engine.start()
    engine.wait_ready()
    try:
        first, left = asyncio.run(half(engine, 0, agents, turns))
        second, at_the_end = asyncio.run(half(engine, 1, agents, turns))
    finally:
        engine.stop()
    assert engine.failure is None
    crowd, scheduler = [*first, *second], made[0].scheduler
    print(left, at_the_end, scheduler.preemptions, sum(agent.hang_ups for agent in crowd), made[0].stats())
    assert all(len(agent.answers) == turns for agent in crowd)
    assert sum(agent.hang_ups for agent in crowd) > agents * turns * 0.15
    assert not scheduler.running and not scheduler.waiting
    compare(mode, [answer for agent in crowd for answer in agent.answers])


def compare(mode: RepositionMode, answers: list[tuple[History, np.ndarray, tuple[int, ...]]]) -> None:
    """A4: some of the answers, each computed alone and from nothing."""
    chosen = np.random.default_rng(0).choice(len(answers), size=12, replace=False)
    for number, place in enumerate(chosen.tolist()):
        history, logits, tokens = answers[place]
        request = Request(str(number), history, Sampling(REPLY, temperature=0.0), return_logits=True)
        outputs = tiny_engine.run(warm(mode).engine(), [request])[str(number)]
        np.testing.assert_allclose(logits, tiny_engine.next_logits(outputs), atol=1e-4, rtol=0)
        assert tokens == tiny_engine.generated(outputs)


def test_a_crowd() -> None:
    soak("on_read", agents=8, turns=15, pages=300)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_thirty_agents_of_forty_turns(mode: RepositionMode) -> None:
    soak(mode, agents=30, turns=40, pages=PAGES)
