"""The engine: request → operations → match → plan → step → tokens (DESIGN §5), one direction, one thread."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

from akv_jax.cache.base import KVCache
from akv_jax.cache.inspection import TreeView
from akv_jax.config import EngineConfig
from akv_jax.models.load import LoadedModel
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request
from akv_jax.runtime.placement import Placement
from akv_jax.runtime.runner import Progress, Runner
from akv_jax.scheduler import Job
from akv_jax.side import Executor, Side, collect
from akv_jax.stats import Clock, EngineStats
from akv_jax.works import Works


class ServingEngine(Protocol):
    """What a server asks of an engine. Not thread-safe: `async_engine.AsyncEngine` serialises the calls."""

    model: LoadedModel
    config: EngineConfig

    def warm_up(self, progress: Progress = ...) -> None:
        """Compile everything; nothing compiles afterwards (DESIGN R3)."""
        ...

    def submit(self, request: Request, timeline: Timeline | None = None) -> None:
        """Accept a request. RequestError if it can never run, or not now. `timeline`: see `Works.accept`."""
        ...

    def abort(self, request_id: str) -> None:
        """Stop a request, if it still runs, and give its pages back."""
        ...

    def abort_all(self) -> None:
        """Stop everything, running or waiting; what was computed for it goes to the cache."""
        ...

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Where it runs; of two sides, prefill's first."""
        ...

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        ...

    def step(self) -> list[Output]:
        """Do what is due next, and tell what it gave each request."""
        ...

    def flush_cache(self) -> int:
        """Free every unleased page (DESIGN A8); running requests go on. Returns how many pages."""
        ...

    def cache_tree(self, max_nodes: int, max_depth: int) -> TreeView:
        """What the cache holds, as values (see `inspection.tree_view`); nothing where nothing is kept."""
        ...

    def save_cache(self, folder: Path) -> int:
        """Write what is cached to `folder` (see `Side.save`); returns how many pages."""
        ...

    def load_cache(self, folder: Path) -> int:
        """Take over what `save_cache` wrote (see `Side.load`); returns how many pages."""
        ...

    def check(self) -> None:
        """C7: every page is exactly one of free, cached, private or scratch. PageError if not."""
        ...

    def stats(self) -> EngineStats:
        """A snapshot."""
        ...


class Device(Executor, Protocol):
    """An executor that has to be made ready: `Runner`, or `multi_process.Leader`."""

    def warm_up(self, progress: Progress = ...) -> None:
        """Compile everything, and run it once."""
        ...


class Engine:
    """Accepts requests, runs steps, gives outputs: see `ServingEngine`."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        cache: KVCache | None = None,
        runner: Runner | None = None,
        device: Device | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`cache` keeps K and V between requests; by default a radix tree. `runner` may be one that is warm already
        and was made for the same model, pool and buckets; `device` runs plans in its place. Everything that is timed is
        timed by `clock` (DESIGN R6)."""
        self.model, self.config = model, config
        self.runner = Runner(model.config, model.params, config) if runner is None else runner
        self.side = Side(model, config, self.runner, cache)
        self.pool, self.cache, self.scheduler = self.side.pool, self.side.cache, self.side.scheduler
        self._device: Device = self.runner if device is None else device
        self.executor: Executor = self._device
        self._clock = clock
        self._works = Works(model, config, clock)

    def warm_up(self, progress: Progress = lambda *_: None) -> None:
        self._device.warm_up(progress)

    def submit(self, request: Request, timeline: Timeline | None = None) -> None:
        def queue(timeline: Timeline, limit: int) -> Job:
            return self.scheduler.submit(request.request_id, timeline, request.cache_salt, request.logits_at)

        self._works.accept(request, queue, timeline)

    def abort(self, request_id: str) -> None:
        job = self._works.abort(request_id)
        if job is not None:
            self.scheduler.finish(job)

    def abort_all(self) -> None:
        for request_id in self._works.ids():
            self.abort(request_id)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return (self.runner.placement,)

    @property
    def busy(self) -> bool:
        return len(self._works) > 0

    def step(self) -> list[Output]:
        """One forward pass over whatever is due, and what it gave each request."""
        begun = self._clock()
        schedule = self.scheduler.schedule()
        self._works.note_starts(schedule, begun)
        outputs = [self._exhausted(job) for job in schedule.exhausted]
        if not schedule.parts:
            return outputs
        step = self.side.plan(schedule, self._works, begun, self._clock)
        result = self.executor.run(step.plan, step.sampling)
        self.scheduler.advance(schedule)
        for job, output in self._works.outputs(schedule, result):
            outputs.append(output)
            self._go_on(job, output)
        self._works.meter.stepped(len(step.plan.tokens), step.planned - begun, self._clock() - begun)
        return outputs

    def _go_on(self, job: Job, output: Output) -> None:
        """A sampled token is the request's next query, unless it was the last."""
        if output.finish_reason is not None:
            self.scheduler.finish(job)
            return
        assert job.sequence is not None
        job.sequence.append(output.token_ids[-1])

    def _exhausted(self, job: Job) -> Output:
        self.scheduler.finish(job)
        return self._works.exhausted(job, self.config.num_pages)

    def flush_cache(self) -> int:
        return self.cache.flush()

    def cache_tree(self, max_nodes: int, max_depth: int) -> TreeView:
        return self.side.tree(max_nodes, max_depth)

    def save_cache(self, folder: Path) -> int:
        return self.side.save(folder)

    def load_cache(self, folder: Path) -> int:
        return self.side.load(folder)

    def check(self) -> None:
        self.side.check()

    def stats(self) -> EngineStats:
        return collect([self.side], self._works, len(self.scheduler.running))
