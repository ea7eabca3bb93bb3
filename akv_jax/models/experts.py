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
    moe: MoE, grouped: GroupedMatmul, axis: str | None, weights: Mapping[str, Any], x: Array, logits: Array
) -> Array:
    """Tokens x [T, d] through the experts that `logits` [T, num_experts] favour: float32 [T, d].

    Over the devices of a mesh `axis` (DESIGN R5) it is this device's part, and all parts add up to the whole: each has
    whole experts, or a part of the intermediate dimension of all of them.
    """
    shares, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), moe.experts_per_token)
    if moe.normalize:
        shares = shares / shares.sum(axis=-1, keepdims=True)
    here = weights["experts_gate"].shape[0]
    # Rows sorted by expert, each token once for every expert it goes to; those for experts elsewhere come last.
    experts = chosen.reshape(-1)
    if here < moe.num_experts:
        assert axis is not None
        experts = experts - lax.axis_index(axis) * here
        experts = jnp.where((experts >= 0) & (experts < here), experts, here)
    place, sizes = _sorted_places(experts, here)
    # XLA sorts on a GPU in dozens of kernels, and compiles them anew for every layer: counting takes a few.
    order = jnp.zeros_like(place).at[place].set(jnp.arange(len(place), dtype=jnp.int32), unique_indices=True)

    def project(name: str, rows: Array) -> Array:
        weight, bias = weights[f"experts_{name}"], weights.get(f"experts_{name}_bias")
        if bias is not None and name == "down" and axis is not None and here == moe.num_experts:
            # Of an expert that every device has a part of, one adds the bias.
            bias = jnp.where(lax.axis_index(axis) == 0, bias, 0)
        return grouped(rows.astype(weight.dtype), weight, sizes, bias)

    rows = x.astype(weights["experts_gate"].dtype)[order // moe.experts_per_token]
    out = project("down", activate(moe, project("gate", rows), project("up", rows)))
    return (out[place.reshape(chosen.shape)] * shares[..., None]).sum(axis=1)


def _sorted_places(groups: Array, count: int) -> tuple[Array, Array]:
    """Where each element [N] comes to be in a stable sort by group, and sizes [count] of all groups but the last.

    Groups are 0 .. `count`.
    """
    member = (groups[:, None] == jnp.arange(count + 1)[None, :]).astype(jnp.int32)
    seen = jnp.cumsum(member, axis=0)
    sizes = seen[-1]
    # Before it are all of lower groups, and those of its own that come earlier.
    start = jnp.cumsum(sizes) - sizes
    return ((start[None, :] + seen - 1) * member).sum(axis=1), sizes[:count]


def activate(moe: MoE, gate: Array, up: Array) -> Array:
    """What goes into the experts' down projection; zero where gate and up are."""
    if moe.clamp is None:
        return jax.nn.silu(gate) * up
    gate, up = jnp.minimum(gate, moe.clamp), jnp.clip(up, -moe.clamp, moe.clamp)
    return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
