"""Servers that tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from akv_jax.models.load import LoadedModel
from tests.serving.fake_engine import FakeEngine, endless
from tests.serving.running import Running, running, tiny_model


@pytest.fixture(scope="session")
def model() -> LoadedModel:
    return tiny_model()


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
