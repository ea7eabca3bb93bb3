"""The grouped matrix product as one Pallas-Triton kernel.

Rows are cut into tiles that never straddle two groups: each group's rows start a new tile, so a launch of R rows and E
groups has at most R / tile + min(E, R) + 1 of them, whatever the sizes. A program computes one tile of one block of
outputs. Programs of one group follow each other, so that they find its weights in the L2 cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Config(NamedTuple):
    """Rows, outputs and inputs of one program's blocks (powers of two, 16 or more), and how it is compiled."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """int32 [tiles]: rows start .. stop - 1 are of one group; of none, and zeros, where the group is E."""

    group: Array
    start: Array
    stop: Array


def choose(rows: int, groups: int, dtype: jnp.dtype) -> Config:
    """Blocks for that many rows, spread over that many groups. All of them compile for sm_80 without spills."""
    if dtype == jnp.float32:
        return Config(16, 32, 32, num_warps=4, num_stages=2)
    # Few rows a group read the weights once and are bound by that: many programs, deep pipelines.
    if rows <= 32 * groups:
        return Config(16, 64, 128, num_warps=4, num_stages=3)
    return Config(128, 128, 64, num_warps=8, num_stages=3)


def grouped_matmul(
    x: Array,
    weight: Array,
    sizes: Array,
    bias: Array | None = None,
    *,
    out: Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> Array:
    """See `api.GroupedMatmul`. `out` float32 [R, O], if there is one, is written over."""
    rows, (groups, outputs, _) = len(x), weight.shape
    config = config or choose(rows, groups, x.dtype)
    tiles = tiles_of(sizes, rows, config.rows)
    kernel = functools.partial(_kernel, config=config, bias=bias is not None)
    operands = (*tiles, x, weight, *(() if bias is None else (bias,)), *(() if out is None else (out,)))
    return pl.pallas_call(
        kernel,
        grid=(len(tiles.group), pl.cdiv(outputs, config.outputs)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        input_output_aliases={} if out is None else {len(operands) - 1: 0},
        interpret=interpret,
        name="grouped_matmul",
    )(*operands)


interpreted = functools.partial(grouped_matmul, interpret=True)


def tiles_of(sizes: Array, rows: int, tile: int) -> Tiles:
    """Cut `rows` rows, of which group e has `sizes[e]`, into tiles of at most `tile`; spare tiles are empty."""
    groups = sizes.shape[0]
    # The rows of no group are one more.
    sizes = jnp.concatenate([sizes, rows - sizes.sum(keepdims=True)])
    stops, last = jnp.cumsum(sizes), jnp.cumsum((sizes + tile - 1) // tile)
    index = jnp.arange(rows // tile + min(groups + 1, rows), dtype=jnp.int32)
    group = (index[:, None] >= last[None, :]).sum(axis=1, dtype=jnp.int32)
    spare, group = group > groups, jnp.minimum(group, groups)
    first = last[group] - (sizes[group] + tile - 1) // tile
    start = stops[group] - sizes[group] + (index - first) * tile
    stop = jnp.where(spare, start, jnp.minimum(start + tile, stops[group]))
    return Tiles(group, start, stop)


def _kernel(group_ref, start_ref, stop_ref, x_ref, weight_ref, *refs, config: Config, bias: bool) -> None:
    out_ref = refs[-1]
    (groups, outputs, inputs), (tile_rows, tile_outputs, tile_inputs, *_) = weight_ref.shape, config
    tile = pl.program_id(0)
    group = group_ref[tile]
    rows = start_ref[tile] + jnp.arange(tile_rows)
    columns = pl.program_id(1) * tile_outputs + jnp.arange(tile_outputs)
    mine, inside, owned = rows < stop_ref[tile], columns < outputs, group < groups
    # Masked lanes touch nothing, but what they would load is kept within the arrays.
    from_rows, from_columns = jnp.where(mine, rows, 0), jnp.where(inside, columns, 0)
    group = jnp.where(owned, group, 0)

    def step(index: Array, total: Array) -> Array:
        at = index * tile_inputs + jnp.arange(tile_inputs)
        x_mask, weight_mask = mine[:, None], inside[:, None]
        if inputs % tile_inputs:
            x_mask, weight_mask = x_mask & (at < inputs)[None, :], weight_mask & (at < inputs)[None, :]
        x = plt.load(x_ref.at[from_rows[:, None], at[None, :]], mask=x_mask, other=0.0)
        weight = plt.load(weight_ref.at[group, from_columns[:, None], at[None, :]], mask=weight_mask, other=0.0)
        return total + plt.dot(x, weight, trans_b=True, precision=lax.Precision.HIGHEST)

    # A tile of no group, and one of no rows, computes nothing.
    busy = owned & (start_ref[tile] < stop_ref[tile])
    steps = jnp.where(busy, jnp.int32(pl.cdiv(inputs, tile_inputs)), jnp.int32(0))
    total = lax.fori_loop(0, steps, step, jnp.zeros((tile_rows, tile_outputs), jnp.float32))
    if bias:
        shift = plt.load(refs[0].at[group, from_columns], mask=inside & owned, other=0.0)
        total = total + shift.astype(jnp.float32)[None, :]
    plt.store(out_ref.at[rows[:, None], columns[None, :]], total, mask=mine[:, None] & inside[None, :])
