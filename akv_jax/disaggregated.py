"""An engine with prefill and decode apart: two sides, each with devices, pool and tree of its own (DESIGN R5).

A request is computed on the prefill side to its first token. Then the pages of exactly its active set move to the
decode side, as far as that has not got them, and it goes on there. When it ends, what the prefill side lacks of them,
usually what was generated, moves back to its tree, so that the next turn finds it. docs/disaggregation.md has the whole
way, who holds which pages when, and why nobody waits for ever.

Steps and copies run in lanes (`runtime/lanes.py`); this thread plans, and waits for whatever ends first.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from akv_jax.cache.inspection import TreeView
from akv_jax.config import Disaggregation, EngineConfig
from akv_jax.errors import Reason, RequestError
from akv_jax.models.load import LoadedModel
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request
from akv_jax.runtime.lanes import Lanes, ThreadLanes
from akv_jax.runtime.placement import Placement, model_mesh
from akv_jax.runtime.runner import Progress, Runner, StepResult
from akv_jax.runtime.transfer import Link
from akv_jax.scheduler import Job, Moving
from akv_jax.side import PlannedStep, Side, collect
from akv_jax.stats import Clock, EngineStats
from akv_jax.works import Works

PREFILL, DECODE = "prefill", "decode"
#: Pages that may be between the two pools at a time in either direction; a request with more of them moves alone.
MOST_IN_FLIGHT = 8192
#: Transfers of one request that may fail one after another before it ends with an error.
ATTEMPTS = 2

_log = structlog.get_logger(__name__)


def over_devices(
    model: LoadedModel, config: EngineConfig, split: Disaggregation, devices: Sequence[Any]
) -> DisaggregatedEngine:
    """An engine over the first of these devices, which must be enough. Each side has a pool of `config`'s size."""
    meshes = model_mesh(devices[: split.prefill]), model_mesh(devices[split.prefill : split.devices])
    # The decode side never has more than a query a request.
    configs = config, replace(config, chunked_prefill_size=1)
    prefill, decode = (
        Side(model, own, Runner(model.config, model.params, own, mesh))
        for own, mesh in zip(configs, meshes, strict=True)
    )
    return DisaggregatedEngine(model, prefill, decode)


