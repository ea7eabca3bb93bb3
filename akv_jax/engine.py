"""The engine: request → operations → match → plan → step → tokens (DESIGN §5), one direction, one thread."""

from __future__ import annotations

import functools
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from akv_jax.cache import persistence
from akv_jax.cache.base import KVCache
from akv_jax.cache.eviction import EvictionClass
from akv_jax.cache.inspection import TreeView, tree_view
from akv_jax.cache.naive import NaiveCache
from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import EngineConfig, ModelConfig
from akv_jax.errors import Reason, RequestError, invalid
from akv_jax.models.load import LoadedModel
from akv_jax.models.weights.digest import weights_digest
from akv_jax.planning.plan import StepPlan
from akv_jax.planning.planner import assemble
from akv_jax.planning.usage import classify, num_segments
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request, Usage
from akv_jax.runtime.generation import Generation, new_generation, sampling_plan, token_logprob
from akv_jax.runtime.placement import Placement
from akv_jax.runtime.runner import Progress, Runner, SamplingPlan, StepResult
from akv_jax.scheduler import Job, Schedule, Scheduler
from akv_jax.stats import Clock, EngineStats, Meter


class Executor(Protocol):
    """Runs plans (DESIGN R6): the device, or a simulation of it."""

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """One forward pass and one sampled token for each logit row of `plan`."""
        ...


@dataclass(slots=True)
class _Work:
    """A request from its acceptance to its end."""

    request: Request
    job: Job
    generation: Generation
    #: When it was accepted, seconds by the engine's clock.
    accepted: float
    usage: Usage | None = None
    next_logits: np.ndarray | None = None
    prompt_logits: dict[int, np.ndarray] | None = None


