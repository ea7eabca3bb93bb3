"""Looks over an engine's shoulder for what its statistics do not keep."""

from __future__ import annotations

import time

from akv_jax.engine import Engine
from akv_jax.planning.plan import StepPlan
from akv_jax.runtime.runner import SamplingPlan, StepResult


class Recorder:
    """Takes the place of the engine's executor (DESIGN R6) and passes everything on to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._executor = engine, engine.executor
        #: Most pages that running requests had at one time, leased and private: what can not be evicted.
        self.peak_pages = 0
        #: In the executor.
        self.seconds = 0.0
        engine.executor = self

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """See `engine.Executor`."""
        start = time.perf_counter()
        result = self._executor.run(plan, sampling)
        self.seconds += time.perf_counter() - start
        stats = self._engine.stats()
        self.peak_pages = max(self.peak_pages, stats.pages_leased + stats.pages_private)
        return result
