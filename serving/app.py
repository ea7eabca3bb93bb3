"""The ASGI application: one factory, one shared state object, one router a topic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from structlog.typing import FilteringBoundLogger

from akv_jax.stats import Clock
from serving import cache_tree, chat, completions, sequence, system, tokens
from serving.errors import install_error_handlers
from serving.logging import create_logger
from serving.metrics import Metrics
from serving.security import require_api_key
from serving.settings import Settings
from serving.state import Server

if TYPE_CHECKING:
    from akv_jax.async_engine import AsyncEngine


def create_app(
    engine: AsyncEngine,
    settings: Settings,
    log: FilteringBoundLogger | None = None,
    clock: Clock = time.monotonic,
) -> FastAPI:
    """An application around `engine`, which the caller starts and which may still be loading: until it is ready,
    `/health` and `/metrics` answer and all the rest is a 503. When the server shuts down, the engine is stopped.
    Requests are timed by `clock`."""
    app = FastAPI(title="AKV-JAX", docs_url="/docs", redoc_url=None, lifespan=_stop_engine_at_the_end)
    app.state.server = Server(settings, log or create_logger(settings.log_level), Metrics(), engine, clock)
    install_error_handlers(app)
    app.include_router(system.public)
    for module in (chat, completions, sequence, tokens, system, cache_tree):
        app.include_router(module.router, dependencies=[Depends(require_api_key)])
    return app


@asynccontextmanager
async def _stop_engine_at_the_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    server: Server = app.state.server
    # Uvicorn has waited for the answers by now: what still runs has nobody to read it. Loading cannot be stopped.
    if server.engine.ready:
        await asyncio.to_thread(server.engine.stop)