class Engine:
    """Accepts requests, runs steps, gives outputs. Not thread-safe: `async_engine.AsyncEngine` serialises the calls."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        cache: KVCache | None = None,
        runner: Runner | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`cache` keeps K and V between requests; by default a radix tree. `runner` may be one that is warm already
        and was made for the same model, pool and buckets. Everything that is timed is timed by `clock` (DESIGN R6)."""
        self.model, self.config = model, config
        self.runner = Runner(model.config, model.params, config) if runner is None else runner
        self.executor: Executor = self.runner
        self.pool = PagePool(config.num_pages)
        if cache is None:
            cache = _new_cache(config, self.pool)
        self.cache = cache
        self.scheduler = Scheduler(
            config,
            self.pool,
            self.cache,
            window=model.config.largest_window,
            list_capacity=self.runner.list_capacity(self.runner.largest_bucket),
            logit_rows=self.runner.logit_rows(self.runner.largest_bucket),
        )
        self._works: dict[str, _Work] = {}
        self._clock, self._meter = clock, Meter()

    # -- calls -------------------------------------------------------------------------------------------------------

    def warm_up(self, progress: Progress = lambda *_: None) -> None:
        """Compile everything; nothing compiles afterwards (DESIGN R3)."""
        self.runner.warm_up(progress)

    def submit(self, request: Request) -> None:
        """Accept a request. RequestError if it can never run, or not now."""
        if request.request_id in self._works:
            raise ValueError(f"request id {request.request_id!r} is in use")
        timeline = _timeline(request, self.model.config)
        room = self._room(timeline)
        seed = next(s for s in (request.sampling.seed, self.config.seed, secrets.randbits(63)) if s is not None)
        generation = new_generation(
            request.sampling,
            timeline.tokens[: timeline.count].copy(),
            seed,
            room,
            self.model.eos_token_ids,
            self.model.tokenizer,
        )
        job = self.scheduler.submit(request.request_id, timeline, request.cache_salt, request.logits_at)
        self._works[request.request_id] = _Work(request, job, generation, self._clock())
        self._meter.requests += 1
        self._meter.prompt_tokens += timeline.count

    def abort(self, request_id: str) -> None:
        """Stop a request, if it still runs, and give its pages back."""
        if request_id in self._works:
            self._meter.aborted += 1
            self.scheduler.finish(self._works.pop(request_id).job)

    def abort_all(self) -> None:
        """Stop everything, running or waiting; what was computed for it goes to the cache."""
        for request_id in list(self._works):
            self.abort(request_id)

    @property
    def placement(self) -> Placement:
        """Where it runs."""
        return self.runner.placement

    @property
    def busy(self) -> bool:
        return bool(self._works)

    def step(self) -> list[Output]:
        """One forward pass over whatever is due, and what it gave each request."""
        begun = self._clock()
        schedule = self.scheduler.schedule()
        self._note_starts(schedule, begun)
        outputs = [self._exhausted(job) for job in schedule.exhausted]
        if not schedule.parts:
            return outputs
        plan = assemble([part.placed for part in schedule.parts])
        sampling = sampling_plan(self._rows(schedule), self.model.config.vocab_size)
        planned = self._clock()
        result = self.executor.run(plan, sampling)
        self.scheduler.advance(schedule)
        outputs += self._outputs(schedule, result)
        self._meter.stepped(len(plan.tokens), planned - begun, self._clock() - begun)
        return outputs

    def flush_cache(self) -> int:
        """Free every unleased page (DESIGN A8); running requests go on. Returns how many pages."""
        return self.cache.flush()

    def cache_tree(self, max_nodes: int, max_depth: int) -> TreeView:
        """What the cache holds, as values (see `inspection.tree_view`); nothing where nothing is kept."""
        if not isinstance(self.cache, RadixCache):
            return TreeView((), 0, 0)
        return tree_view(self.cache, max_nodes=max_nodes, max_depth=max_depth)

    def save_cache(self, folder: Path) -> int:
        """Write what is cached to `folder`, in place of what it holds; returns how many pages.

        What running requests have of their own is left aside. OSError or StoredCacheError if it cannot be written.
        """
        assert isinstance(self.cache, RadixCache)
        tree, pages = self.cache.export()
        persistence.save(folder, self._identity, tree, self.runner.read_pages(pages))
        return len(pages)

    def load_cache(self, folder: Path) -> int:
        """Take over what `save_cache` wrote, or as much as the pool holds; returns how many pages.

        Only for an engine that nothing was submitted to. StoredCacheError, and nothing is cached, if what is there
        cannot be used.
        """
        assert isinstance(self.cache, RadixCache)
        with persistence.opened(folder, self._identity) as stored:
            if stored is None:
                return 0
            # On-read looks for birth versions alone (DESIGN C8).
            useful = stored.tree.num_slots if self.config.reposition == "copy" else stored.tree.num_births
            count = min(useful, self.pool.num_free)
            pages = self.pool.allocate(count)
            try:
                self.runner.write_pages(pages, stored.arrays(count))
                self.cache.restore(stored.tree.first(count), pages)
            except (persistence.StoredCacheError, ValueError) as error:
                self.pool.free(pages)
                raise persistence.StoredCacheError(str(error)) from None
        self.check()
        return count

    @functools.cached_property
    def _identity(self) -> persistence.Identity:
        model = self.model
        return persistence.Identity(model.config, weights_digest(model.params), self.config.dtype)

    def check(self) -> None:
        """C7: every page is exactly one of free, cached, private or scratch. PageError if not."""
        private = [job.sequence.private_pages() for job in self.scheduler.running if job.sequence is not None]
        self.pool.check(private, self.cache.cached_pages())
        self.cache.check()

    def stats(self) -> EngineStats:
        """A snapshot."""
        pages, leased, meter, cache = self.pool.counts(), self.cache.leased(), self._meter, self.cache.stats
        evicted = {kind.name.lower(): count for kind, count in zip(EvictionClass, cache.evicted, strict=True)}
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            pages_free=pages.free,
            pages_cached=pages.cached - leased,
            pages_leased=leased,
            pages_private=pages.private,
            derived_pages=cache.versions,
            tombstones=cache.tombstones,
            requests_total=meter.requests,
            requests_aborted_total=meter.aborted,
            prompt_tokens_total=meter.prompt_tokens,
            generation_tokens_total=meter.generation_tokens,
            forwards_total=meter.forwards,
            computed_tokens_total=meter.computed_tokens,
            restored_tokens_total=cache.restored,
            copied_pages_total=cache.rotations,
            derived_hops_total=cache.hops,
            evicted_pages_total={**evicted, "forgotten": cache.forgotten},
            preemptions_total=self.scheduler.preemptions,
            compilations_total=self.runner.compilations.total,
            prefix_cache_queries_total=meter.looked_up,
            prefix_cache_hits_exact_total=meter.hits_exact,
            prefix_cache_hits_rotated_total=meter.hits_rotated,
            prefix_cache_misses_total=meter.misses,
            drop_skipped_tokens_total=meter.drop_skipped,
            queue_time=meter.queue_time.snapshot(),
            plan_time=meter.plan_time.snapshot(),
            step_time=meter.step_time.snapshot(),
            step_tokens=meter.step_tokens.snapshot(),
            closure=meter.closure.snapshot(),
        )

    # -- parts of a step ---------------------------------------------------------------------------------------------

    def _room(self, timeline: Timeline) -> int:
        """How many tokens may come out; RequestError if the positions do not even allow the prompt (DESIGN A7)."""
        limit = self.config.context_length
        if timeline.largest_position + 1 > limit:
            raise RequestError(Reason.CONTEXT_LENGTH_EXCEEDED, context_length_message(limit, timeline), "messages")
        return limit - timeline.next_position

    def _note_starts(self, schedule: Schedule, now: float) -> None:
        """Measure the wait and the closure of requests whose first step this is, or first after a retraction."""
        for part in schedule.parts:
            job, sequence = part.job, part.job.sequence
            if sequence is None or sequence.forwards:
                continue
            self._meter.closure.observe(len(sequence.compute))
            if not (job.forwards or job.decoding):
                self._meter.queue_time.observe(now - self._works[job.job_id].accepted)

    def _rows(self, schedule: Schedule) -> list[Generation | None]:
        """Whose token each logit row of the step is; None for rows that are only looked at."""
        rows: list[Generation | None] = []
        for part in schedule.parts:
            assert part.job.sequence is not None
            last = part.job.sequence.remaining == len(part.chunk.indices)
            looked_at = len(part.placed.logits) - last
            rows += [None] * looked_at + [self._works[part.job.job_id].generation] * last
        return rows

    def _outputs(self, schedule: Schedule, result: StepResult) -> list[Output]:
        outputs, row = [], 0
        for part in schedule.parts:
            work = self._works[part.job.job_id]
            self._keep_logits(work, part.placed.indices[part.placed.logits], row, result)
            row += len(part.placed.logits)
            assert part.job.sequence is not None
            if part.job.sequence.remaining == 0:
                outputs.append(self._sampled(work, row - 1, result))
        return outputs

    def _keep_logits(self, work: _Work, indices: np.ndarray, row: int, result: StepResult) -> None:
        wanted = work.request.logits_at
        if work.job.decoding or not (wanted or work.request.return_logits):
            return
        work.prompt_logits = work.prompt_logits or {}
        for offset, index in enumerate(indices.tolist()):
            work.prompt_logits[index] = result.logits(row + offset)

    def _sampled(self, work: _Work, row: int, result: StepResult) -> Output:
        """The request's next token is in: tell the client, and end the request or make the token its next query."""
        job, generation, sampling = work.job, work.generation, work.request.sampling
        assert job.sequence is not None
        first = not job.decoding
        if first:
            job.decoding = True
            work.usage = _usage(job, self.model.config.largest_window)
            self._meter.answered(work.usage)
        token = int(result.tokens[row])
        text, reason = generation.push(token)
        self._meter.generation_tokens += 1
        output = Output(work.request.request_id, (token,), text, finish_reason=reason)
        if sampling.logprobs:
            logprob = token_logprob(
                sampling, token, float(result.logprobs[row]), result.top_ids[row], result.top_logprobs[row]
            )
            output = replace(output, logprobs=(logprob,))
        if first:
            output = replace(output, **self._first_logits(work))
        if reason is None:
            job.sequence.append(token)
            return output
        return self._ended(work, output)

    def _first_logits(self, work: _Work) -> dict[str, np.ndarray]:
        kept, work.prompt_logits = work.prompt_logits, None
        if kept is None:
            return {}
        logits = {"next_logits": kept[len(work.generation.prompt) - 1]} if work.request.return_logits else {}
        if work.request.logits_at:
            logits["prompt_logits"] = np.stack([kept[index] for index in work.request.logits_at])
        return logits

    def _ended(self, work: _Work, output: Output) -> Output:
        self.scheduler.finish(work.job)
        del self._works[work.request.request_id]
        assert work.usage is not None
        return replace(output, usage=replace(work.usage, completion_tokens=len(work.generation.tokens)))

    def _exhausted(self, job: Job) -> Output:
        """The pool cannot hold one token more of a request that has it to itself."""
        work = self._works[job.job_id]
        if work.usage is not None:
            tail = work.generation.stream.finish()
            return self._ended(work, Output(job.job_id, text=tail, finish_reason="length"))
        self.scheduler.finish(job)
        del self._works[job.job_id]
        message = f"the request needs more than the {self.config.num_pages} pages of the server's KV pool at one time"
        return Output(job.job_id, error=RequestError(Reason.POOL_TOO_SMALL, message))


