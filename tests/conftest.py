"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from akv_jax.config import EngineConfig
from akv_jax.models.load import LoadedModel, load_model
from akv_jax.models.weights.errors import ModelError
from akv_jax.runtime.runner import Runner
from tests.serving.running import write_tiny_model


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


@pytest.fixture(scope="session")
def smollm2_runner(smollm2: LoadedModel) -> Runner:
    """For `Engine(smollm2, smollm2_runner.config, runner=smollm2_runner)`, one engine at a time.

    Compiling takes long, so there is one bucket only, of 128 rows, all of which may have their logits looked at; and
    nothing is compiled before it is used.
    """
    config = EngineConfig(
        context_length=2048,
        num_pages=2048,
        max_running_requests=128,
        chunked_prefill_size=128,
        max_list_entries=1 << 15,
        token_buckets=(128,),
    )
    return Runner(smollm2.config, smollm2.params, config)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer and a chat template, as Hugging Face has them."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def model(tiny_directory: Path) -> LoadedModel:
    """The same, loaded."""
    return load_model(tiny_directory, "float32", tiny_directory, progress=False)
