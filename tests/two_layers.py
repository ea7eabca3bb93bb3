"""The least model that shows everything, its specification, and a warm engine for each way to reposition."""

from __future__ import annotations

import functools
from typing import Any

from akv_jax.config import RepositionMode
from spec.model import Layer, Model, ModelConfig, random_params
from spec.rope import Rotary
from spec.varieties import tiny
from tests import shared_engines
from tests.tiny_engine import TinyEngine
from tests.watched_engine import Oracle

MODES: tuple[RepositionMode, ...] = ("on_read", "copy")
#: Positions, pages of the largest pool, requests at once and prompt tokens a step.
CONTEXT, PAGES, RUNNING, CHUNK = 64, 120, 8, 32


def model_config() -> ModelConfig:
    """Two layers, one with a window."""
    half = Rotary(dim=8, base=1_000.0)
    return tiny("two layers", Layer(half, window=5), Layer(half), hidden_size=16, num_heads=2, num_kv_heads=1)


@functools.cache
def params() -> Any:
    return random_params(model_config(), seed=7)


@functools.cache
def oracle() -> Oracle:
    return Oracle(Model.of(model_config(), params()))


@functools.cache
def warm(mode: RepositionMode) -> TinyEngine:
    return sized(mode, CONTEXT, PAGES, RUNNING, CHUNK)


def sized(mode: RepositionMode, context: int, pages: int, running: int, chunk: int) -> TinyEngine:
    """Positions, pages, requests at once and prompt tokens a step."""
    sizes = {"context_length": context, "num_pages": pages, "max_running_requests": running}
    chunks = {"chunked_prefill_size": chunk, "token_buckets": (chunk,)}
    return shared_engines.warm(model_config(), params(), **sizes, **chunks, reposition=mode)
