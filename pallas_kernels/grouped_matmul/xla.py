"""The grouped matrix product in plain XLA.

Right everywhere, and fast on a CPU. On a GPU of this jax XLA makes one dense product of E times the rows' width of it,
zeros for all groups but one, and transposes the weights first: E times the work and memory.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax


def grouped_matmul(x: Array, weight: Array, sizes: Array, bias: Array | None = None) -> Array:
    """See `api.GroupedMatmul`."""
    out = lax.ragged_dot(
        x,
        weight.swapaxes(1, 2),
        sizes,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    if bias is None:
        return out
    group = (jnp.arange(len(x))[:, None] >= jnp.cumsum(sizes)[None, :]).sum(axis=1)
    return out + bias.at[group].get(mode="fill", fill_value=0).astype(jnp.float32)
