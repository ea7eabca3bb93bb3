"""Reposition as one Pallas kernel (Triton backend): every layer in one launch, pools written in place.

A program takes a block of moves at a time: it reads the angles of their shifts once, then for each KV head the pairs
of dimensions that turn, those that do not, and the values. Programs stride over the blocks, so that a launch costs what
its moves cost, not what its capacity would: a step without moves ends at once. Sources are never targets, so the order
of programs does not matter. Angles come from tables: computing them in the kernel takes twice the registers and spills.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.reposition.api import MoveBatch, Rotation

#: Moves of one block, and most programs a layer (several for each multiprocessor of any GPU of today).
BLOCK, PROGRAMS = 32, 512
NUM_WARPS = 4


def reposition(
    k_pool: Array,
    v_pool: Array,
    moves: MoveBatch,
    cos: Array,
    sin: Array,
    rotation: Rotation,
    *,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """See `api.Reposition`. `interpret` runs it without a GPU, slowly."""
    shape = k_pool.shape
    # [L, P, G*D] and [K, N, r]; reshaping copies nothing.
    k_pool, v_pool = (pool.reshape((1, *shape)[-3:]) for pool in (k_pool, v_pool))
    cos, sin = (table.reshape((1, *table.shape)[-3:]) for table in (cos, sin))
    layers, capacity = k_pool.shape[0], moves.source.shape[0]
    kinds = jnp.asarray(rotation.tables or (0,) * layers, jnp.int32)
    programs = min(pl.cdiv(capacity, BLOCK), PROGRAMS)
    num = jnp.asarray(moves.num, jnp.int32).reshape(1)
    pools = tuple(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool))
    keys, values = pl.pallas_call(
        functools.partial(_kernel, rotation=rotation, programs=programs),
        grid=(programs, layers),
        out_shape=pools,
        input_output_aliases={0: 0, 1: 1},
        compiler_params=plt.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
        name="reposition",
    )(k_pool, v_pool, *(jnp.asarray(column, jnp.int32) for column in moves[:3]), num, kinds, cos, sin)
    return keys.reshape(shape), values.reshape(shape)


interpreted = functools.partial(reposition, interpret=True)


def _kernel(
    k_ref: Any,
    v_ref: Any,
    source_ref: Any,
    target_ref: Any,
    shift_ref: Any,
    num_ref: Any,
    kinds_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    k_out: Any,
    v_out: Any,
    *,
    rotation: Rotation,
    programs: int,
) -> None:
    """Blocks `program`, `program + programs`, … of one layer's moves."""
    first, layer = pl.program_id(0), pl.program_id(1)
    num, kind = num_ref[0], kinds_ref[layer]
    dim, half = rotation.head_dim, cos_ref.shape[-1]
    pair, pairs = _columns(half)
    rest, rests = _columns(dim - 2 * half)
    whole, wholes = _columns(dim)
    step = 1 if rotation.rotary_style == "half" else 2
    low, high = pair * step, pair * step + (half if rotation.rotary_style == "half" else 1)

    def block(turn: Array, _: None) -> None:
        move = (first + turn * programs) * BLOCK + jnp.arange(BLOCK)
        # Masked lanes read move 0 and write nothing: an index that is no page must never be made an address.
        mine = move < num
        move = jnp.where(mine, move, 0)
        source, target, shift = (
            plt.load(ref.at[move], mask=mine, other=0)[:, None] for ref in (source_ref, target_ref, shift_ref)
        )
        mine = mine[:, None]
        angle, turning = jnp.abs(shift), mine & pairs
        cos = plt.load(cos_ref.at[kind, angle, pair], mask=turning, other=1.0)
        sin = plt.load(sin_ref.at[kind, angle, pair], mask=turning, other=0.0)
        sin = jnp.where(shift < 0, -sin, sin)
        for head in range(rotation.num_kv_heads):
            start = head * dim
            a, b = (_numbers(k_ref, (layer, source, start + column), turning) for column in (low, high))
            _store(k_out, (layer, target, start + low), a * cos - b * sin, turning)
            _store(k_out, (layer, target, start + high), b * cos + a * sin, turning)
            _copy(v_ref, v_out, (layer, source, start + whole), (layer, target, start + whole), mine & wholes)
            if dim > 2 * half:
                where = start + 2 * half + rest
                _copy(k_ref, k_out, (layer, source, where), (layer, target, where), mine & rests)

    blocks = (num + BLOCK - 1) // BLOCK
    lax.fori_loop(0, (blocks - first + programs - 1) // programs, block, None)


def _columns(count: int) -> tuple[Array, Array]:
    """Column numbers [1, n] for the least power of two n >= count, and which of them are below count."""
    columns = jnp.arange(pl.next_power_of_2(max(count, 1)))[None, :]
    return columns, columns < count


def _numbers(ref: Any, where: tuple[Any, ...], mask: Array) -> Array:
    """Float32 of what is stored there."""
    stored = plt.load(ref.at[where], mask=mask, other=0)
    if stored.dtype == jnp.uint16:
        stored = lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored.astype(jnp.float32)


def _store(ref: Any, where: tuple[Any, ...], numbers: Array, mask: Array) -> None:
    if ref.dtype == jnp.uint16:
        plt.store(ref.at[where], lax.bitcast_convert_type(numbers.astype(jnp.bfloat16), jnp.uint16), mask=mask)
    else:
        plt.store(ref.at[where], numbers.astype(ref.dtype), mask=mask)


def _copy(ref: Any, out: Any, source: tuple[Any, ...], target: tuple[Any, ...], mask: Array) -> None:
    plt.store(out.at[target], plt.load(ref.at[source], mask=mask, other=0), mask=mask)
