"""The oracle: one query at a time, in float64, by the definition. Runs anywhere through a host callback.

But not on a CPU of one core: JAX's callback waits for its arguments there in the only thread that could bring them.
"""

from __future__ import annotations

import functools

import jax
import ml_dtypes
import numpy as np
from jax import Array

from pallas_kernels.segment_attention.api import Attention, SegmentBatch


def segment_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    batch: SegmentBatch,
    cos: Array,
    sin: Array,
    sinks: Array | None,
    attention: Attention,
) -> Array:
    """See `api.SegmentAttention`."""
    compute = functools.partial(attend, attention=attention)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    return jax.pure_callback(compute, out, q, k_pool, v_pool, batch, cos, sin, sinks)


def attend(
    q: np.ndarray,
    k_pool: np.ndarray,
    v_pool: np.ndarray,
    batch: SegmentBatch,
    cos: np.ndarray,
    sin: np.ndarray,
    sinks: np.ndarray | None,
    attention: Attention,
) -> np.ndarray:
    """NumPy in, NumPy out; the same arguments as `segment_attention`."""
    batch = jax.tree.map(np.asarray, batch)
    out = np.zeros(q.shape, np.float64)
    for tasks in (batch.rows, batch.tiles):
        for task in range(int(tasks.num)):
            view = slice(int(tasks.first[task]), int(tasks.first[task] + tasks.length[task]))
            pages, shifts = np.asarray(batch.pages)[view], np.asarray(batch.shifts)[view]
            keys = _turn(_heads(k_pool, pages, attention), shifts, cos, sin, attention)
            values = _heads(v_pool, pages, attention)
            for row in range(int(tasks.query[task]), int(tasks.query[task] + tasks.count[task])):
                distance = int(batch.query_positions[row]) - batch.positions[view]
                seen = distance >= 0 if attention.window is None else (distance >= 0) & (distance < attention.window)
                out[row] = _one_query(np.asarray(q[row], np.float64), keys[seen], values[seen], sinks, attention)
    return out.astype(q.dtype)


def _one_query(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, sinks: np.ndarray | None, attention: Attention
) -> np.ndarray:
    """q [H, D], keys and values [entries, G, D] -> [H, D]: zeros where there are none."""
    out = np.zeros(q.shape)
    if len(keys) == 0:
        return out
    for head in range(attention.num_heads):
        kv_head = head * attention.num_kv_heads // attention.num_heads
        scores = keys[:, kv_head] @ q[head] * attention.scale
        if attention.softcap is not None:
            scores = attention.softcap * np.tanh(scores / attention.softcap)
        top = max(scores.max(initial=-np.inf), -np.inf if sinks is None else float(sinks[head]))
        weights = np.exp(scores - top)
        total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[head]) - top))
        out[head] = weights @ values[:, kv_head] / total
    return out


def _heads(pool: np.ndarray, pages: np.ndarray, attention: Attention) -> np.ndarray:
    rows = np.asarray(pool)[pages]
    if rows.dtype == np.uint16:
        rows = rows.view(ml_dtypes.bfloat16)
    return rows.astype(np.float64).reshape(len(pages), attention.num_kv_heads, attention.head_dim)


def _turn(keys: np.ndarray, shifts: np.ndarray, cos: np.ndarray, sin: np.ndarray, attention: Attention) -> np.ndarray:
    """Keys [entries, G, D] turned by their shifts."""
    c = np.asarray(cos, np.float64)[np.abs(shifts)][:, None]
    s = np.asarray(sin, np.float64)[np.abs(shifts)][:, None] * np.sign(shifts)[:, None, None]
    half = c.shape[-1]
    out = keys.copy()
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if attention.rotary_style == "half"
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    a, b = keys[..., first], keys[..., second]
    out[..., first], out[..., second] = a * c - b * s, b * c + a * s
    return out
