"""Accepted requests from acceptance to end: how their tokens are sampled, and what their clients are told (A6, R7).

Of devices, pages and queues nothing is known here: an engine says which step has run, and ends what is over.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from akv_jax.config import EngineConfig, ModelConfig
from akv_jax.errors import Reason, RequestError, invalid
from akv_jax.models.load import LoadedModel
from akv_jax.planning.usage import classify, num_segments
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request, Usage
from akv_jax.runtime.generation import Generation, new_generation, sampling_plan, token_logprob
from akv_jax.runtime.runner import SamplingPlan, StepResult
from akv_jax.scheduler import Job, Schedule
from akv_jax.stats import Clock, Meter

#: Queues a request: its timeline, and how many tokens it may generate. RequestError if it can never run, or not now.
Queue = Callable[[Timeline, int], Job]


@dataclass(slots=True)
class Work:
    """A request from its acceptance to its end."""

    request: Request
    job: Job
    generation: Generation
    #: When it was accepted, seconds by the engine's clock.
    accepted: float
    usage: Usage | None = None
    prompt_logits: dict[int, np.ndarray] | None = None


class Works:
    """The requests that have not ended, by id, and what is counted of all that ever were."""

    def __init__(self, model: LoadedModel, config: EngineConfig, clock: Clock) -> None:
        """Of `config` the context length and the seed are used."""
        self.meter = Meter()
        self._model, self._config, self._clock = model, config, clock
        self._works: dict[str, Work] = {}

    def __len__(self) -> int:
        return len(self._works)

    def ids(self) -> list[str]:
        """Of all requests, the oldest first."""
        return list(self._works)

    def accept(self, request: Request, queue: Queue, timeline: Timeline | None = None) -> None:
        """Take a request in, once `queue` has. RequestError if it can never run, or not now.

        `timeline` is what `compile_history` makes of it, if somebody has done that already.
        """
        if request.request_id in self._works:
            raise ValueError(f"request id {request.request_id!r} is in use")
        timeline = compile_history(request, self._model.config) if timeline is None else timeline
        room = self._room(timeline)
        seed = next(s for s in (request.sampling.seed, self._config.seed, secrets.randbits(63)) if s is not None)
        generation = new_generation(
            request.sampling,
            timeline.tokens[: timeline.count].copy(),
            seed,
            room,
            self._model.eos_token_ids,
            self._model.tokenizer,
        )
        job = queue(timeline, generation.limit)
        self._works[request.request_id] = Work(request, job, generation, self._clock())
        self.meter.requests += 1
        self.meter.prompt_tokens += timeline.count

    def abort(self, request_id: str) -> Job | None:
        """The client has gone, and is told no more. Returns the job, which is to be ended; None if there is none."""
        work = self._works.pop(request_id, None)
        if work is None:
            return None
        self.meter.aborted += 1
        return work.job

    def moved(self, job: Job, to: Job) -> None:
        """From now on another side's job stands for the request."""
        self._works[job.job_id].job = to

    def living(self, job: Job) -> bool:
        """Whether somebody still waits for what this job computes."""
        work = self._works.get(job.job_id)
        return work is not None and work.job is job

    def note_starts(self, schedule: Schedule, now: float) -> None:
        """Measure the wait and the closure of requests whose first step this is, or first after a retraction."""
        for part in schedule.parts:
            job, sequence = part.job, part.job.sequence
            if sequence is None or sequence.forwards:
                continue
            self.meter.closure.observe(len(sequence.compute))
            if not (job.forwards or job.decoding):
                self.meter.queue_time.observe(now - self._works[job.job_id].accepted)

    def sampling(self, schedule: Schedule) -> SamplingPlan:
        """How each logit row of the step is sampled; of most rows but the last of a prompt it is only looked at."""
        rows: list[Generation | None] = []
        for part in schedule.parts:
            assert part.job.sequence is not None
            last = part.job.sequence.remaining == len(part.chunk.indices)
            looked_at = len(part.placed.logits) - last
            rows += [None] * looked_at + [self._works[part.job.job_id].generation] * last
        return sampling_plan(rows, self._model.config.vocab_size)

    def outputs(self, schedule: Schedule, result: StepResult) -> list[tuple[Job, Output]]:
        """What the step, which has run, gave each request that somebody waits for; those with a finish reason end."""
        outputs, row = [], 0
        for part in schedule.parts:
            end = row + len(part.placed.logits)
            if self.living(part.job):
                work = self._works[part.job.job_id]
                self._keep_logits(work, part.placed.indices[part.placed.logits], row, result)
                assert part.job.sequence is not None
                if part.job.sequence.remaining == 0:
                    outputs.append((part.job, self._sampled(work, end - 1, result)))
            row = end
        return outputs

    def exhausted(self, job: Job, num_pages: int) -> Output:
        """The pool of so many pages cannot hold one token more of a request that has it to itself: that is its end."""
        work = self._works[job.job_id]
        if work.usage is not None:
            tail = work.generation.stream.finish()
            return self._ended(work, Output(job.job_id, text=tail, finish_reason="length"))
        message = f"the request needs more than the {num_pages} pages of the server's KV pool at one time"
        return self.failed(job, RequestError(Reason.POOL_TOO_SMALL, message))

    def failed(self, job: Job, error: RequestError) -> Output:
        """The request ends with an error."""
        del self._works[job.job_id]
        return Output(job.job_id, error=error)

    # -- parts of these ----------------------------------------------------------------------------------------------

    def _room(self, timeline: Timeline) -> int:
        """How many tokens may come out; RequestError if the positions do not even allow the prompt (DESIGN A7)."""
        limit = self._config.context_length
        if timeline.largest_position + 1 > limit:
            raise RequestError(Reason.CONTEXT_LENGTH_EXCEEDED, context_length_message(limit, timeline), "messages")
        return limit - timeline.next_position

    def _keep_logits(self, work: Work, indices: np.ndarray, row: int, result: StepResult) -> None:
        wanted = work.request.logits_at
        if work.job.decoding or not (wanted or work.request.return_logits):
            return
        work.prompt_logits = work.prompt_logits or {}
        for offset, index in enumerate(indices.tolist()):
            work.prompt_logits[index] = result.logits(row + offset)

    def _sampled(self, work: Work, row: int, result: StepResult) -> Output:
        """The request's next token is in."""
        job, generation, sampling = work.job, work.generation, work.request.sampling
        first = not job.decoding
        if first:
            job.decoding = True
            work.usage = _usage(job, self._model.config.largest_window)
            self.meter.answered(work.usage)
        token = int(result.tokens[row])
        text, reason = generation.push(token)
        self.meter.generation_tokens += 1
        output = Output(work.request.request_id, (token,), text, finish_reason=reason)
        if sampling.logprobs:
            logprob = token_logprob(
                sampling, token, float(result.logprobs[row]), result.top_ids[row], result.top_logprobs[row]
            )
            output = replace(output, logprobs=(logprob,))
        if first:
            output = replace(output, **self._first_logits(work))
        return output if reason is None else self._ended(work, output)

    def _first_logits(self, work: Work) -> dict[str, np.ndarray]:
        kept, work.prompt_logits = work.prompt_logits, None
        if kept is None:
            return {}
        logits = {"next_logits": kept[len(work.generation.prompt) - 1]} if work.request.return_logits else {}
        if work.request.logits_at:
            logits["prompt_logits"] = np.stack([kept[index] for index in work.request.logits_at])
        return logits

    def _ended(self, work: Work, output: Output) -> Output:
        del self._works[work.request.request_id]
        assert work.usage is not None
        return replace(output, usage=replace(work.usage, completion_tokens=len(work.generation.tokens)))


def compile_history(request: Request, model: ModelConfig) -> Timeline:
    """Its operations as arrays. RequestError if they are no history, or not one of this model's tokens."""
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
