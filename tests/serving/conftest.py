"""Servers that tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import ModuleType

import jax
import pytest
import structlog

from akv_jax.async_engine import AsyncEngine
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel, load_model
from tests.serving.fake_engine import FakeEngine, endless
from tests.serving.running import Running, running, write_tiny_model


@pytest.fixture(autouse=True)
def _what_a_command_sets_for_its_process() -> Iterator[None]:
    """`serve.main` run in the tests' own process: its log would be written to a stream that pytest has closed."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)
    structlog.reset_defaults()
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(scope="session")
def litellm() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        # It would ask the network for prices.
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        module = pytest.importorskip("litellm")
    module.telemetry = False
    return module


@pytest.fixture(scope="session")
def _fake(model: LoadedModel) -> Iterator[tuple[Running, FakeEngine]]:
    engine = FakeEngine(model)
    with running(engine, keep_alive_seconds=0.2) as server:
        yield server, engine


@pytest.fixture
def fake(_fake: tuple[Running, FakeEngine]) -> Iterator[tuple[Running, FakeEngine]]:
    """A server whose engine does what `engine.script` says."""
    server, engine = _fake
    server.log.seek(0)
    server.log.truncate()
    engine.aborted = 0
    yield _fake
    engine.script, engine.ready = endless, True


@pytest.fixture(scope="session")
def tiny(model: LoadedModel) -> Iterator[Running]:
    """The real engine on a tiny random model: right in everything but sense."""
    config = EngineConfig(
        context_length=256,
        num_pages=1024,
        max_running_requests=4,
        chunked_prefill_size=64,
        max_list_entries=1 << 12,
        tile=16,
        token_buckets=(64,),
    )
    engine = AsyncEngine(lambda: Engine(model, config))
    engine.start()
    with running(engine, served_model_name="tiny-served") as server:
        engine.wait_ready()
        yield server


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """As `tiny`, with room for tools and for real clients' prompts, and a model that soon ends its replies."""
    folder = write_tiny_model(tmp_path_factory.mktemp("serving") / "roomy", soon_ends=True)
    config = EngineConfig(
        context_length=6144,
        num_pages=16384,
        max_running_requests=8,
        chunked_prefill_size=128,
        max_list_entries=1 << 16,
        token_buckets=(128,),
    )
    engine = AsyncEngine(lambda: Engine(load_model(folder, "float32", folder, progress=False), config))
    engine.start()
    with running(engine, served_model_name="roomy-served") as server:
        engine.wait_ready()
        yield server
