"""Looks over an engine's shoulder: what its steps did, and how full its pool was."""

from __future__ import annotations

import importlib
import time

from akv_jax.engine import Engine
from akv_jax.planning.plan import StepPlan
from akv_jax.runtime.runner import SamplingPlan, StepResult


class Recorder:
    """Takes the place of the engine's executor (DESIGN R6) and passes everything on to it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._executor = engine, engine.executor
        self.forwards = self.queries = self.copies = 0
        #: Most pages that running requests had at one time, leased and private: what can not be evicted.
        self.peak_pages = 0
        self.seconds = 0.0
        engine.executor = self

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """See `engine.Executor`."""
        start = time.perf_counter()
        result = self._executor.run(plan, sampling)
        self.seconds += time.perf_counter() - start
        self.forwards += 1
        self.queries += len(plan.tokens)
        self.copies += len(plan.moves.source)
        stats = self._engine.stats()
        self.peak_pages = max(self.peak_pages, stats.pages_leased + stats.pages_private)
        return result

    def evictions(self) -> dict[str, int]:
        """Pages evicted so far by class, as the cache counts them; nothing of a cache that does not count."""
        stats = getattr(self._engine.cache, "stats", None)
        if stats is None:
            return {}
        classes = importlib.import_module("akv_jax.cache.eviction").EvictionClass
        return {kind.name.lower(): count for kind, count in zip(classes, stats.evicted, strict=True)}
