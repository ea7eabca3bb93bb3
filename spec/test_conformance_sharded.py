"""The engine over several devices against this specification (DESIGN R5): the histories and tolerances of
`test_conformance.py`, of models whose heads, experts and vocabulary come out even over the devices and of others.

A few examples of each; `pytest spec/ --tp 4` runs all of `test_conformance.py` over four devices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from akv_jax.config import CompileUnit, RepositionMode
from spec.model import Layer, Model, ModelConfig, random_params
from spec.test_conformance import conforms
from spec.varieties import HALF, tiny, varieties
from tests import tiny_engine
from tests.tiny_engine import TinyEngine

#: The first example is the least there is.
EXAMPLES, LONG_EXAMPLES = 3, 24

#: Variety, devices, way to reposition, what one executable computes.
Case = tuple[str, int, RepositionMode, CompileUnit]
CASES: list[Case] = [
    ("even", 4, "on_read", "layer"),
    ("uneven", 4, "copy", "layer"),
    ("uneven", 8, "on_read", "step"),
    ("everything", 4, "copy", "step"),
    ("everything", 8, "on_read", "layer"),
]
LONG_CASES: list[Case] = [
    *CASES,
    ("one_kv_head", 4, "on_read", "step"),
    ("sinks_and_window", 8, "copy", "layer"),
    ("moe", 4, "on_read", "layer"),
    ("moe", 2, "copy", "step"),
]


@functools.cache
def configs() -> dict[str, ModelConfig]:
    """The varieties of the specification, and two more."""
    window = Layer(HALF, window=5)
    return {
        **varieties(),
        # Two query heads and one KV head for each of four devices.
        "even": tiny("even", window, Layer(HALF), num_heads=8, num_kv_heads=4),
        # As SmolLM2: nine query heads, three KV heads, the head's weights are the embedding's. Over four or eight
        # devices neither they come out even, nor vocabulary and feed-forward.
        "uneven": tiny(
            "uneven",
            window,
            Layer(HALF),
            num_heads=9,
            num_kv_heads=3,
            vocab_size=66,
            intermediate_size=50,
            tie_embeddings=True,
        ),
    }


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[TinyEngine]]]:
    """A warm engine of each case that this session tests, compiled one after another while others are tested."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == request.path]
    wanted: dict[Any, None] = dict.fromkeys(item.callspec.params["case"] for item in items)
    with tiny_engine.quick_compiles(), ThreadPoolExecutor(max_workers=1) as pool:
        yield {case: pool.submit(_warm, *case) for case in wanted}
        pool.shutdown(cancel_futures=True)


def _warm(name: str, devices: int, mode: RepositionMode, unit: CompileUnit) -> TinyEngine:
    config = configs()[name]
    made = TinyEngine(config, random_params(config, seed=7), devices, reposition=mode, compile_unit=unit)
    made.engine().warm_up()
    return made


def _conforms(engines: dict[Case, Future[TinyEngine]], case: Case, examples: int) -> None:
    config = configs()[case[0]]
    model = Model.of(config, random_params(config, seed=7))
    # A step takes some milliseconds for its sums over devices: not hundreds of them, for chunks of a token or two.
    conforms(engines[case].result(), model, examples, smallest_chunk=16)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_engine(engines, record_property, case: Case) -> None:
    """The random batches, over several devices."""
    record_property("law", "R5: over four or eight devices the engine computes what the spec says")
    _conforms(engines, case, EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: "-".join(map(str, case)))
def test_engine_long(engines, record_property, case: Case) -> None:
    """More of them."""
    record_property("law", "R5: over four or eight devices the engine computes what the spec says")
    _conforms(engines, case, LONG_EXAMPLES)
