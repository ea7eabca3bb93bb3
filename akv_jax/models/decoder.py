"""The decoder of every family: one pure function from a step's batch to logits and the updated pool (DESIGN R2).

Shapes: T query rows, d hidden_size, H query heads, G KV heads, D head_dim, P pages, V vocabulary.
Weights are stored [out, in] (`models/weights/table.py` names them); the residual stream is float32.

Over several devices (DESIGN R5) each runs this with its own part of the weights and of the pool, and a `ModelConfig` of
the heads that it has. `axis` names the mesh axis over which parts are summed: after the embedding, after attention's
output projection and after the feed-forward; and the logits are put together. Nothing else is communicated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from akv_jax.config import Layer, ModelConfig
from akv_jax.models.rope import RotaryTable, magnitude
from akv_jax.runtime.batch import MOVE_BLOCK, MoveBatch, StepBatch
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
    shifts: bool,
    axis: str | None = None,
) -> tuple[Array, Pool]:
    """Run every query once. Returns float32 logits [len(batch.logit_rows), V] and the pool with K and V written.

    `tables` holds one table a layer; `shifts` says whether page lists may carry shifts (DESIGN C8, on_read).
    """
    x = embed(axis, params, batch)
    keys, values = list(pool.k), list(pool.v)
    # Layers alike are traced once, and called by name in what is lowered: a tenth of the time to trace thirty.
    jitted = jax.jit(decoder_layer, static_argnums=(0, 1, 2, 3, 4, 5))
    for index, (layer, weights, table) in enumerate(zip(config.layers, params["layers"], tables, strict=True)):
        x, keys[index], values[index] = jitted(
            config, layer, attention, tile, shifts, axis, weights, table, x, keys[index], values[index], batch
        )
    return head(config, axis, params, x, batch), Pool(tuple(keys), tuple(values))


def embed(axis: str | None, params: Params, batch: StepBatch) -> Array:
    """The residual stream before the first layer: float32 [T, d]."""
    table, tokens = params["embed"], batch.tokens
    if axis is None:
        return table[tokens].astype(jnp.float32)
    # Each device has some tokens' rows, and zeros for the others.
    mine = tokens - lax.axis_index(axis) * len(table)
    rows = table.at[mine].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return lax.psum(rows.astype(jnp.float32), axis)


def head(config: ModelConfig, axis: str | None, params: Params, x: Array, batch: StepBatch) -> Array:
    """Logits of the rows that they are asked for, from the residual stream x [T, d]: float32 [S, V]."""
    x = norm(x[batch.logit_rows], params["norm"], config.norm_eps)
    logits = linear(x, params.get("head", params["embed"]))
    if axis is None:
        return logits
    # Rows that only pad the vocabulary are no tokens.
    return lax.all_gather(logits, axis, axis=1, tiled=True)[:, : config.vocab_size]


def decoder_layer(
    config: ModelConfig,
    layer: Layer,
    attention: SegmentAttention,
    tile: int,
    shifts: bool,
    axis: str | None,
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
    if not shifts:
        keys, values = _move(config, layer, table, keys, values, batch.moves)
    spec = Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.head_dim**-0.5,
        window=layer.window,
        rotary_style=layer.rotary.style,
        tile=tile,
        shifts=shifts,
    )
    out = attention(q, keys, values, batch.attention, *table, weights.get("sinks"), spec)
    x = x + _summed(linear(out.reshape(len(x), -1), weights["o"]), axis)
    if "o_bias" in weights:
        x = x + weights["o_bias"].astype(jnp.float32)
    x = x + _summed(_feed_forward(config, axis, weights, norm(x, weights["ffn_norm"], config.norm_eps)), axis)
    return x, keys, values


def _summed(part: Array, axis: str | None) -> Array:
    """The sum of all devices' parts."""
    return part if axis is None else lax.psum(part, axis)


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


def _move(
    config: ModelConfig, layer: Layer, table: RotaryTable, keys: Array, values: Array, moves: MoveBatch
) -> tuple[Array, Array]:
    """Copy mode: turn K by its shift and copy V into new pages (DESIGN C2, C8). Rotation in float32 (C3)."""

    def block(index: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        keys, values = pools
        source, target, shift = (
            lax.dynamic_slice_in_dim(jnp.asarray(a), index * MOVE_BLOCK, MOVE_BLOCK)
            for a in (moves.source, moves.target, moves.shift)
        )
        rows = keys[source]
        if rows.dtype == jnp.uint16:
            rows = lax.bitcast_convert_type(rows, jnp.bfloat16)
        cos, sin = table.cos[jnp.abs(shift)], table.sin[jnp.abs(shift)] * jnp.sign(shift).astype(jnp.float32)[:, None]
        heads = rows.reshape(-1, config.num_kv_heads, config.head_dim)
        keys = _write(keys, target, rotate(heads, cos, sin, style=layer.rotary.style))
        return keys, values.at[target].set(values[source])

    return lax.fori_loop(0, (jnp.asarray(moves.num) + MOVE_BLOCK - 1) // MOVE_BLOCK, block, (keys, values))


def _feed_forward(config: ModelConfig, axis: str | None, weights: Params, x: Array) -> Array:
    """x [T, d] to float32 [T, d], this device's part of it."""
    if config.moe is None:
        return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])
    moe, rows = config.moe, len(x)
    probabilities = jax.nn.softmax(linear(x, weights["router"]), axis=-1)
    chosen, experts = lax.top_k(probabilities, moe.experts_per_token)
    if moe.normalize:
        chosen = chosen / chosen.sum(axis=-1, keepdims=True)
    # Experts that are elsewhere become number `own`: their rows come last and belong to no group.
    own = len(weights["experts_gate"])
    experts = experts.reshape(-1)
    if own < moe.num_experts:
        assert axis is not None
        experts = experts - lax.axis_index(axis) * own
        experts = jnp.where((experts >= 0) & (experts < own), experts, own)
    # One grouped dot for all experts: rows sorted by expert, each row once for every expert it goes to.
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=own).astype(jnp.int32)
    rows_in = x[order // moe.experts_per_token]
    gate, up = _grouped(rows_in, weights["experts_gate"], sizes), _grouped(rows_in, weights["experts_up"], sizes)
    out = _grouped(jax.nn.silu(gate) * up, weights["experts_down"], sizes)
    out = jnp.zeros_like(out).at[order].set(out).reshape(rows, moe.experts_per_token, -1)
    return (out * chosen[..., None]).sum(axis=1)


def _grouped(x: Array, weight: Array, sizes: Array) -> Array:
    """x [rows, in], sorted by expert, times weight [experts, out, in]; zeros for rows after the last expert's."""
    return lax.ragged_dot(
        x.astype(weight.dtype),
        weight.swapaxes(1, 2),
        sizes,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
