"""The decoder of every family: one pure function from a step's batch to logits and the updated pool (DESIGN R2).

Shapes: T query rows, d hidden_size, H query heads, G KV heads, D head_dim, P pages, V vocabulary.
Weights are stored [out, in] (`models/weights/table.py` names them); the residual stream is float32.

Over several devices (DESIGN R5) each runs this with its own part of the weights and of the pool, and a `ModelConfig` of
the heads that it has. `axis` names the mesh axis over which parts are summed: after the embedding, after attention's
output projection and after the feed-forward; and the logits are put together. Nothing else is communicated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from akv_jax.config import Layer, ModelConfig, RepositionMode
from akv_jax.models.experts import mixture
from akv_jax.models.rope import RotaryTable, magnitude
from akv_jax.runtime.batch import StepBatch
from pallas_kernels.backends import LacksOperation
from pallas_kernels.grouped_matmul import api as grouped_matmul
from pallas_kernels.grouped_matmul.api import GroupedMatmul
from pallas_kernels.reposition import api as reposition
from pallas_kernels.reposition.api import Reposition, Rotation
from pallas_kernels.rotary import rotate
from pallas_kernels.segment_attention import api as segment_attention
from pallas_kernels.segment_attention.api import Attention, SegmentAttention

Params = Mapping[str, Any]


class Pool(NamedTuple):
    """K and V of every page: one array [P, G*D] a layer. float32, or uint16 holding bfloat16 bits on a CPU."""

    k: tuple[Array, ...]
    v: tuple[Array, ...]


class Kernels(NamedTuple):
    """What a layer calls by a backend's name (DESIGN R4)."""

    attention: SegmentAttention
    #: None for a model without experts.
    grouped_matmul: GroupedMatmul | None
    #: Makes the batch's moves. Without it there are none, and page lists may carry shifts instead (DESIGN C8).
    reposition: Reposition | None


#: By operation: its implementation by a backend's name.
OPERATIONS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {
        "segment_attention": segment_attention.backend,
        "reposition": reposition.backend,
        "grouped_matmul": grouped_matmul.backend,
    }
)


def backends_of(backend: str) -> dict[str, str]:
    """Which backend each operation comes from (DESIGN R4): `backend`, or "xla" for what a module of anybody's lacks.

    ValueError if there is no such backend, or it is a module with none of the operations.
    """
    found: dict[str, str] = {}
    for operation, find in OPERATIONS.items():
        try:
            find(backend)
            found[operation] = backend
        except LacksOperation:
            found[operation] = "xla"
    if backend not in found.values():
        raise ValueError(f"backend {backend!r} is a module without any of the functions {', '.join(OPERATIONS)}")
    return found


def kernels(config: ModelConfig, backend: str, mode: RepositionMode) -> Kernels:
    """All that a model and a mode need, as `backends_of` has it, with its errors."""
    found = {operation: OPERATIONS[operation](name) for operation, name in backends_of(backend).items()}
    return Kernels(
        found["segment_attention"],
        None if config.moe is None else found["grouped_matmul"],
        found["reposition"] if mode == "copy" else None,
    )


def forward(
    config: ModelConfig,
    kernels: Kernels,
    params: Params,
    tables: Sequence[RotaryTable],
    pool: Pool,
    batch: StepBatch,
    *,
    tile: int,
    axis: str | None = None,
) -> tuple[Array, Pool]:
    """Run every query once. Returns float32 logits [len(batch.logit_rows), V] and the pool with K and V written.

    `tables` holds one table a layer.
    """
    x = embed(axis, params, batch)
    keys, values = list(pool.k), list(pool.v)
    # Layers alike are traced once, and called by name in what is lowered: a tenth of the time to trace thirty.
    jitted = jax.jit(decoder_layer, static_argnums=(0, 1, 2, 3, 4))
    for index, (layer, weights, table) in enumerate(zip(config.layers, params["layers"], tables, strict=True)):
        x, keys[index], values[index] = jitted(
            config, layer, kernels, tile, axis, weights, table, x, keys[index], values[index], batch
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
    kernels: Kernels,
    tile: int,
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
    if kernels.reposition is not None:
        rotation = Rotation(config.num_kv_heads, config.head_dim, layer.rotary.style)
        keys, values = kernels.reposition(keys, values, batch.moves, *table, rotation)
    spec = Attention(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        scale=config.head_dim**-0.5,
        window=layer.window,
        rotary_style=layer.rotary.style,
        tile=tile,
        shifts=kernels.reposition is None,
    )
    out = kernels.attention(q, keys, values, batch.attention, *table, weights.get("sinks"), spec)
    x = x + _summed(linear(out.reshape(len(x), -1), weights["o"]), axis)
    if "o_bias" in weights:
        x = x + weights["o_bias"].astype(jnp.float32)
    x = x + _summed(_feed_forward(config, kernels, axis, weights, norm(x, weights["ffn_norm"], config.norm_eps)), axis)
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


def _feed_forward(config: ModelConfig, kernels: Kernels, axis: str | None, weights: Params, x: Array) -> Array:
    """x [T, d] to float32 [T, d], this device's part of it."""
    if config.moe is None:
        return linear(jax.nn.silu(linear(x, weights["gate"])) * linear(x, weights["up"]), weights["down"])
    assert kernels.grouped_matmul is not None
    logits = linear(x, weights["router"], weights.get("router_bias"))
    return mixture(config.moe, kernels.grouped_matmul, axis, weights, x, logits)