class DisaggregatedEngine:
    """See `engine.ServingEngine`."""

    def __init__(
        self,
        model: LoadedModel,
        prefill: Side,
        decode: Side,
        lanes: Lanes | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Two sides for the same model and the same way to reposition. Everything is timed by `clock` (DESIGN R6)."""
        self.model, self.config = model, prefill.config
        self.prefill, self.decode = prefill, decode
        self._lanes: Lanes = ThreadLanes() if lanes is None else lanes
        self._clock = clock
        self._works = Works(model, prefill.config, clock)
        self._to_decode = Link(self._lanes, PREFILL, DECODE, lambda: (prefill.copier, decode.copier))
        self._to_prefill = Link(self._lanes, DECODE, PREFILL, lambda: (decode.copier, prefill.copier))
        #: The step that each side runs now.
        self._running: dict[str, PlannedStep] = {}
        #: How many transfers of a request have failed, one after another.
        self._failures: dict[Job, int] = {}
        self._outputs: list[Output] = []

    # -- calls -------------------------------------------------------------------------------------------------------

    def warm_up(self, progress: Progress = lambda *_: None) -> None:
        sides = ((PREFILL, self.prefill), (DECODE, self.decode))
        for number, (name, side) in enumerate(sides):

            def told(what: str, done: int, total: int, *, name: str = name, before: int = number) -> None:
                progress(f"{name}: {what}", before * total + done, len(sides) * total)

            side.runner.warm_up(told)
        for link in (self._to_decode, self._to_prefill):
            link.warm_up()

    def submit(self, request: Request, timeline: Timeline | None = None) -> None:
        def queue(timeline: Timeline, limit: int) -> Job:
            # A request of one token never gets to the decode side.
            if limit > 1 and timeline.active > self.decode.config.num_pages:
                raise RequestError(
                    Reason.POOL_TOO_SMALL,
                    f"the request generates with {timeline.active} tokens active, and the KV pool of the decode side "
                    f"holds {self.decode.config.num_pages}. Drop more, or start the server with a larger pool.",
                )
            return self.prefill.scheduler.submit(request.request_id, timeline, request.cache_salt, request.logits_at)

        self._works.accept(request, queue, timeline)

    def abort(self, request_id: str) -> None:
        """What a step or a transfer is busy with ends after that; the client is told no more from now on."""
        job = self._works.abort(request_id)
        if job is None or job.hold == "moving" or self._in_step(job):
            return
        if job in self.decode.scheduler.running:
            self._return(job)
        else:
            self._failures.pop(job, None)
            self.prefill.scheduler.finish(job)

    def abort_all(self) -> None:
        for request_id in self._works.ids():
            self.abort(request_id)
        while self._lanes.pending:
            self._lanes.wait()
        self._outputs.clear()

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.prefill.runner.placement, self.decode.runner.placement

    @property
    def busy(self) -> bool:
        return len(self._works) > 0 or self._lanes.pending > 0

    def step(self) -> list[Output]:
        """Start what can be started, then wait for whatever ends first; what has been sampled by then.

        The decode side comes first, and nothing here waits for one side in particular.
        """
        self._launch(DECODE, self.decode)
        if PREFILL not in self._running:
            # Before the next chunk: what is asked of the device while it runs one would come after it.
            self._hand_over()
            self._launch(PREFILL, self.prefill)
            # Where the decode side had all of it already.
            self._launch(DECODE, self.decode)
        if self._lanes.pending and not self._outputs:
            self._lanes.wait()
        elif not self._outputs and len(self._works):
            raise RuntimeError("requests wait, and nothing runs that they could wait for")
        outputs, self._outputs = self._outputs, []
        return outputs

    def flush_cache(self) -> int:
        return self.prefill.cache.flush() + self.decode.cache.flush()

    def cache_tree(self, max_nodes: int, max_depth: int) -> TreeView:
        """Of the prefill side, which is where the next turn is matched."""
        return self.prefill.tree(max_nodes, max_depth)

    def save_cache(self, folder: Path) -> int:
        """The prefill side's, which has what was generated too."""
        return self.prefill.save(folder)

    def load_cache(self, folder: Path) -> int:
        return self.prefill.load(folder)

    def check(self) -> None:
        self.prefill.check()
        self.decode.check()

    def stats(self) -> EngineStats:
        waiting = len(self.prefill.scheduler.waiting)
        return collect([self.prefill, self.decode], self._works, len(self._works) - waiting)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _in_step(self, job: Job) -> bool:
        return any(part.job is job for step in self._running.values() for part in step.schedule.parts)

    def _launch(self, name: str, side: Side) -> None:
        """Plan a step of a side that runs none, and start it."""
        if name in self._running:
            return
        begun = self._clock()
        schedule = side.scheduler.schedule()
        if side is self.prefill:
            self._works.note_starts(schedule, begun)
        else:
            # What it has lost is computed where prompts are.
            for job in side.scheduler.empty_queue():
                self.prefill.scheduler.requeue(job)
        for job in schedule.exhausted:
            self._outputs.append(self._works.exhausted(job, side.config.num_pages))
            self._end(side, job)
        if not schedule.parts:
            return
        step = self._running[name] = side.plan(schedule, self._works, begun, self._clock)
        run = functools.partial(side.executor.run, step.plan, step.sampling)
        self._lanes.start(name, run, functools.partial(self._ran, name, side, step))

    def _ran(self, name: str, side: Side, step: PlannedStep, result: Callable[[], StepResult]) -> None:
        """A side's step has run. Whatever went wrong on the device ends the engine, as it does with one side."""
        del self._running[name]
        sampled = result()
        side.scheduler.advance(step.schedule)
        gone = [part.job for part in step.schedule.parts if not self._works.living(part.job)]
        for job, output in self._works.outputs(step.schedule, sampled):
            self._outputs.append(output)
            if output.finish_reason is not None:
                self._end(side, job)
                continue
            assert job.sequence is not None
            job.sequence.append(output.token_ids[-1])
            if side is self.prefill and job.sequence.settled:
                job.hold = "parked"
        for job in gone:
            self._end(side, job)
        self._works.meter.stepped(len(step.plan.tokens), step.planned - step.begun, self._clock() - step.begun)

    def _end(self, side: Side, job: Job) -> None:
        """A request is over, and its job runs on that side and is not busy."""
        self._failures.pop(job, None)
        if side is self.decode:
            self._return(job)
        else:
            side.scheduler.finish(job)

    # -- transfers ---------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Move parked jobs to the decode side, the oldest first; none overtakes it."""
        parked = [job for job in self.prefill.scheduler.running if job.hold == "parked"]
        for job in sorted(parked, key=lambda j: j.arrival):
            assert job.sequence is not None
            held = job.sequence.active_set()
            if len(held) > self.decode.config.num_pages:
                self._outputs.append(self._works.exhausted(job, self.decode.config.num_pages))
                self._end(self.prefill, job)
                continue
            moving = self.decode.scheduler.receive(job, held, _most(self._to_decode))
            if moving is None:
                return
            job.hold = "moving"
            ended = functools.partial(self._handed_over, job, moving)
            self._to_decode.send(moving.source.pages, moving.target.pages, lambda: None, ended)

    def _handed_over(self, job: Job, moving: Moving, error: Exception | None) -> None:
        """The transfer of a prefill job's pages to a decode job has ended."""
        alive, failures = self._works.living(job), self._failures.pop(job, 0)
        if error is None:
            self._works.meter.pages_to_decode += len(moving.source)
            self.prefill.scheduler.finish(job)
            self.decode.scheduler.filled(moving.job)
            if alive:
                self._works.moved(job, moving.job)
            else:
                self._return(moving.job)
            return
        _log.warning("pages did not reach the decode side", request=job.job_id, pages=len(moving.source), error=error)
        self._works.meter.transfers_failed += 1
        self.decode.scheduler.finish(moving.job)
        if alive and failures + 1 < ATTEMPTS:
            self._failures[job] = failures + 1
            job.hold = "parked"
            return
        if alive:
            message = "the request's KV could not be moved to the devices that decode. Retry later."
            self._outputs.append(self._works.failed(job, RequestError(Reason.TRANSFER_FAILED, message)))
        self.prefill.scheduler.finish(job)

    def _return(self, job: Job) -> None:
        """A decode job is over: what the prefill side lacks of it moves back, if there is room, and is not missed if
        there is none. The client has its answer already, or has gone."""
        assert job.sequence is not None
        held = job.sequence.active_set()
        moving = self.prefill.scheduler.expect(job, held, _most(self._to_prefill))
        if moving is None:
            self.decode.scheduler.finish(job)
            return
        job.hold = "moving"
        copied_out = functools.partial(self.decode.scheduler.finish, job)
        ended = functools.partial(self._returned, moving)
        self._to_prefill.send(moving.source.pages, moving.target.pages, copied_out, ended)

    def _returned(self, moving: Moving, error: Exception | None) -> None:
        if error is None:
            self._works.meter.pages_to_prefill += len(moving.source)
            self.prefill.scheduler.arrived(moving)
            return
        _log.warning("pages did not get back", request=moving.job.job_id, pages=len(moving.source), error=error)
        self._works.meter.transfers_failed += 1
        self.prefill.scheduler.lost(moving)
        if moving.job.sequence is not None:
            self.decode.scheduler.finish(moving.job)


def _most(link: Link) -> int:
    """How many pages may be sent now: alone, a transfer may be of any size."""
    return MOST_IN_FLIGHT - link.in_flight if link.in_flight else sys.maxsize
