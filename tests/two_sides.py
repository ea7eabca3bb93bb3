"""Prefill and decode apart on the least model: what is in flight ends in an order that a test chooses.

Tokens are forced, so that every row of logits is the specification's of a known history, on whichever side it is
computed. After every step both sides' pages and leases must add up (DESIGN C7).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from akv_jax.config import RepositionMode
from akv_jax.disaggregated import DisaggregatedEngine
from akv_jax.errors import Reason, RequestError
from akv_jax.planning.plan import StepPlan
from akv_jax.request import Output, Request, Sampling, Usage
from akv_jax.runtime.runner import Runner, SamplingPlan, StepResult
from akv_jax.scheduler import Schedule
from akv_jax.side import Side
from spec.operations import Append, History
from tests.two_layers import warm
from tests.watched_engine import Oracle, close

#: Chooses which of these lanes, sorted by name, gets to the end of what it does next.
Choice = Callable[[Sequence[str]], str]


class ChosenLanes:
    """`runtime.lanes.Lanes` in one thread: a lane's first piece of work is done when it is chosen to end."""

    def __init__(self, choose: Choice = lambda lanes: lanes[0]) -> None:
        self.choose = choose
        self.lanes: dict[str, list[tuple[Any, Any]]] = {}

    @property
    def pending(self) -> int:
        return sum(map(len, self.lanes.values()))

    def start(self, lane: str, work: Any, then: Any) -> None:
        self.lanes.setdefault(lane, []).append((work, then))

    def wait(self) -> None:
        lane = self.choose(sorted(name for name, works in self.lanes.items() if works))
        work, then = self.lanes[lane].pop(0)
        then(work)


def twin(runner: Runner) -> Runner:
    """Another runner with the same executables and a pool of its own, in which nothing is zero."""
    # Compiled once for all of them.
    assert runner.page_blocks is not None
    other = copy.copy(runner)
    pages = np.arange(1, runner.config.num_pages + 1, dtype=np.int32)
    other._pool = runner._empty_pool()
    other.write_pages(pages, [(name, np.full_like(rows, 100.0)) for name, rows in other.read_pages(pages)])
    return other


