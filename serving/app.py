"""The ASGI application: one factory, one shared state object, one router a topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import Depends, FastAPI
from structlog.typing import FilteringBoundLogger

from serving import chat, sequence, system, tokens
from serving.errors import install_error_handlers
from serving.logging import create_logger
from serving.metrics import Metrics
from serving.security import require_api_key
from serving.settings import Settings
from serving.state import Server

if TYPE_CHECKING:
    from akv_jax.async_engine import AsyncEngine


def create_app(engine: AsyncEngine | None, settings: Settings, log: FilteringBoundLogger | None = None) -> FastAPI:
    """An application around `engine`, which the caller starts.

    None is a model that is still loading: `/health` answers, all the rest is a 503 until `attach_engine`. When the
    server shuts down, the engine is stopped, requests getting `settings.drain_seconds` to finish.
    """
    app = FastAPI(title="AKV-JAX", docs_url="/docs", redoc_url=None, lifespan=_stop_engine_at_the_end)
    metrics = Metrics(lambda: server.engine.stats() if server.engine is not None else None)
    server = Server(settings, log or create_logger(settings.log_level), metrics)
    if engine is not None:
        server.attach(engine)
    app.state.server = server
    install_error_handlers(app)
    app.include_router(system.public)
    for router in (chat.router, sequence.router, tokens.router, system.router):
        app.include_router(router, dependencies=[Depends(require_api_key)])
    return app


def attach_engine(app: FastAPI, engine: AsyncEngine) -> None:
    """Give the application the engine that it was created without."""
    app.state.server.attach(engine)


@asynccontextmanager
async def _stop_engine_at_the_end(app: FastAPI) -> AsyncIterator[None]:
    yield
    server: Server = app.state.server
    if server.engine is not None:
        await asyncio.to_thread(server.engine.stop, server.settings.drain_seconds)
