"""The oracle: one page at a time, in float64, by the definition. Runs anywhere through a host callback.

But not on a CPU of one core: JAX's callback waits for its arguments there in the only thread that could bring them.
"""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
from jax import Array

from pallas_kernels.reposition.api import MoveBatch, Rotation


def reposition(
    k_pool: Array, v_pool: Array, moves: MoveBatch, cos: Array, sin: Array, rotation: Rotation
) -> tuple[Array, Array]:
    """See `api.Reposition`; never in place."""
    compute = functools.partial(move, rotation=rotation)
    pools = jax.ShapeDtypeStruct(k_pool.shape, k_pool.dtype), jax.ShapeDtypeStruct(v_pool.shape, v_pool.dtype)
    return jax.pure_callback(compute, pools, k_pool, v_pool, moves, cos, sin)


def move(
    k_pool: np.ndarray, v_pool: np.ndarray, moves: MoveBatch, cos: np.ndarray, sin: np.ndarray, rotation: Rotation
) -> tuple[np.ndarray, np.ndarray]:
    """NumPy in, NumPy out; the same arguments as `reposition`. Float64 pools stay float64."""
    keys, values = np.array(k_pool), np.array(v_pool)
    cos, sin = (np.asarray(table, np.float64).reshape(-1, *np.shape(table)[-2:]) for table in (cos, sin))
    layers = zip(keys, values) if keys.ndim == 3 else [(keys, values)]
    for layer, (layer_keys, layer_values) in enumerate(layers):
        kind = rotation.tables[layer] if rotation.tables else 0
        for index in range(int(moves.num)):
            source, target = int(moves.source[index]), int(moves.target[index])
            heads = _numbers(layer_keys[source]).reshape(rotation.num_kv_heads, rotation.head_dim)
            heads = _turned(heads, int(moves.shift[index]), cos[kind], sin[kind], rotation)
            layer_keys[target] = _stored(heads.reshape(-1), keys.dtype)
            layer_values[target] = layer_values[source]
    return keys, values


def _turned(heads: np.ndarray, shift: int, cos: np.ndarray, sin: np.ndarray, rotation: Rotation) -> np.ndarray:
    """Heads [G, D] of one page turned by a shift."""
    c, s = cos[abs(shift)], sin[abs(shift)] * np.sign(shift)
    half = len(c)
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if rotation.rotary_style == "half"
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    out = heads.copy()
    a, b = heads[:, first], heads[:, second]
    out[:, first], out[:, second] = a * c - b * s, b * c + a * s
    return out


def _numbers(row: np.ndarray) -> np.ndarray:
    return (row.view(ml_dtypes.bfloat16) if row.dtype == np.uint16 else row).astype(np.float64)


def _stored(row: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return row.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == np.uint16 else row.astype(dtype)
