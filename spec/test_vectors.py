"""The committed vectors: they are what the specification gives now, and a few are checked as a reader would."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from spec.make_vectors import FILES, FOLDER, HISTORIES, from_lists, to_lists
from spec.model import Layer, Model, ModelConfig, MoE
from spec.operations import Append
from spec.rope import Rotary, RotaryScaling
from spec.state import run


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def assert_alike(found: Any, expected: Any, path: str) -> None:
    """Equal, but for the last digits of floating-point numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), path
        for key in expected:
            assert_alike(found[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), path
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_alike(a, b, f"{path}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-10), path
    else:
        assert found == expected, path


@pytest.mark.parametrize("name", FILES)
def test_vectors_are_up_to_date(name: str) -> None:
    """`python -m spec.make_vectors` would change nothing."""
    assert_alike(json.loads(json.dumps(FILES[name]())), load(name), name)


def test_no_file_is_forgotten() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)


@pytest.mark.parametrize("operations", HISTORIES.values(), ids=HISTORIES.keys())
def test_histories_survive_json(operations: list) -> None:
    assert to_lists(from_lists(operations)) == operations


def test_position_trace_in_the_file() -> None:
    """L1, L2, L3: the position trace stands in the vectors as DESIGN has it."""
    case = next(case for case in load("histories.json") if case["name"] == "position trace")
    views = [[tuple(read[:2]) for read in segment["view"]] for segment in case["segments"]]
    assert views == [
        [(0, 0), (1, 1), (2, 2)],
        [(0, 0), (2, 1), (3, 2)],
        [(0, 0), (2, 1), (4, 3)],
        [(0, 0), (2, 1), (4, 2), (5, 3)],
    ]


@pytest.mark.parametrize("case", load("logits.json"), ids=lambda case: case["name"])
def test_logits_from_the_file_alone(case: dict[str, Any]) -> None:
    """L1, L2, L3, L6, L7, L8: a model read from the vectors' JSON gives the logits that stand beside it."""
    model = Model.of(config_from(case["config"]), case["params"])
    for worked in case["runs"]:
        logits = run(model, from_lists(worked["history"])).logits
        np.testing.assert_allclose(logits, worked["logits"], atol=1e-10)


def test_logits_tell_histories_apart() -> None:
    """Vectors that an implementation without operations would pass are of no use."""
    for case in load("logits.json"):
        model = Model.of(config_from(case["config"]), case["params"])
        for worked in case["runs"]:
            appends_only = [operation for operation in from_lists(worked["history"]) if isinstance(operation, Append)]
            logits = run(model, appends_only).logits
            assert np.abs(logits[-1] - np.array(worked["logits"][-1])).max() > 1e-2


def config_from(fields: dict[str, Any]) -> ModelConfig:
    def rotary(values: dict[str, Any]) -> Rotary:
        scaling = values["scaling"]
        return Rotary(**{**values, "scaling": None if scaling is None else RotaryScaling(**scaling)})

    layers = tuple(Layer(rotary(layer["rotary"]), layer["window"]) for layer in fields["layers"])
    moe = None if fields["moe"] is None else MoE(**fields["moe"])
    return ModelConfig(**{**fields, "layers": layers, "moe": moe})
