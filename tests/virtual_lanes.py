"""Lanes and devices that take virtual time (DESIGN R6): what ends when is arithmetic, and the same in every run."""

from __future__ import annotations

import heapq
import itertools
from typing import Any, cast

import numpy as np

from akv_jax.config import EngineConfig
from akv_jax.planning.plan import StepPlan
from akv_jax.runtime.runner import SamplingPlan, StepResult


class VirtualLanes:
    """`runtime.lanes.Lanes` whose work takes as long as the devices say that do it; `now` is the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        #: Added to by devices while they work.
        self.spent = 0.0
        self._free: dict[str, float] = {}
        self._coming: list[Any] = []
        self._numbers = itertools.count()

    def clock(self) -> float:
        return self.now

    @property
    def pending(self) -> int:
        return len(self._coming)

    def start(self, lane: str, work: Any, then: Any) -> None:
        before = self.spent
        result = work()
        ready = max(self.now, self._free.get(lane, 0.0)) + self.spent - before
        self._free[lane] = ready
        heapq.heappush(self._coming, (ready, next(self._numbers), then, result))

    def wait(self) -> None:
        # Something may have ended while the host was busy.
        self.now = max(self.now, self._coming[0][0])
        while self._coming and self._coming[0][0] <= self.now:
            *_, then, result = heapq.heappop(self._coming)
            then(lambda result=result: result)


class _Compilations:
    total = 0


class VirtualDevice:
    """Stands where `runtime.runner.Runner` does. Seconds for each step, and for each of the three parts of a copy."""

    def __init__(self, config: EngineConfig, lanes: VirtualLanes, *, step: float, copy: float, bring: float) -> None:
        self._config, self._lanes = config, lanes
        self._step, self._copy, self._bring = step, copy, bring
        self.compilations = _Compilations()
        self.largest_bucket = config.chunked_prefill_size + config.max_running_requests

    def logit_rows(self, rows: int) -> int:
        return min(rows, self._config.max_running_requests)

    def list_capacity(self, rows: int) -> int:
        return rows * self._config.context_length

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """Token 0 for every row."""
        self._lanes.spent += self._step
        rows = len(plan.logit_rows)
        nothing = np.zeros((rows, 1), np.float32)
        tokens = np.zeros(rows, np.int32)
        return StepResult(tokens, nothing[:, 0], tokens[:, None], nothing, cast(Any, nothing))

    def copy_out(self, pages: np.ndarray) -> list[Any]:
        self._lanes.spent += self._copy
        return [len(pages)]

    def bring(self, blocks: list[Any]) -> list[Any]:
        self._lanes.spent += self._bring
        return blocks

    def copy_in(self, pages: np.ndarray, blocks: list[Any]) -> None:
        assert blocks == [len(pages)]
        self._lanes.spent += self._copy
