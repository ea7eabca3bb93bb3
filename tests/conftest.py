"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from akv_jax.models.load import LoadedModel, load_model
from akv_jax.models.weights.errors import ModelError


@pytest.fixture(scope="session")
def model_cache() -> Path:
    """Where the server keeps the default model too, so that tests and `make serve` fetch it once."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "akv-jax" / "models"


@pytest.fixture(scope="session")
def smollm2(model_cache: Path) -> LoadedModel:
    """SmolLM2-135M-Instruct in float32; skips where it cannot be had."""
    try:
        return load_model(None, "float32", model_cache, progress=False)
    except ModelError as error:
        pytest.skip(f"no default model: {error}")
