"""Rotation of keys and queries by table rows, shared by every kernel (DESIGN L7)."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import Array

Style = Literal["half", "interleaved"]


def rotate(x: Array, cos: Array, sin: Array, *, style: Style) -> Array:
    """Turn the first 2·r dimensions of x [tokens, heads, head_dim] by angles [tokens, r], in float32.

    "half" pairs dimension i with i + r, "interleaved" 2i with 2i + 1. Dimensions from 2·r on are left alone.
    The result has x's dtype.
    """
    dim, cos, sin = 2 * cos.shape[-1], cos[:, None, :], sin[:, None, :]
    turned, rest = x[..., :dim].astype(jnp.float32), x[..., dim:]
    if style == "half":
        a, b = turned[..., : dim // 2], turned[..., dim // 2 :]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(turned.shape)
    turned = turned.astype(x.dtype)
    return jnp.concatenate([turned, rest], axis=-1) if rest.shape[-1] else turned
