"""`--cache-dir`: what is cached when a server stops is there when it starts again.

Nothing here is worth a failure: what cannot be used or written is logged, and the server starts, or ends, without it.
"""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from akv_jax.cache.persistence import StoredCacheError
from akv_jax.engine import ServingEngine

_log = structlog.get_logger(__name__)


def load(engine: ServingEngine, folder: Path) -> None:
    """Before the engine serves: take over what is stored, if it is this model's and whole."""
    start = time.perf_counter()
    try:
        pages = engine.load_cache(folder)
    except StoredCacheError as error:
        _log.warning("stored KV cache refused, starting with none", reason=str(error))
    else:
        _log.info("KV cache loaded", pages=pages, seconds=round(time.perf_counter() - start, 2), folder=str(folder))


def save(engine: ServingEngine, folder: Path) -> None:
    """After a clean stop: store what is cached."""
    start = time.perf_counter()
    try:
        pages = engine.save_cache(folder)
    except (OSError, StoredCacheError) as error:
        _log.error("KV cache not stored, what was stored before stays", reason=str(error))
    else:
        _log.info("KV cache stored", pages=pages, seconds=round(time.perf_counter() - start, 2), folder=str(folder))
