"""Server-sent events: `data: {json}` lines, keep-alive comments, an error event where an answer breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import anyio
import orjson
from fastapi import Request as HttpRequest
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from akv_jax.errors import RequestError
from serving.errors import request_error_object, unexpected_error_object
from serving.generation import unless_disconnected
from serving.request_log import Notes, notes_of
from serving.state import Server

DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def event_stream(server: Server, http: HttpRequest, chunks: AsyncGenerator[dict, None]) -> EventSourceResponse:
    """The chunks as an event stream, once the first one is there.

    A request that is refused is refused before its first chunk, so it still gets a proper status. Only where the first
    chunk takes longer than a keep-alive interval does the stream begin without it.
    """
    first = asyncio.ensure_future(anext(chunks))
    try:
        await unless_disconnected(http, asyncio.wait({first}, timeout=server.settings.keep_alive_seconds))
        if first.done():
            first.result()  # Raises what must become a status.
    except BaseException:
        await _close(first, chunks)
        raise
    return ChunkResponse(server, notes_of(http), first, chunks)


class ChunkResponse(EventSourceResponse):
    """The stream proper. However it ends, and even if it never begins, `chunks` is closed with it."""

    def __init__(
        self, server: Server, notes: Notes, first: asyncio.Future[dict], chunks: AsyncGenerator[dict, None]
    ) -> None:
        super().__init__(
            _events(notes, first, chunks),
            ping=server.settings.keep_alive_seconds,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
            # Without these two a stream would be cut at SIGTERM instead of drained.
            shutdown_event=anyio.Event(),
            # By then the engine has ended every request, with an error event where it had to be cut off.
            shutdown_grace_period=server.settings.drain_seconds + 4,
        )
        self._first = first
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with anyio.CancelScope(shield=True):
                await _close(self._first, self._chunks)


async def _close(first: asyncio.Future[dict], chunks: AsyncGenerator[dict, None]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await chunks.aclose()


async def _events(
    notes: Notes, first: asyncio.Future[dict], chunks: AsyncGenerator[dict, None]
) -> AsyncIterator[bytes]:
    try:
        yield event(await first)
        async for chunk in chunks:
            yield event(chunk)
        yield DONE
    except RequestError as error:
        yield event(request_error_object(error))
    except Exception as error:
        notes["exc_info"] = error
        yield event(unexpected_error_object())
