"""Segment-batch attention in plain XLA: loops over tasks and blocks of pages with traced trip counts (DESIGN R3).

Softmax is taken online, block by block, so neither a mask nor a score matrix of the whole length ever exists. A block
is one dot a KV head, with the query heads that share it stacked, of one query or of all queries of a tile.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.numerics import cpu_multiplies_bfloat16, dot
from pallas_kernels.rotary import rotate
from pallas_kernels.segment_attention.api import LIST_PADDING, Attention, Lists, SegmentBatch

#: Entries of a page list read at once.
BLOCK = LIST_PADDING
_LOWEST = -1e30


class _Softmax(NamedTuple):
    """Running maximum [M], sum [M] and weighted values [M, E] of M query vectors."""

    top: Array
    total: Array
    values: Array


class _Inputs(NamedTuple):
    k_pool: Array
    v_pool: Array
    batch: SegmentBatch
    cos: Array
    sin: Array
    sinks: Array | None


def segment_attention(
    q: Array,
    k_pool: Array,
    v_pool: Array,
    batch: SegmentBatch,
    cos: Array,
    sin: Array,
    sinks: Array | None,
    attention: Attention,
) -> Array:
    """See `api.SegmentAttention`."""
    inputs = _Inputs(k_pool, v_pool, batch, cos, sin, sinks)
    scaled, out = q * attention.scale, jnp.zeros_like(q)
    # A row is bound by reading K and V, which bfloat16 bits are widened for at next to no cost.
    wide = k_pool.dtype == jnp.uint16
    out = _tasks(scaled.astype(jnp.float32) if wide else scaled, out, batch.rows, 1, inputs, attention)
    if not batch.tiles.query.shape[0]:
        return out
    wide = wide and not cpu_multiplies_bfloat16()
    return _tasks(scaled.astype(jnp.float32) if wide else scaled, out, batch.tiles, attention.tile, inputs, attention)


def _tasks(q: Array, out: Array, lists: Lists, size: int, inputs: _Inputs, attention: Attention) -> Array:
    """Tasks of up to `size` queries of q [T, H, D], written over `out` [T, H, D]."""
    heads, groups, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    share = heads // groups
    rows = q.shape[0]
    # A slice past the end would be moved back by XLA: give every task room.
    q = jnp.pad(q, ((0, size - 1), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, size - 1), (0, 0), (0, 0)))
    positions = jnp.pad(jnp.asarray(inputs.batch.query_positions), (0, size - 1))
    sinks: list[Array | None] = [None] * groups
    if inputs.sinks is not None:
        sinks = [jnp.tile(of_group, size) for of_group in inputs.sinks.reshape(groups, share)]

    def one(task: Array, out: Array) -> Array:
        first = jnp.asarray(lists.query)[task]
        mine = lax.dynamic_slice_in_dim(q, first, size).reshape(size, groups, share, dim)
        queries = [mine[:, group].reshape(size * share, dim) for group in range(groups)]
        position = jnp.repeat(lax.dynamic_slice_in_dim(positions, first, size), share)
        states = _attend(queries, sinks, position, lists, task, size == 1, inputs, attention)
        values = jnp.stack([s.values / jnp.maximum(s.total, 1e-30)[:, None] for s in states])
        values = values.reshape(groups, size, share, dim).swapaxes(0, 1).reshape(size, heads, dim).astype(out.dtype)
        mine = (jnp.arange(size) < jnp.asarray(lists.count)[task])[:, None, None]
        values = jnp.where(mine, values, lax.dynamic_slice_in_dim(out, first, size))
        return lax.dynamic_update_slice_in_dim(out, values, first, axis=0)

    return lax.fori_loop(0, lists.num, one, out)[:rows]


def _attend(
    queries: list[Array],
    sinks: list[Array | None],
    position: Array,
    lists: Lists,
    task: Array,
    single: bool,
    inputs: _Inputs,
    attention: Attention,
) -> list[_Softmax]:
    """One task: each of `queries` [M, D] against its KV head; `position` [M] of each, one for all where `single`."""
    length = lists.length[task]
    step = functools.partial(_block, queries, position, lists.first[task], length, single, inputs, attention)
    states = [_start(query, sink) for query, sink in zip(queries, sinks, strict=True)]
    # Blocks that every query reads all of need no mask: most of a long list.
    whole = lists.shared[task] // BLOCK if attention.window is None else 0
    states = lax.fori_loop(0, whole, functools.partial(step, False), states)
    return lax.fori_loop(whole, (length + BLOCK - 1) // BLOCK, functools.partial(step, True), states)


def _start(query: Array, sink: Array | None) -> _Softmax:
    values = jnp.zeros(query.shape, jnp.float32)
    if sink is None:
        return _Softmax(jnp.full(query.shape[:1], _LOWEST), jnp.zeros(query.shape[:1]), values)
    return _Softmax(sink.astype(jnp.float32), jnp.ones(query.shape[:1]), values)


def _block(
    queries: list[Array],
    position: Array,
    first: Array,
    length: Array,
    single: bool,
    inputs: _Inputs,
    attention: Attention,
    masked: bool,
    index: Array,
    states: list[_Softmax],
) -> list[_Softmax]:
    """Fold block `index` of the task's page list into the running softmax; not `masked` if every query reads it all."""
    start = first + index * BLOCK
    present = index * BLOCK + jnp.arange(BLOCK) < length
    pages = lax.dynamic_slice_in_dim(inputs.batch.pages, start, BLOCK)
    positions = lax.dynamic_slice_in_dim(inputs.batch.positions, start, BLOCK)
    if masked:
        pages = jnp.where(present, pages, 0)

    def fold() -> list[_Softmax]:
        keys, values = _load(inputs.k_pool, pages, queries[0].dtype), _load(inputs.v_pool, pages, queries[0].dtype)
        turned = queries
        if attention.shifts:
            shifts = lax.dynamic_slice_in_dim(inputs.batch.shifts, start, BLOCK)
            shifts = jnp.where(present, shifts, shifts[0]) if masked else shifts
            turned, keys = _turn(queries, keys, shifts, single, inputs, attention)
        seen = None
        if masked:
            distance = position[:, None] - positions[None, :]
            seen = present[None, :] & (distance >= 0)
            if attention.window is not None:
                seen &= distance < attention.window
        width = keys.shape[1] // len(queries)
        parts = [slice(i * width, (i + 1) * width) for i in range(len(queries))]
        return [
            _fold(query, keys[:, part], values[:, part], seen, state, attention)
            for query, part, state in zip(turned, parts, states, strict=True)
        ]

    if attention.window is None:
        return fold()
    newest = jnp.max(jnp.where(present, positions, -1))
    return lax.cond(position[0] - newest < attention.window, fold, lambda: states)


