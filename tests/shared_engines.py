"""Warm tiny engines, compiled once for all the tests of a process."""

from __future__ import annotations

import functools
from typing import Any

from akv_jax.config import RepositionMode
from spec.model import Model, ModelConfig, random_params
from spec.varieties import varieties
from tests.tiny_engine import TinyEngine, quick_compiles

#: Positions, pages, requests at once and prompt tokens a step.
CONTEXT, PAGES, RUNNING, CHUNK = 128, 160, 16, 32


def config() -> ModelConfig:
    """One layer with a window among others without."""
    return varieties()["window_and_full"]


@functools.cache
def params() -> Any:
    return random_params(config(), seed=7)


@functools.cache
def oracle() -> Model:
    """The same model in the specification's float64."""
    return Model.of(config(), params())


def shared(mode: RepositionMode = "on_read") -> TinyEngine:
    """A warm one of that kind."""
    return _warm(mode)


@functools.cache
def _warm(mode: RepositionMode) -> TinyEngine:
    """On-read's executables have one row, for a lone decode, or 32; a second mode with both would only compile more."""
    sizes = {"context_length": CONTEXT, "num_pages": PAGES, "max_running_requests": RUNNING}
    buckets = (1, CHUNK) if mode == "on_read" else (CHUNK,)
    return warm(config(), params(), **sizes, chunked_prefill_size=CHUNK, token_buckets=buckets, reposition=mode)


def warm(config: ModelConfig, params: Any, **settings: Any) -> TinyEngine:
    """One of these `EngineConfig` settings, compiled as quickly as can be."""
    # What a GPU runs; the conformance tests run what a CPU does, layer by layer.
    tiny = TinyEngine(config, params, compile_unit="step", **settings)
    with quick_compiles():
        tiny.engine().warm_up()
    return tiny