class Copier:
    """Passes on to a runner, counts, and fails when it is told to."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        #: How often each call fails from now on.
        self.failures = {"copy_out": 0, "bring": 0, "copy_in": 0}
        #: How often each has failed.
        self.failed = dict.fromkeys(self.failures, 0)
        #: Pages of each call of `copy_in`.
        self.written: list[np.ndarray] = []

    def _perhaps_fail(self, call: str) -> None:
        if self.failures[call]:
            self.failures[call] -= 1
            self.failed[call] += 1
            raise RuntimeError(f"{call} fails because a test says so")

    def copy_out(self, pages: np.ndarray) -> Any:
        self._perhaps_fail("copy_out")
        return self._runner.copy_out(pages)

    def bring(self, blocks: Any) -> Any:
        self._perhaps_fail("bring")
        return self._runner.bring(blocks)

    def copy_in(self, pages: np.ndarray, blocks: Any) -> None:
        self._perhaps_fail("copy_in")
        self._runner.copy_in(pages, blocks)
        self.written.append(pages)


@dataclass(eq=False)
class Asked:
    """One request as its sender sees it."""

    request: Request
    forced: tuple[int, ...]
    #: Of each token sampled so far.
    logits: list[np.ndarray] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    #: "finished", "aborted", "refused" or "failed".
    end: str | None = None

    @property
    def usage(self) -> Usage:
        usage = self.outputs[-1].usage
        assert usage is not None
        return usage

    @property
    def whole(self) -> History:
        """The history with all that it was made to say: what the next turn begins with."""
        return (*self.request.operations, Append(self.forced[: len(self.logits)]))


class _Forcing:
    """The executor of one side: forced tokens in place of sampled ones."""

    def __init__(self, side: Side, sides: TwoSides) -> None:
        self._runner, self._sides = side.runner, sides
        self._schedule = Schedule()
        self._inner = side.scheduler.schedule
        side.scheduler.schedule = self._seen  # type: ignore[method-assign]

    def _seen(self) -> Schedule:
        self._schedule = self._inner()
        return self._schedule

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        result, row = self._runner.run(plan, sampling), 0
        tokens = np.array(result.tokens)
        for part in self._schedule.parts:
            row += len(part.placed.logits)
            assert part.job.sequence is not None
            asked = self._sides.asked[part.job.job_id]
            if part.job.sequence.remaining == len(part.chunk.indices) and asked.end != "aborted":
                tokens[row - 1] = asked.forced[len(asked.logits)]
                asked.logits.append(result.logits(row - 1))
        return dataclasses.replace(result, tokens=tokens)


class TwoSides:
    """Call `ask`, `step` and `abort`; AssertionError says what is wrong, and `drain` that all came to an end."""

    def __init__(
        self,
        mode: RepositionMode = "on_read",
        oracle: Oracle | None = None,
        choose: Choice = lambda lanes: lanes[0],
        *,
        prefill_pages: int = 120,
        decode_pages: int = 120,
        **settings: Any,
    ) -> None:
        """Without an oracle everything is checked but logits. `settings` are both sides'."""
        tiny, self.oracle = warm(mode), oracle
        self.lanes = ChosenLanes(choose)
        config = dataclasses.replace(tiny.settings, **settings)
        sides = [
            Side(tiny.model, dataclasses.replace(config, num_pages=pages), twin(tiny.runner))
            for pages in (prefill_pages, decode_pages)
        ]
        self.engine = DisaggregatedEngine(tiny.model, *sides, lanes=self.lanes)
        self.prefill, self.decode = sides
        self.copiers = [Copier(side.runner) for side in sides]
        for side, copier in zip(sides, self.copiers, strict=True):
            side.executor, side.copier = _Forcing(side, self), copier
        self.asked: dict[str, Asked] = {}

    @property
    def live(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if asked.end is None]

    def ask(self, history: History, forced: tuple[int, ...] = (0,), *, salt: str = "") -> Asked:
        """Send a request that will sample `forced`."""
        name = f"r{len(self.asked)}"
        sampling = Sampling(max_tokens=len(forced), temperature=0.0, ignore_eos=True)
        asked = self.asked[name] = Asked(Request(name, history, sampling, salt), forced)
        before = self.engine.stats()
        try:
            self.engine.submit(asked.request)
        except RequestError as error:
            asked.end = "refused"
            assert error.reason in (Reason.POOL_TOO_SMALL, Reason.CONTEXT_LENGTH_EXCEEDED)
            assert self.engine.stats() == before
        self.engine.check()
        return asked

    def abort(self, asked: Asked) -> None:
        """The client hangs up."""
        self.engine.abort(asked.request.request_id)
        asked.end = "aborted"
        self.engine.check()

    def step(self) -> list[Output]:
        """One step of the engine; everything that comes out is checked."""
        outputs = self.engine.step()
        self.engine.check()
        for output in outputs:
            asked = self.asked[output.request_id]
            assert asked.end is None, "somebody is told more after the end"
            asked.outputs.append(output)
            if output.error is not None:
                asked.end = "failed"
                continue
            if output.token_ids:
                self._check_token(asked, output)
            if output.finish_reason is not None:
                asked.end = "finished"
        return outputs

    def _check_token(self, asked: Asked, output: Output) -> None:
        said = sum(len(told.token_ids) for told in asked.outputs)
        assert output.token_ids == asked.forced[said - 1 : said]
        if self.oracle is not None:
            before = (*asked.request.operations, Append(asked.forced[: said - 1]))
            close(asked.logits[said - 1], self.oracle.logits(before)[-1])

    def drain(self, steps: int = 20_000) -> None:
        """Run until all are served and all has been moved."""
        while self.engine.busy:
            self.step()
            steps -= 1
            assert steps, "the engine does not come to an end"
        assert not self.live

    def end(self) -> None:
        """All come to their end, nobody holds anything, and both pools are whole."""
        self.drain()
        for side in (self.prefill, self.decode):
            assert side.cache.leased() == 0 and not side.scheduler.running and not side.scheduler.waiting
        self.engine.flush_cache()
        for side in (self.prefill, self.decode):
            assert side.pool.num_free == side.config.num_pages