def _fold(
    query: Array, keys: Array, values: Array, seen: Array | None, state: _Softmax, attention: Attention
) -> _Softmax:
    """Keys and values [BLOCK, E]; `seen` bool [M, BLOCK] hides some from some."""
    scores = dot(query, keys, 1)
    if attention.softcap is not None:
        scores = attention.softcap * jnp.tanh(scores / attention.softcap)
    if seen is not None:
        # So far below any maximum that it counts nothing, even where a query has seen no key yet.
        scores = jnp.where(seen, scores, 2 * _LOWEST)
    top = jnp.maximum(state.top, scores.max(axis=1))
    weights = jnp.exp(scores - top[:, None])
    keep = jnp.exp(state.top - top)
    return _Softmax(
        top,
        state.total * keep + weights.sum(axis=1),
        state.values * keep[:, None] + dot(weights.astype(values.dtype), values, 0),
    )


def _turn(
    queries: list[Array], keys: Array, shifts: Array, single: bool, inputs: _Inputs, attention: Attention
) -> tuple[list[Array], Array]:
    """Bring a block's key rows [BLOCK, G*D] to their present positions (DESIGN C8, on_read).

    For a single query it is cheaper to turn the query back instead, where the whole block has one shift.
    """

    def turn(rows: Array, shifts: Array) -> Array:
        distance = jnp.abs(shifts)
        cos, sin = inputs.cos[distance], inputs.sin[distance] * jnp.sign(shifts).astype(jnp.float32)[:, None]
        heads = rows.reshape(len(rows), -1, attention.head_dim)
        return rotate(heads, cos, sin, style=attention.rotary_style).reshape(rows.shape)

    uniform = shifts[0] if single else 0
    mixed = jnp.any(shifts != uniform)
    keys = lax.cond(mixed, lambda keys: turn(keys, shifts), lambda keys: keys, keys)
    if single:
        together = jnp.concatenate(queries)
        together = turn(together, jnp.broadcast_to(jnp.where(mixed, 0, -shifts[0]), together.shape[:1]))
        queries = jnp.split(together, len(queries))
    return queries, keys


def _load(pool: Array, pages: Array, dtype: jnp.dtype) -> Array:
    """Rows of the pool as numbers of that dtype."""
    rows = pool.at[pages].get(mode="promise_in_bounds")
    if rows.dtype != jnp.uint16:
        return rows.astype(dtype)
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(rows.astype(jnp.uint32) << 16, jnp.float32)
    return lax.bitcast_convert_type(rows, jnp.bfloat16).astype(dtype)
