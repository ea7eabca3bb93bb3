"""One request through the engine, as a route sees it: timed, counted, logged, and aborted when the client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from fastapi import Request as HttpRequest

from akv_jax.errors import RequestError
from akv_jax.request import Output, Request, TokenLogprob, Usage
from serving.errors import ClientDisconnected
from serving.request_log import Notes
from serving.state import Server

Result = TypeVar("Result")


@dataclass
class Record:
    """What is learnt of a request while it runs."""

    #: All three in seconds by the server's clock.
    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    output_tokens: int = 0
    finish: str | None = None
    usage: Usage | None = None


async def generate(server: Server, notes: Notes, request: Request, arrived: float) -> AsyncGenerator[Output, None]:
    """The engine's outputs, ending with the one that has a finish reason and the usage.

    `notes`: the request's line in the log is told what became of it. `arrived`: when the request's body was there,
    seconds by the server's clock; the measured times begin there.

    Raises:
        RequestError: refused, or cut off by a shutdown.
        Exception: the engine failed.
    """
    record = Record(arrived)
    try:
        async with aclosing(server.require_engine().generate(request)) as outputs:
            async for output in outputs:
                _note(server, record, output)
                yield output
    except (asyncio.CancelledError, GeneratorExit):
        record.finish = record.finish or "abort"
        raise
    except RequestError as error:
        record.finish = error.reason.value
        raise
    except BaseException:
        record.finish = "error"
        raise
    finally:
        _close(server, notes, request, record)


def _note(server: Server, record: Record, output: Output) -> None:
    now = server.clock()
    if output.token_ids:
        if record.last_token is None:
            record.first_token = now
            server.metrics.time_to_first_token.observe(now - record.arrived)
        else:
            count = len(output.token_ids)
            server.metrics.inter_token_latency.observe((now - record.last_token) / count, count)
        record.last_token = now
        record.output_tokens += len(output.token_ids)
    record.usage = output.usage or record.usage
    record.finish = output.finish_reason or record.finish


def _close(server: Server, notes: Notes, request: Request, record: Record) -> None:
    finished = record.usage is not None
    if finished:
        server.metrics.latency.observe(server.clock() - record.arrived)
        server.metrics.finished[record.finish or "none"] += 1
    usage = record.usage
    if usage is not None:
        notes.update(prompt=usage.prompt_tokens, computed=usage.computed_tokens, cached=usage.cached_tokens)
    notes.update(
        id=request.request_id,
        output=record.output_tokens,
        ttft=None if record.first_token is None else round(record.first_token - record.arrived, 3),
        finish=record.finish,
    )


@dataclass
class Completion:
    """All outputs of one request put together."""

    usage: Usage
    finish_reason: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    next_logits: np.ndarray | None


async def collect(server: Server, notes: Notes, request: Request, arrived: float) -> Completion:
    """Run `request` to its end. Raises what `generate` raises."""
    outputs = [output async for output in generate(server, notes, request, arrived)]
    last = outputs[-1]
    assert last.usage is not None and last.finish_reason is not None, "the engine's last output says how it ended"
    return Completion(
        usage=last.usage,
        finish_reason=last.finish_reason,
        text="".join(output.text for output in outputs),
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=[entry for output in outputs for entry in output.logprobs],
        next_logits=next((output.next_logits for output in outputs if output.next_logits is not None), None),
    )


async def unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """`work`'s result; if the client has hung up by then, `work` is cancelled. The body must have been read.

    Raises:
        ClientDisconnected: nobody waits for the result.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnection(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            raise ClientDisconnected
        return task.result()
    finally:
        # Both are over when this returns, so that the engine has been told before anything else happens.
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnection(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
