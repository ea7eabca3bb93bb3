"""A stand-in for the engine that does as a test tells it: for refusals, crashes and hang-ups alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, fields

from akv_jax.config import EngineConfig
from akv_jax.request import Output, Request, Usage
from akv_jax.stats import Distribution, EngineStats

Script = Callable[[Request], AsyncGenerator[Output, None]]

USAGE = Usage(
    prompt_tokens=10,
    computed_tokens=4,
    drop_skipped_tokens=3,
    repos_tokens=2,
    cached_tokens=1,
    restored_tokens=1,
    active_tokens=7,
    next_position=8,
    segments=2,
    forwards=1,
    completion_tokens=2,
)


async def endless(request: Request) -> AsyncGenerator[Output, None]:
    """Tokens for as long as anybody listens."""
    while True:
        await asyncio.sleep(0.01)
        yield Output(request.request_id, (65,), "A")


async def silent(request: Request) -> AsyncGenerator[Output, None]:
    """A prefill that takes for ever."""
    await asyncio.sleep(3600)
    yield Output(request.request_id)


def failing(error: Exception, after: int = 0) -> Script:
    """Raises `error` after so many tokens."""

    async def script(request: Request) -> AsyncGenerator[Output, None]:
        for _ in range(after):
            yield Output(request.request_id, (65,), "A")
        raise error

    return script


@dataclass
class FakeEngine:
    model: object
    script: Script = endless
    config: EngineConfig = field(default_factory=lambda: EngineConfig(context_length=128, num_pages=256))
    ready: bool = True
    failure: Exception | None = None
    running: int = 0
    aborted: int = 0
    stopped: bool = False

    def start(self) -> None: ...

    def stop(self, drain_seconds: float = 0.0) -> None:
        self.stopped = True

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        self.running += 1
        finished = False
        outputs = self.script(request)
        try:
            async for output in outputs:
                finished = output.usage is not None
                yield output
        finally:
            await outputs.aclose()
            self.running -= 1
            self.aborted += not finished

    async def stats(self) -> EngineStats:
        told = {
            "num_running": self.running,
            "pages_free": 250,
            "pages_cached": 3,
            "pages_leased": 2,
            "pages_private": 1,
            "requests_aborted_total": self.aborted,
            "evicted_pages_total": {},
        }
        nothing = {f.name: 0 if f.type == "int" else Distribution((), (0,), 0.0) for f in fields(EngineStats)}
        return EngineStats(**{**nothing, **told})

    async def flush_cache(self) -> int:
        return 3
