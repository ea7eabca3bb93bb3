"""R and its scalings (DESIGN L7): laws for every kind, worked numbers, and transformers' own functions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spec.rope import Rotary, RotaryScaling, encode, inverse_frequencies, magnitude, rotate

SCALINGS = {
    "none": None,
    "linear": RotaryScaling("linear", factor=4.0),
    "llama3": RotaryScaling("llama3", factor=32.0, original_context=8192),
    "llama3_odd": RotaryScaling("llama3", 8.0, original_context=512, low_freq_factor=2.0, high_freq_factor=16.0),
    "yarn": RotaryScaling("yarn", factor=4.0, original_context=32768),
    "yarn_not_truncated": RotaryScaling("yarn", factor=32.0, original_context=4096, truncate=False),
    "yarn_odd": RotaryScaling("yarn", 16.0, original_context=2048, beta_fast=20.0, beta_slow=2.0, attention_factor=1.5),
    "yarn_step": RotaryScaling("yarn", factor=4.0, original_context=4096, beta_fast=4.0, beta_slow=4.0, truncate=False),
}
ROTARIES = {
    f"{name}-{style}-{dim}": Rotary(dim, base=10_000.0, style=style, scaling=scaling)
    for name, scaling in SCALINGS.items()
    for style in ("half", "interleaved")
    for dim in (32, 16)
}
HEAD_DIM = 32

every_rotary = pytest.mark.parametrize("rotary", ROTARIES.values(), ids=ROTARIES.keys())


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, HEAD_DIM))


@every_rotary
def test_rotations_add_up(rotary: Rotary, x: np.ndarray) -> None:
    """L7: R(a)·R(b) = R(a + b), R(0) is the identity, and R keeps lengths."""
    np.testing.assert_allclose(rotate(rotary, rotate(rotary, x, 70), -31), rotate(rotary, x, 39), atol=1e-12)
    np.testing.assert_array_equal(rotate(rotary, x, 0), x)
    lengths = np.linalg.norm(rotate(rotary, x, 1234), axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(x, axis=-1), rtol=1e-13)


@every_rotary
def test_scores_depend_on_distance_alone(rotary: Rotary, x: np.ndarray) -> None:
    """L7: the score of a query and a key depends on how far apart they are and not on where."""
    q, k = x[0], x[1]
    near = encode(rotary, q, 105) @ encode(rotary, k, 100)
    far = encode(rotary, q, 5) @ encode(rotary, k, 0)
    other = encode(rotary, q, 6) @ encode(rotary, k, 0)
    assert abs(near - far) < 1e-11
    assert abs(far - other) > 1e-3


@every_rotary
def test_magnitude_is_applied_once(rotary: Rotary, x: np.ndarray) -> None:
    """L7: a magnitude is part of K: re-rotating a key gives what encoding it there would have, magnitude and all."""
    np.testing.assert_allclose(rotate(rotary, encode(rotary, x, 90), -60), encode(rotary, x, 30), atol=1e-12)
    lengths = np.linalg.norm(encode(rotary, x, 77)[..., : rotary.dim], axis=-1)
    plain = np.linalg.norm(x[..., : rotary.dim], axis=-1)
    np.testing.assert_allclose(lengths, magnitude(rotary) * plain, rtol=1e-13)


@every_rotary
def test_dimensions_past_the_rotary_ones_are_left_alone(rotary: Rotary, x: np.ndarray) -> None:
    """L7: with partial rotary dimensions the rest of the head is neither rotated nor scaled."""
    np.testing.assert_array_equal(encode(rotary, x, 9)[..., rotary.dim :], x[..., rotary.dim :])


def test_the_two_styles_are_one_rotation_of_reordered_dimensions(x: np.ndarray) -> None:
    """L7: half-split and interleaved differ in which dimensions turn together, and in nothing else."""
    half, interleaved = Rotary(HEAD_DIM), Rotary(HEAD_DIM, style="interleaved")
    order = np.arange(HEAD_DIM).reshape(2, -1).T.reshape(-1)  # 0, 16, 1, 17, ...
    np.testing.assert_array_equal(rotate(half, x, 5)[..., order], rotate(interleaved, x[..., order], 5))


def test_worked_rotation() -> None:
    """L7: by hand: two pairs, base 100, so that one position turns them by 1 and by 0.1 radian."""
    k = np.array([1.0, 2.0, 3.0, 4.0])
    c, s, c10, s10 = math.cos(3), math.sin(3), math.cos(0.3), math.sin(0.3)
    half = [1 * c - 3 * s, 2 * c10 - 4 * s10, 1 * s + 3 * c, 2 * s10 + 4 * c10]
    interleaved = [1 * c - 2 * s, 1 * s + 2 * c, 3 * c10 - 4 * s10, 3 * s10 + 4 * c10]
    np.testing.assert_allclose(rotate(Rotary(4, base=100.0), k, 3), half, rtol=1e-14)
    np.testing.assert_allclose(rotate(Rotary(4, base=100.0, style="interleaved"), k, 3), interleaved, rtol=1e-14)


def test_angles_are_float64() -> None:
    """L7: angles are computed in float64: in float32 they are off by 0.002 rad and more at 128k positions."""
    rotary = Rotary(64, base=500_000.0)
    position = 131_071
    exact = position * inverse_frequencies(rotary)
    in_float32 = np.float32(position) * inverse_frequencies(rotary).astype(np.float32)
    assert np.abs(exact - in_float32).max() > 2e-3
    one = np.ones((1, 64))
    by_halves = rotate(rotary, rotate(rotary, one, 65_536), position - 65_536)
    np.testing.assert_allclose(rotate(rotary, one, position), by_halves, atol=1e-10)


def test_magnitudes() -> None:
    """L7: only YaRN has a magnitude: 0.1·ln(factor) + 1 unless the model gives its own."""
    expected = {"yarn": 0.1 * math.log(4) + 1, "yarn_not_truncated": 0.1 * math.log(32) + 1, "yarn_odd": 1.5}
    expected["yarn_step"] = expected["yarn"]
    for name, scaling in SCALINGS.items():
        assert magnitude(Rotary(32, scaling=scaling)) == pytest.approx(expected.get(name, 1.0), rel=1e-15)
    assert magnitude(Rotary(32, scaling=RotaryScaling("yarn", factor=0.5, original_context=64))) == 1.0


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", [name for name, scaling in SCALINGS.items() if scaling is not None])
def test_frequencies_are_transformers(name: str, base: float) -> None:
    """L7: scaled frequencies and magnitudes are those of Hugging Face transformers."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = SCALINGS[name]
    assert scaling is not None
    parameters = {
        "rope_type": scaling.kind,
        "rope_theta": base,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        "attention_factor": scaling.attention_factor,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=131_072)
    config.rope_parameters = parameters
    theirs, their_magnitude = ROPE_INIT_FUNCTIONS[scaling.kind](config)
    rotary = Rotary(64, base=base, scaling=scaling)
    np.testing.assert_allclose(inverse_frequencies(rotary), theirs.double().numpy(), rtol=2e-6)
    assert magnitude(rotary) == pytest.approx(their_magnitude, rel=1e-12)
    assert np.any(np.abs(inverse_frequencies(rotary) / inverse_frequencies(Rotary(64, base=base)) - 1) > 0.1)