def _new_cache(config: EngineConfig, pool: PagePool) -> KVCache:
    if config.disable_radix_cache:
        return NaiveCache()
    return RadixCache(pool, reposition=config.reposition, eviction=config.eviction)


def _timeline(request: Request, model: ModelConfig) -> Timeline:
    try:
        timeline = Timeline(request.operations)
    except ValueError as error:
        raise invalid(str(error), "operations") from None
    except OverflowError:
        raise invalid("a token id or a logical index is no number that any token can have", "operations") from None
    if timeline.count == 0:
        raise invalid("at least one token must be appended before anything can be generated", "operations")
    tokens = timeline.tokens[: timeline.count]
    if tokens.min() < 0 or tokens.max() >= model.vocab_size:
        raise invalid(f"token ids must be from 0 to {model.vocab_size - 1}", "operations")
    outside = [index for index in request.logits_at if not 0 <= index < timeline.count]
    if outside:
        raise invalid(f"logits of token {outside[0]} asked for, {timeline.count} tokens are appended", "logits_at")
    return timeline


def _usage(job: Job, window: int | None) -> Usage:
    """DESIGN A6, at the first output token."""
    sequence, timeline = job.sequence, job.timeline
    assert sequence is not None
    # Retracted attempts count: what they computed were queries of this request too.
    computed = np.union1d(job.queried, sequence.compute)
    made = None if sequence.versions is None else [*job.made, *sequence.made]
    kinds = classify(timeline, computed, window, made)
    return Usage(
        prompt_tokens=timeline.count,
        computed_tokens=kinds.computed,
        drop_skipped_tokens=kinds.drop_skipped,
        repos_tokens=kinds.repos,
        cached_tokens=kinds.cached,
        restored_tokens=job.restored or 0,
        active_tokens=timeline.active,
        next_position=timeline.next_position,
        segments=num_segments(timeline, computed),
        forwards=job.forwards + sequence.forwards,
    )


def context_length_message(limit: int, timeline: Timeline) -> str:
    """The text that the usual clients recognise as an overflow (DESIGN A7)."""
    return (
        f"This model's maximum context length is {limit} tokens. However, your request has "
        f"{timeline.largest_position + 1} tokens ({timeline.largest_position} positions in use at the fullest moment, "
        f"and one to generate), which exceeds the context window (context_length_exceeded). Please reduce the length "
        f"of the messages or completion."
    )
