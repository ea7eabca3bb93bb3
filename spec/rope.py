"""R, the model's own rotary function (DESIGN L7).

A key is rotated by an angle proportional to its position. Rotations add up: R(a)·R(b) = R(a + b). That is all that a
reposition needs, and why it needs the key alone and neither the token nor the hidden state that it came from.

All angles are float64. Vectors are `[..., head_dim]`, rotated along the last axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How a model was stretched to a longer context. Unused fields of a kind are ignored."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: YaRN magnitude put on q and k alike; None means 0.1·ln(factor) + 1.
    attention_factor: float | None = None
    #: YaRN: round the correction range to whole dimensions.
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rotary:
    """One layer's rotary function: the first `dim` of each head's dimensions are rotated, the rest are left alone."""

    dim: int
    base: float = 10_000.0
    style: Literal["half", "interleaved"] = "half"
    scaling: RotaryScaling | None = None


def encode(rotary: Rotary, x: np.ndarray, position: int) -> np.ndarray:
    """What a fresh query or key goes through: R(position), and the magnitude, here and never again."""
    scale = np.ones(x.shape[-1])
    scale[: rotary.dim] = magnitude(rotary)
    return rotate(rotary, x, position) * scale


def rotate(rotary: Rotary, x: np.ndarray, shift: int) -> np.ndarray:
    """R(shift)·x: the pure rotation, which moves a key from position p to p + shift. It keeps lengths."""
    angles = shift * inverse_frequencies(rotary)
    first, second = pairs(rotary)
    result = x.copy()
    result[..., first] = x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles)
    result[..., second] = x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles)
    return result


def pairs(rotary: Rotary) -> tuple[np.ndarray, np.ndarray]:
    """Which two dimensions turn together: i and i + dim/2 (half-split), or 2i and 2i + 1 (interleaved)."""
    i = np.arange(rotary.dim // 2)
    if rotary.style == "half":
        return i, i + rotary.dim // 2
    return 2 * i, 2 * i + 1


def magnitude(rotary: Rotary) -> float:
    """The factor on queries and keys alike: 1 but for YaRN."""
    scaling = rotary.scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def inverse_frequencies(rotary: Rotary) -> np.ndarray:
    """Radians per position of each pair of dimensions, float64 [dim / 2], after scaling."""
    plain = rotary.base ** (-np.arange(0, rotary.dim, 2) / rotary.dim)
    match rotary.scaling:
        case None:
            return plain
        case RotaryScaling(kind="linear", factor=factor):
            return plain / factor
        case RotaryScaling(kind="llama3") as scaling:
            return np.array([_llama3(frequency, scaling) for frequency in plain])
        case RotaryScaling(kind="yarn") as scaling:
            # 1 where a pair turns so fast that it keeps its frequency, 0 where it is slowed by the whole factor.
            kept = np.array([_yarn_kept(i, rotary, scaling) for i in range(len(plain))])
            return plain * kept + plain / scaling.factor * (1 - kept)
    raise AssertionError(rotary)


def _llama3(frequency: float, scaling: RotaryScaling) -> float:
    """Pairs that turn often within the original context are kept, rare ones slowed, those between are blended."""
    turns = scaling.original_context * frequency / (2 * math.pi)
    if turns > scaling.high_freq_factor:
        return frequency
    if turns < scaling.low_freq_factor:
        return frequency / scaling.factor
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency


def _yarn_kept(pair: int, rotary: Rotary, scaling: RotaryScaling) -> float:
    """Like llama3's blend, but linear in the index of the pair, between those with beta_fast and beta_slow turns."""

    def pair_with(turns: float) -> float:
        wavelength_ratio = math.log(scaling.original_context / (turns * 2 * math.pi)) / math.log(rotary.base)
        return rotary.dim * wavelength_ratio / 2

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    if low == high:
        high += 0.001  # a step, as everybody does it
    return 1 - min(max((pair - low) / (high - low), 0.0), 1.0)
