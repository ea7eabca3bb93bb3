"""The sparse feed-forward layer: every token goes to a few experts, in three grouped products (DESIGN R2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from akv_jax.config import MoE
from pallas_kernels.grouped_matmul.api import GroupedMatmul


def mixture(
    moe: MoE, grouped: GroupedMatmul, weights: Mapping[str, Any], x: Array, logits: Array, first: Array | int = 0
) -> Array:
    """Tokens x [T, d] through the experts that `logits` [T, num_experts] favour: float32 [T, d].

    `weights` may hold some experts only, from number `first` on: the sum is then over those of them that were chosen,
    and the sums of all devices add up to the whole (DESIGN R5).
    """
    shares, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), moe.experts_per_token)
    if moe.normalize:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    here = weights["experts_gate"].shape[0]
    # Rows sorted by expert, each token once for every expert it goes to; those for experts elsewhere come last.
    experts = chosen.reshape(-1) - first
    experts = jnp.where((experts >= 0) & (experts < here), experts, here)
    order = jnp.argsort(experts, stable=True)
    sizes = jnp.bincount(experts, length=here).astype(jnp.int32)

    def project(name: str, rows: Array) -> Array:
        weight = weights[f"experts_{name}"]
        return grouped(rows.astype(weight.dtype), weight, sizes, weights.get(f"experts_{name}_bias"))

    rows = x.astype(weights["experts_gate"].dtype)[order // moe.experts_per_token]
    out = project("down", activate(moe, project("gate", rows), project("up", rows)))
    # Where each token's rows came to be.
    place = jnp.zeros_like(order).at[order].set(jnp.arange(len(order)), unique_indices=True)
    return (out[place.reshape(chosen.shape)] * shares[..., None]).sum(axis=1)


def activate(moe: MoE, gate: Array, up: Array) -> Array:
    """What goes into the experts' down projection; zero where gate and up are."""
    if moe.clamp is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, moe.clamp), jnp.clip(up, -moe.clamp, moe.clamp)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
