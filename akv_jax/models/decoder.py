"""The decoder of every family: one pure function from a step's batch to logits and the updated pool (DESIGN R2).

Shapes: T query rows, d hidden_size, H query heads, G KV heads, D head_dim, P pages, V vocabulary.
Weights are stored [out, in] (`models/weights/table.py` names them); the residual stream is float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from akv_jax.config import Layer, ModelConfig
from akv_jax.models.rope import RotaryTable, magnitude
from akv_jax.runtime.batch import StepBatch
from pallas_kernels.reposition.api import Reposition, Rotation
from pallas_kernels.rotary import rotate
from pallas_kernels.segment_attention.api import Attention, SegmentAttention

Params = Mapping[str, Any]


class Pool(NamedTuple):
    """K and V of every page: one array [P, G*D] a layer. float32, or uint16 holding bfloat16 bits on a CPU."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


def forward(
    config: ModelConfig,
    attention: SegmentAttention,
    params: Params,
    tables: Sequence[RotaryTable],
    pool: Pool,
    batch: StepBatch,
    *,
    tile: int,
    reposition: Reposition | None,
) -> tuple[Array, Pool]:
    """Run every query once. Returns float32 logits [len(batch.logit_rows), V] and the pool with K and V written.

    `tables` holds one table a layer; `reposition` makes the batch's moves. Without it there are none, and page lists
    may carry shifts instead (DESIGN C8: copy, on_read).
    """
    x = embed(params, batch)
    keys, values = list(pool.k), list(pool.v)
    # Layers alike are traced once, and called by name in what is lowered: a tenth of the time to trace thirty.
    jitted = jax.jit(decoder_layer, static_argnums=(0, 1, 2, 3, 4))
    for index, (layer, weights, table) in enumerate(zip(config.layers, params["layers"], tables, strict=True)):
        x, keys[index], values[index] = jitted(
            config, layer, attention, tile, reposition, weights, table, x, keys[index], values[index], batch
        )
    return head(config, params, x, batch), Pool(tuple(keys), tuple(values))


def embed(params: Params, batch: StepBatch) -> Array:
    """The residual stream before the first layer: float32 [T, d]."""
    return params["embed"][batch.tokens].astype(jnp.float32)


def head(config: ModelConfig, params: Params, x: Array, batch: StepBatch) -> Array:
    """Logits of the rows that they are asked for, from the residual stream x [T, d]: float32 [S, V]."""
    x = norm(x[batch.logit_rows], params["norm"], config.norm_eps)
    return linear(x, params.get("head", params["embed"]))


def decoder_layer(
    config: ModelConfig,
    layer: Layer,
    attention: SegmentAttention,
    tile: int,
    reposition: Reposition | None,
    weights: Params,
    table: RotaryTable,
    x: Array,
    keys: Array,
    values: Array,
    batch: StepBatch,
) -> tuple[Array, Array, Array]:
    """One layer of `forward`: x [T, d] and its pools in, the same out."""
    q, k, v = _qkv(config, layer, weights, table, norm(x, weights["attn_norm"], config.norm_eps), batch.positions)
    keys, values = _write(keys, batch.destinations, k), _write(values, batch.destinations, v)
    if reposition is not None:
        rotation = Rotation(config.num_kv_heads, config.head_dim, layer.rotary.style)
        keys, values = reposition(keys, values, batch.moves, *table, rotation)
    spec = Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.head_dim**-0.5,
        window=layer.window,
        rotary_style=layer.rotary.style,
        tile=tile,
        shifts=reposition is None,
    )
    out = attention(q, keys, values, batch.attention, *table, weights.get("sinks"), spec)
    x = x + linear(out.reshape(len(x), -1), weights["o"], weights.get("o_bias"))
    x = x + _feed_forward(config, weights, norm(x, weights["ffn_norm"], config.norm_eps))
    return x, keys, values


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """x [T, in] times weight [out, in]: float32 [T, out], accumulated in float32."""
    # Mixed operands would be widened before the dot, at several times its cost (bfloat16 on a CPU).
    out = lax.dot_general(
        x.astype(weight.dtype),
        weight,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return out if bias is None else out + bias.astype(jnp.float32)


def norm(x: Array, weight: Array, eps: float) -> Array:
    """RMSNorm over the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.astype(jnp.float32)


def _qkv(
    config: ModelConfig, layer: Layer, weights: Params, table: RotaryTable, x: Array, positions: Array
) -> tuple[Array, Array, Array]:
    """Queries [T, H, D] and keys [T, G, D] encoded at `positions`, and values [T, G, D], in the weights' dtype."""
    q, k, v = (
        linear(x, weights[name], weights.get(f"{name}_bias")).reshape(len(x), heads, config.head_dim)
        for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
    )
    if config.qk_norm:
        q, k = norm(q, weights["q_norm"], config.norm_eps), norm(k, weights["k_norm"], config.norm_eps)
    factor = magnitude(layer.rotary)
    cos, sin = table.cos[positions] * factor, table.sin[positions] * factor
    q, k = (rotate(heads, cos, sin, style=layer.rotary.style) for heads in (q, k))
    dtype = weights["q"].dtype
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def _write(pool: Array, pages: Array, rows: Array) -> Array:
    """Store rows [T, G, D] at `pages` [T], in place where the pool is donated."""
    rows = rows.reshape(len(pages), -1)
    if pool.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows.astype(jnp.bfloat16), jnp.uint16)
    return pool.at[pages].set(rows.astype(pool.dtype), mode="promise_in_bounds")


def _feed_forward(config: ModelConfig, weights: Params, x: Array) -> Array:
    if config.moe is None:
        return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])
    moe, rows = config.moe, len(x)
    probabilities = jax.nn.softmax(linear(x, weights["router"]), axis=-1)
    chosen, experts = lax.top_k(probabilities, moe.experts_per_token)
    if moe.normalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    # One grouped dot for all experts: rows sorted by expert, each row once for every expert it goes to.
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=moe.num_experts).astype(jnp.int32)
    rows_in = x[order // moe.experts_per_token]
    gate, up = _grouped(rows_in, weights["experts_gate"], sizes), _grouped(rows_in, weights["experts_up"], sizes)
    out = _grouped(jax.nn.silu(gate) * up, weights["experts_down"], sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(rows, moe.experts_per_token, -1)
    return (out * chosen[..., None]).sum(axis=1)


def _grouped(x: Array, weight: Array, sizes: Array) -> Array:
    """x [rows, in], sorted by expert, times weight [experts, out, in]."""
    return lax.ragged_dot(
        x.astype(weight.dtype),
        weight.swapaxes(1, 2),
        sizes,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
