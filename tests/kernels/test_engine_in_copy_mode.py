"""The engine in copy mode with the kernels written for GPUs, interpreted, against the specification (DESIGN R4, C8)."""

from __future__ import annotations

import numpy as np
import pytest

from spec.model import Model, random_params
from spec.operations import Append, Drop, History, Reposition
from spec.state import run
from spec.varieties import varieties
from tests import tiny_engine
from tests.tiny_engine import TinyEngine

#: Everything that moves pages: repositions by one and by several shifts, of copies again, and with nothing to move.
HISTORY: History = (
    *(Append(tuple(range(12))), Drop(frozenset({0, 1, 5})), Reposition(), Append(tuple(range(20, 28)))),
    *(Drop(frozenset({3, 13})), Reposition(), Append((7, 8, 9)), Drop(frozenset({22})), Reposition()),
    Append((1, 2)),
)


@pytest.mark.parametrize("name", ["half", pytest.param("everything", marks=pytest.mark.long)])
def test_conforms_with_triton_kernels(name: str) -> None:
    """R4, L3: logits of every token as the specification has them, though keys were moved by the Triton kernel."""
    config = varieties()[name]
    params = random_params(config, seed=7)
    sizes = {"context_length": 64, "num_pages": 80, "max_running_requests": 32, "chunked_prefill_size": 32}
    kernels = {"attention_backend": "pallas_triton_interpret", "reposition": "copy", "token_buckets": (32,)}
    with tiny_engine.quick_compiles():
        engine = TinyEngine(config, params, **sizes, **kernels).engine()
        outputs = tiny_engine.run(engine, [tiny_engine.score("edited", HISTORY, max_tokens=3)])["edited"]
    model = Model.of(config, params)
    expected = run(model, HISTORY).logits
    np.testing.assert_allclose(tiny_engine.prompt_logits(outputs), expected, rtol=0, atol=2e-4)
    assert engine.stats().copied_pages_total > 10
    assert tiny_engine.generated(outputs)[0] == expected[-1].argmax()
