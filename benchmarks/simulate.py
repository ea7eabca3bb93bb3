"""The engine without a device, on a virtual clock (DESIGN R6): the same scheduler, planner and cache, no model.

For conversations far longer than a CPU computes in reasonable time. Hit rates, pages, evictions and numbers of tokens
are those of a real engine whose steps take as long as the cost model says; seconds are the cost model's.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from akv_jax.chat.cache_field import CacheField, parse_cache_field
from akv_jax.chat.choose_template import ChatFormat
from akv_jax.chat.lowering import lower
from akv_jax.chat.messages import parse_messages
from akv_jax.chat.tokenise import TokenisedChat
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.errors import Reason, RequestError
from akv_jax.models.load import LoadedModel
from akv_jax.planning.plan import StepPlan
from akv_jax.request import Request, Sampling, Usage
from akv_jax.runtime.runner import SamplingPlan, StepResult
from benchmarks.recorder import Recorder
from benchmarks.replay import Outcome, RollingDrop, Turn, summary
from benchmarks.trajectories import Trajectory, rolling_drop


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step, of each of its queries, and of each copy that it makes."""

    step: float = 0.01
    query: float = 1e-4
    copy: float = 2e-6


class _Compilations:
    total = 0


class VirtualDevice:
    """Stands where `runtime.runner.Runner` does, and takes virtual time instead of computing."""

    def __init__(self, config: EngineConfig, costs: Costs) -> None:
        self._config, self._costs = config, costs
        self.compilations = _Compilations()
        self.largest_bucket = config.chunked_prefill_size + config.max_running_requests
        self.now = 0.0

    def logit_rows(self, rows: int) -> int:
        return min(rows, self._config.max_running_requests)

    def list_capacity(self, rows: int) -> int:
        return rows * self._config.context_length

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """Token 0 for every row."""
        costs = self._costs
        self.now += costs.step + costs.query * len(plan.tokens) + costs.copy * len(plan.moves.source)
        rows = len(plan.logit_rows)
        nothing = np.zeros((rows, 1), np.float32)
        tokens = np.zeros(rows, np.int32)
        return StepResult(tokens, nothing[:, 0], tokens[:, None], nothing, cast(Any, nothing))


class Conversation:
    """A trajectory tokenised once; the operations of each turn follow from it, for a prompt goes on where the one
    before it ended (DESIGN A5)."""

    def __init__(self, chat: ChatFormat, trajectory: Trajectory) -> None:
        """RequestError if the template cannot show a message."""
        self.messages = trajectory.messages
        self.turns = trajectory.turns
        self._whole = chat.tokenise(parse_messages(self.messages))

    @property
    def tokens(self) -> int:
        """Of the last turn's prompt."""
        return len(self.tokenised(self.turns[-1]).token_ids)

    def tokenised(self, count: int) -> TokenisedChat:
        """The first `count` messages and a generation prompt."""
        whole = self._whole
        end = whole.message_spans[count - 1][1]
        prompt = whole.token_ids[slice(*whole.generation_span)]
        ids = whole.token_ids[:end] + prompt
        return TokenisedChat(ids, whole.message_spans[:count], (end, len(ids)), whole.part_spans[:count])

    def request(self, count: int, edits: RollingDrop | None, name: str, max_tokens: int) -> Request:
        """What the server would make of that turn."""
        cache = CacheField()
        if edits is not None:
            cache = parse_cache_field({"cache": rolling_drop(self.messages[:count], edits.keep, edits.every)})
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return Request(name, lower(self.tokenised(count), cache, count), sampling)


@dataclass(slots=True)
class _Agent:
    conversation: Conversation
    think: random.Random
    next_turn: int = 0
    sent: float = 0.0
    first: float | None = None


class _Replay:
    """The event loop: agents send when they have thought, the engine steps while it has work."""

    def __init__(
        self,
        engine: Engine,
        device: VirtualDevice,
        agents: Sequence[Conversation],
        edits: RollingDrop | None,
        max_tokens: int,
        think_seconds: float,
    ) -> None:
        self._engine, self._device = engine, device
        self._edits, self._max_tokens, self._think_seconds = edits, max_tokens, think_seconds
        self._agents = [_Agent(agent, random.Random(number)) for number, agent in enumerate(agents)]
        self._due: list[tuple[float, int]] = []
        self._serving: dict[str, int] = {}
        for number in range(len(agents)):
            self._schedule(number)

    def run(self) -> Iterator[Turn | None]:
        """None is a turn that the engine refused, for it would not fit the pool."""
        while self._due or self._engine.busy:
            if not self._engine.busy:
                self._device.now = max(self._device.now, self._due[0][0])
            while self._due and self._due[0][0] <= self._device.now:
                if not self._send(*heapq.heappop(self._due)):
                    yield None
            for output in self._engine.step():
                number = self._serving[output.request_id]
                agent = self._agents[number]
                if output.error is not None:
                    raise output.error
                if agent.first is None:
                    agent.first = self._device.now - agent.sent
                if output.usage is not None:
                    yield _turn(agent.first, output.usage)
                    del self._serving[output.request_id]
                    self._schedule(number)

    def _schedule(self, number: int) -> None:
        agent = self._agents[number]
        if agent.next_turn < len(agent.conversation.turns):
            think = agent.think.expovariate(1 / self._think_seconds) if self._think_seconds else 0.0
            heapq.heappush(self._due, (self._device.now + think, number))

    def _send(self, when: float, number: int) -> bool:
        agent = self._agents[number]
        name = f"{number}-{agent.next_turn}"
        count = agent.conversation.turns[agent.next_turn]
        agent.next_turn, agent.sent, agent.first = agent.next_turn + 1, when, None
        try:
            self._engine.submit(agent.conversation.request(count, self._edits, name, self._max_tokens))
        except RequestError as error:
            if error.reason is not Reason.POOL_TOO_SMALL:
                raise
            self._schedule(number)
            return False
        self._serving[name] = number
        return True


def _turn(first: float, usage: Usage) -> Turn:
    return Turn(
        first_token=first,
        prompt=usage.prompt_tokens,
        computed=usage.computed_tokens,
        cached=usage.cached_tokens,
        rotated=usage.repos_tokens,
        drop_skipped=usage.drop_skipped_tokens,
        restored=usage.restored_tokens,
        completion=usage.completion_tokens,
    )


def simulate(
    model: LoadedModel,
    config: EngineConfig,
    agents: Sequence[Conversation],
    edits: RollingDrop | None,
    *,
    max_tokens: int,
    think_seconds: float = 0.0,
    costs: Costs = Costs(),
) -> Outcome:
    """As `replay.replay`, on a virtual clock. Of `model` only the vocabulary is used."""
    device = VirtualDevice(config, costs)
    engine = Engine(replace(model, params={}), config, runner=cast(Any, device), clock=lambda: device.now)
    recorder = Recorder(engine)
    turns = list(_Replay(engine, device, agents, edits, max_tokens, think_seconds).run())
    engine.check()
    stats = engine.stats()
    return summary(
        turns,
        device.now,
        evictions=stats.evicted_pages_total,
        preemptions=stats.preemptions_total,
        forwards=stats.forwards_total,
        copies=stats.copied_pages_total,
        peak_pages=recorder.peak_pages,
        pool=config.num_pages,
    )
