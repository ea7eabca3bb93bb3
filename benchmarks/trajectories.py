"""Agent conversations to replay: recorded ones from a file, or synthetic ones from a seed.

A *turn* is the request that one assistant message answers: every message before it. A replay sends the turns of a
conversation one after another and goes on with the recorded answer, whatever the model said.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One agent's conversation in OpenAI's chat form, with the system prompt."""

    name: str
    messages: tuple[Mapping[str, Any], ...]

    @property
    def turns(self) -> list[int]:
        """How many messages the request of each turn has."""
        return [k for k, message in enumerate(self.messages) if k > 0 and message["role"] == "assistant"]

    def shortened(self, turns: int | None, tool_chars: int | None) -> Trajectory:
        """The first `turns` turns, of every tool message the first `tool_chars` characters."""
        messages = [_cut(message, tool_chars) for message in self.messages]
        if turns is not None and len(self.turns) > turns:
            messages = messages[: self.turns[turns - 1] + 1]
        return replace(self, messages=tuple(messages))


def _cut(message: Mapping[str, Any], tool_chars: int | None) -> Mapping[str, Any]:
    content = message.get("content")
    if tool_chars is None or message["role"] != "tool" or not isinstance(content, str):
        return message
    return {**message, "content": content[:tool_chars]}


def recorded(path: Path) -> list[Trajectory]:
    """JSON Lines, gzipped if the name ends in .gz: an object a line, with `messages` and an `id`.

    Raises ValueError that names the line at fault.
    """
    result = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                messages = tuple(record["messages"])
                roles = [message["role"] for message in messages]
                trajectory = Trajectory(str(record.get("id", number)), messages)
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                expected = 'expected an object such as {"id": "...", "messages": [{"role": ..., "content": ...}]}'
                raise ValueError(f"{path}, line {number}: {expected}, found {error!r}") from None
            if "assistant" in roles[1:]:
                result.append(trajectory)
    return result


def rolling_drop(messages: Messages, keep: int, every: int) -> dict[str, Any]:
    """The `cache` field of an agent that keeps its last `keep` tool messages and repositions after every `every`-th.

    Cumulative, as clients send it: the schedule of a longer conversation begins with that of a shorter one.
    """
    tools = [k for k, message in enumerate(messages) if message["role"] == "tool"]
    drop = {str(tools[i]): [tools[i - keep]] for i in range(keep, len(tools))}
    return {"drop": drop, "reposition": tools[every - 1 :: every]}


# -- synthetic conversations -----------------------------------------------------------------------------------------

_TEXT = (
    "the a this file module test function class returns value error line import path list string number case check "
    "fails passes expected found because when after before it is not in of to from with should would we need look at "
    "run again change fix option default parser token index result empty none true false raise handle call argument "
    "method object field name type base model query field set get make use see next first last same other only"
)
_WORDS = tuple(_TEXT.split())


def synthetic(count: int, turns: int, seed: int = 0) -> list[Trajectory]:
    """`count` agents of one make: they share their system prompt and tool, each works at a task of its own.

    Tool outputs are lognormal, as in recorded runs of coding agents: half of them under 100 tokens, a tenth over 630.
    """
    random = np.random.default_rng(seed)
    system = "You are an agent that mends code. You have one tool. " + prose(random, 400)
    return [
        Trajectory(f"synthetic-{seed}-{k}", tuple(_conversation(np.random.default_rng((seed, k)), system, turns)))
        for k in range(count)
    ]


def _conversation(random: np.random.Generator, system: str, turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Please mend this. " + prose(random, 150)},
    ]
    for turn in range(turns - 1):
        command = json.dumps({"command": f"cat src/{prose(random, 1)}.py | sed -n {turn},{random.integers(99)}p"})
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "bash", "arguments": command}}
        messages.append({"role": "assistant", "content": prose(random, 50), "tool_calls": [call]})
        size = min(3500, int(70 * np.exp(1.4 * random.standard_normal())) + 5)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": _listing(random, size)})
    messages.append({"role": "assistant", "content": prose(random, 50)})
    return messages


def prose(random: np.random.Generator, words: int) -> str:
    """That many words without sense."""
    return " ".join(random.choice(_WORDS, words).tolist())


def _listing(random: np.random.Generator, words: int) -> str:
    """Lines of a few words, as a tool prints them."""
    return "\n".join(f"{n:4d}  {prose(random, min(8, words - at))}" for n, at in enumerate(range(0, words, 8), 1))
