"""Replays agents against a server, all at once, and sums up what it cost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.local_server import Answer, Refused, ask, client, counters
from benchmarks.report import percentile
from benchmarks.trajectories import Trajectory, rolling_drop


@dataclass(frozen=True, slots=True)
class RollingDrop:
    """What agents drop (see `trajectories.rolling_drop`)."""

    keep: int
    every: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: seconds to its first token, and its usage (DESIGN A6)."""

    first_token: float
    prompt: int
    computed: int
    cached: int
    rotated: int
    drop_skipped: int
    restored: int
    completion: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A replay, summed up.

    hit_rate: of the prompt tokens that some query read or that were computed, how many were not computed.
    peak_pages: most pages that running requests held at one time. evictions: pages, by class. refused: turns that would
    need more pages at one time than the pool has (503); their agents go on with the next one.
    """

    turns: int
    refused: int
    seconds: float
    prompt_tokens: int
    computed_tokens: int
    restored_tokens: int
    hit_rate: float
    first_token_median: float
    first_token_p90: float
    turns_per_minute: float
    prompt_tokens_per_second: float
    evictions: Mapping[str, int] = field(default_factory=dict)
    preemptions: int = 0
    forwards: int = 0
    copies: int = 0
    peak_pages: int = 0
    device_seconds: float = 0.0
    pool: int = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def summary(results: Sequence[Turn | None], seconds: float, **more: Any) -> Outcome:
    """None is a refused turn. `more`: fields of `Outcome` that do not follow from the turns."""
    turns = [turn for turn in results if turn is not None]
    computed = sum(turn.computed for turn in turns)
    needed = computed + sum(turn.cached + turn.rotated for turn in turns)
    prompt = sum(turn.prompt for turn in turns)
    first = [turn.first_token for turn in turns]
    return Outcome(
        turns=len(turns),
        refused=len(results) - len(turns),
        seconds=seconds,
        prompt_tokens=prompt,
        computed_tokens=computed,
        restored_tokens=sum(turn.restored for turn in turns),
        hit_rate=1 - computed / needed if needed else 0.0,
        first_token_median=percentile(first, 0.5),
        first_token_p90=percentile(first, 0.9),
        turns_per_minute=60 * len(turns) / seconds,
        prompt_tokens_per_second=prompt / seconds,
        **more,
    )


def evictions_of(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, int]:
    """What the counters of evictions say of the time between two looks at them: by class where they have classes."""
    found = {}
    for name, value in after.items():
        if "evict" in name:
            label = name.split("=", 1)[1].rstrip("}") if "=" in name else name.removeprefix("akv:")
            found[label] = int(value - before.get(name, 0))
    return found


def replay(
    url: str, agents: Sequence[Trajectory], edits: RollingDrop | None, *, max_tokens: int, think_seconds: float = 0.0
) -> Outcome:
    """Every agent sends its turns one after another, beside all the others.

    `think_seconds`: mean time from an answer to the agent's next request, exponential from a fixed seed.
    """
    before = counters(url)
    start = time.perf_counter()
    turns = asyncio.run(_all(url, agents, edits, max_tokens, think_seconds))
    seconds = time.perf_counter() - start
    after = counters(url)
    preemptions = int(after["akv:preemptions"] - before["akv:preemptions"])
    return summary(turns, seconds, evictions=evictions_of(before, after), preemptions=preemptions)


async def _all(
    url: str, agents: Sequence[Trajectory], edits: RollingDrop | None, max_tokens: int, think_seconds: float
) -> list[Turn | None]:
    async with client(url) as http:

        async def one(number: int, agent: Trajectory) -> list[Turn | None]:
            think, turns = random.Random(number), []
            for count in agent.turns:
                if think_seconds:
                    await asyncio.sleep(think.expovariate(1 / think_seconds))
                messages = agent.messages[:count]
                body: dict[str, Any] = {"messages": messages, "max_tokens": max_tokens}
                if edits is not None:
                    body["cache"] = rolling_drop(messages, edits.keep, edits.every)
                try:
                    turns.append(turn_of(await ask(http, body)))
                except Refused as error:
                    if error.status != 503:
                        raise
                    turns.append(None)
            return turns

        results = await asyncio.gather(*(one(number, agent) for number, agent in enumerate(agents)))
    return [turn for turns in results for turn in turns]


def turn_of(answer: Answer) -> Turn:
    """As the server reports it."""
    usage = answer.usage
    details = usage["prompt_tokens_details"]
    return Turn(
        first_token=answer.first_token,
        prompt=usage["prompt_tokens"],
        computed=answer.cache["computed_tokens"],
        cached=details["cached_tokens"],
        rotated=details["repos_tokens"],
        drop_skipped=details["drop_skipped_tokens"],
        restored=answer.cache["restored_tokens"],
        completion=usage["completion_tokens"],
    )
