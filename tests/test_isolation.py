"""An agent cannot tell whether it is served alone or among others that share its beginning (DESIGN A4, C4, R7).

What it may notice is that the batch has another size: float32 sums come out in another order. That noise is measured
here, on plain prompts of which nothing is kept and nothing dropped, and twice as much is allowed.
"""

from __future__ import annotations

import numpy as np
import pytest

from akv_jax.config import RepositionMode
from spec.operations import Append, Drop, History, Operation, Reposition
from tests.shared_engines import shared
from tests.two_layers import MODES
from tests.watched_engine import Asked, WatchedEngine

OTHERS = 8
TURNS = 3
PREFIX = tuple(np.random.default_rng(0).integers(64, size=40).tolist())
REPLY = tuple(np.random.default_rng(1).integers(64, size=6).tolist())


def turn_of(agent: int, turn: int) -> tuple[Operation, ...]:
    """What that agent sends at that turn: it drops a part of the shared beginning that is its own, and repositions."""
    generator = np.random.default_rng([agent, turn])
    start = int(generator.integers(len(PREFIX) - 8))
    edits: list[Operation] = [Drop(frozenset(range(start, start + int(generator.integers(2, 9)))))]
    if (agent + turn) % 2 == 0:
        edits.append(Reposition())
    return (*edits, Append(tuple(generator.integers(64, size=5).tolist())))


def logits(asked: Asked) -> np.ndarray:
    """Float32 [reply, vocab]."""
    assert asked.end == "finished"
    return np.array(asked.logits)


def talk(engine: WatchedEngine, others: int) -> np.ndarray:
    """Agent 0's logits over its turns, every agent sending its next turn as soon as its last one is answered.

    Others come a step after one another, before it and after it.
    """
    histories: dict[int, History] = dict.fromkeys(range(others + 1), (Append(PREFIX),))
    asked: dict[int, list[Asked]] = {agent: [] for agent in histories}
    coming = [*range(1, others // 2 + 1), 0, *range(others // 2 + 1, others + 1)]
    there: list[int] = []
    while coming or engine.live or any(len(asked[agent]) < TURNS for agent in there):
        there += [coming.pop(0)] if coming else []
        for agent in there:
            turn = len(asked[agent])
            if turn < TURNS and all(one.end for one in asked[agent]):
                history = (*histories[agent], *turn_of(agent, turn))
                asked[agent].append(engine.ask(history, REPLY))
                histories[agent] = (*history, Append(REPLY))
        engine.step()
    return np.concatenate([logits(one) for one in asked[0]])


def noise(mode: RepositionMode) -> float:
    """The largest change of a logit when eight strangers are served at the same time; no cache, no operation."""
    largest = 0.0
    for seed in range(6):
        generator = np.random.default_rng(seed)
        prompts = [tuple(generator.integers(64, size=size).tolist()) for size in (55, 50, 30, 60, 21, 45, 58, 33, 40)]
        alone, among = (WatchedEngine(shared(mode).engine()) for _ in range(2))
        lonely = alone.ask((Append(prompts[0]),), REPLY)
        alone.drain()
        together = [among.ask((Append(prompt),), REPLY) for prompt in prompts]
        among.drain()
        largest = max(largest, float(np.abs(logits(lonely) - logits(together[0])).max()))
    return largest


@pytest.mark.parametrize("mode", MODES)
def test_alone_and_among_eight_others(mode: RepositionMode) -> None:
    """A4: every logit of three turns, where eight others drop other parts of the same beginning meanwhile."""
    allowed = 2 * noise(mode)
    alone, among = (
        talk(WatchedEngine(shared(mode).engine(disable_radix_cache=False)), others) for others in (0, OTHERS)
    )
    difference = float(np.abs(alone - among).max())
    assert allowed > 0
    assert difference <= allowed
