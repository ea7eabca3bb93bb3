"""Run one request of an ASGI application without a socket, and take its messages as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Scope

#: Seconds that the application has to notice that nobody listens any more, before it is cancelled.
HANG_UP_SECONDS = 5.0


async def messages_of(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """What `app` sends. Closing the iterator is to the application what a client that hangs up is.

    Raises what `app` raises.
    """
    outbox: asyncio.Queue[Message | None] = asyncio.Queue()
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    hung_up = asyncio.Event()

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        outbox.put_nowait(message)

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: outbox.put_nowait(None))
    try:
        while (message := await outbox.get()) is not None:
            yield message
        task.result()
    finally:
        hung_up.set()
        await asyncio.wait({task}, timeout=HANG_UP_SECONDS)
        task.cancel()
