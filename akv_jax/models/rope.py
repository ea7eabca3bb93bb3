"""Rotary tables (DESIGN L7): float64 angles, cast once to float32.

A table row is cos and sin of one position's angles and carries no magnitude: YaRN's factor belongs to q and k when they
are encoded (`magnitude`), so that turning a stored key from p to q is a pure rotation by the shift q - p.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from akv_jax.config import Rotary, RotaryScaling


class RotaryTable(NamedTuple):
    """Angles of positions 0..rows-1, `cos` and `sin` float32 [rows, dim / 2]."""

    cos: Array
    sin: Array


def inverse_frequencies(rotary: Rotary) -> np.ndarray:
    """Angle per position of each rotated pair, float64 [dim / 2]."""
    plain = rotary.base ** -(np.arange(0, rotary.dim, 2, dtype=np.float64) / rotary.dim)
    scaling = rotary.scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return _yarn(plain, rotary, scaling)


def _llama3(plain: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    turns = scaling.original_context * plain / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(blend, 0.0, 1.0)
    return plain * keep + plain / scaling.factor * (1 - keep)


def _yarn(plain: np.ndarray, rotary: Rotary, scaling: RotaryScaling) -> np.ndarray:
    """NTK-by-parts: dimensions that turn more than `beta_fast` times within the original context are kept."""

    def dimension(turns: float) -> float:
        return rotary.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rotary.base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    ramp = (np.arange(rotary.dim // 2, dtype=np.float64) - low) / max(high - low, 0.001)
    stretch = np.clip(ramp, 0.0, 1.0)
    return plain * (1 - stretch) + plain / scaling.factor * stretch


def magnitude(rotary: Rotary) -> float:
    """The factor on rotated q and k dimensions (YaRN only; 1 otherwise)."""
    scaling = rotary.scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


@lru_cache(maxsize=16)
def _angles(rotary: Rotary, rows: int) -> tuple[np.ndarray, np.ndarray]:
    angles = np.arange(rows, dtype=np.float64)[:, None] * inverse_frequencies(rotary)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotary_table(rotary: Rotary, rows: int) -> RotaryTable:
    """The table of positions 0..rows-1."""
    cos, sin = _angles(rotary, rows)
    return RotaryTable(jnp.asarray(cos), jnp.asarray(sin))
