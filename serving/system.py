"""Routes about the server itself: alive, ready, metrics, the model list, and emptying the cache."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from serving.responses import answer
from serving.state import server_of

#: Routes that need no API key: probes and scrapers have none.
public = APIRouter(tags=["system"])
router = APIRouter(tags=["system"])


@public.get("/health")
async def health(request: HttpRequest) -> dict:
    """200 as soon as the process listens, also while the model loads. 503 once the engine has died: restart then."""
    server = server_of(request)
    if server.engine.failure is not None:
        server.require_engine()
    return {"status": "alive"}


@public.get("/ready")
async def ready(request: HttpRequest) -> dict:
    """503 while the model loads and warms up, then 200: send traffic only now."""
    server_of(request).require_engine()
    return {"status": "ready"}


@public.get("/metrics")
async def metrics(request: HttpRequest) -> Response:
    """Prometheus text. The engine's own numbers are there once it is ready."""
    server = server_of(request)
    stats = await server.engine.stats() if server.engine.ready else None
    return Response(server.metrics.render(stats), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models")
async def models(request: HttpRequest) -> Response:
    """The one model that is served, with its context length in positions (N of DESIGN A7)."""
    server = server_of(request)
    engine = server.require_engine()
    model = {
        "id": server.model_name,
        "object": "model",
        "created": server.started,
        "owned_by": "akv-jax",
        "root": engine.model.source,
        "max_model_len": engine.config.context_length,
    }
    return answer({"object": "list", "data": [model]})


@router.post("/flush_cache")
async def flush_cache(request: HttpRequest) -> Response:
    """Free every page that no running request holds; running requests go on undisturbed (DESIGN A8)."""
    engine = server_of(request).require_engine()
    return answer({"freed_pages": await engine.flush_cache()})
