"""Reposition in plain XLA: blocks of moves, gathered, turned and scattered, in a loop with a traced trip count (R3)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.reposition.api import MOVE_PADDING, MoveBatch, Rotation
from pallas_kernels.rotary import rotate

#: Moves made at once.
BLOCK = MOVE_PADDING


def reposition(
    k_pool: Array, v_pool: Array, moves: MoveBatch, cos: Array, sin: Array, rotation: Rotation
) -> tuple[Array, Array]:
    """See `api.Reposition`."""
    moves = MoveBatch(*(jnp.asarray(column) for column in moves))
    shape = k_pool.shape
    layers, pages = (1, *shape)[-3:-1]
    rows = cos.shape[-2]
    # All layers as one long pool, and all tables as one: reshaping copies nothing.
    cos, sin = (jnp.asarray(table).reshape(-1, table.shape[-1]) for table in (cos, sin))
    long = layers * pages, shape[-1]
    pools = jnp.asarray(k_pool).reshape(long), jnp.asarray(v_pool).reshape(long)

    def of_layer(layer: Array | int, table: Array | int, pools: tuple[Array, Array]) -> tuple[Array, Array]:
        def move(index: Array, pools: tuple[Array, Array]) -> tuple[Array, Array]:
            source, target, shift = (lax.dynamic_slice_in_dim(a, index * BLOCK, BLOCK) for a in moves[:3])
            first = layer * pages
            return _block(*pools, source + first, target + first, shift, table * rows, cos, sin, rotation)

        return lax.fori_loop(0, (moves.num + BLOCK - 1) // BLOCK, move, pools)

    if layers == 1:
        pools = of_layer(0, rotation.tables[0] if rotation.tables else 0, pools)
    else:
        kinds = jnp.asarray(rotation.tables or (0,) * layers)
        pools = lax.fori_loop(0, layers, lambda layer, pools: of_layer(layer, kinds[layer], pools), pools)
    k_pool, v_pool = (pool.reshape(shape) for pool in pools)
    return k_pool, v_pool


def _block(
    keys: Array,
    values: Array,
    source: Array,
    target: Array,
    shift: Array,
    table: Array | int,
    cos: Array,
    sin: Array,
    rotation: Rotation,
) -> tuple[Array, Array]:
    """One block of moves in pools [rows, G*D]; the angles of shift 0 are in row `table` of cos and sin."""
    rows = keys.at[source].get(mode="promise_in_bounds")
    if rows.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows, jnp.bfloat16)
    angle, sign = table + jnp.abs(shift), jnp.sign(shift).astype(jnp.float32)[:, None]
    heads = rows.reshape(-1, rotation.num_kv_heads, rotation.head_dim)
    rows = rotate(heads, cos[angle], sin[angle] * sign, style=rotation.rotary_style).reshape(rows.shape)
    if keys.dtype == jnp.uint16:
        rows = lax.bitcast_convert_type(rows, jnp.uint16)
    copied = values.at[source].get(mode="promise_in_bounds")
    return (
        keys.at[target].set(rows, mode="promise_in_bounds"),
        values.at[target].set(copied, mode="promise_in_bounds"),
    )
