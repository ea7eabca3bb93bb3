"""Segment-batch attention in plain XLA: loops over tasks and blocks of pages with traced trip counts (DESIGN R3).

Softmax is taken online, a block or four at a time, so neither a mask nor a score matrix of the whole length ever
exists. A block is one dot a KV head, with the query heads that share it stacked, of one query or of all queries of a
tile. A list without shifts is walked by the code that `shifts=False` has (DESIGN C8).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.numerics import cpu_multiplies_bfloat16, dot
from pallas_kernels.rotary import rotate
from pallas_kernels.segment_attention.api import LIST_PADDING, Attention, Lists, SegmentBatch

#: Entries of a page list read at once.
BLOCK = LIST_PADDING
#: Blocks of a single query's list that are folded in together: their dots do not wait for one another.
TOGETHER = 4
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
    *,
    out: Array | None = None,
) -> Array:
    """See `api.SegmentAttention`. `out` holds rows of no task; zeros by default."""
    inputs = _Inputs(k_pool, v_pool, batch, cos, sin, sinks)
    scaled, out = q * attention.scale, jnp.zeros_like(q) if out is None else out
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
        single = size == 1
        position = lax.dynamic_slice_in_dim(positions, first, size)
        position = position if single else jnp.repeat(position, share)
        states = _attend(queries, sinks, position, lists, task, single, inputs, attention)
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
    """One task: each of `queries` [M, D] against its KV head, at `position` [M], or [1] for all where `single`."""
    first, length = lists.first[task], lists.length[task]
    states = [_start(query, sink) for query, sink in zip(queries, sinks, strict=True)]
    if single:
        states = [_Softmax(*(jnp.concatenate(parts) for parts in zip(*states, strict=True)))]
    count = (length + BLOCK - 1) // BLOCK
    # Blocks that every query reads all of need no mask: most of a long list. One query's mask costs nothing.
    whole = lists.shared[task] // BLOCK if attention.window is None else 0

    def walk(
        start: Array | int, stop: Array | int, masked: bool, shifted: bool, states: list[_Softmax], together: int = 1
    ) -> Any:
        step = functools.partial(_blocks, queries, position, first, length, single, masked, shifted, inputs, attention)
        several = lambda i, states: step([i * together + j for j in range(together)], states)  # noqa: E731
        return lax.fori_loop(start, stop, several, states)

    def plain(states: list[_Softmax]) -> list[_Softmax]:
        if not single:
            return walk(whole, count, True, False, walk(0, whole, False, False, states))
        if attention.window is not None:
            return walk(0, count, True, False, states)
        groups = count // TOGETHER
        return walk(groups * TOGETHER, count, True, False, walk(0, groups, True, False, states, TOGETHER))

    if attention.shifts:
        # Decided once a list: one without shifts runs what it would run if there could be none.
        one_run = inputs.batch.run_stops[first] >= first + length
        unshifted = (inputs.batch.shifts[first] == 0) & one_run
        states = lax.cond(unshifted, plain, functools.partial(walk, 0, count, True, True), states)
    else:
        states = plain(states)
    if single:
        # Back to one a KV head.
        columns = (jnp.split(column, len(queries)) for column in states[0])
        states = [_Softmax(*of_group) for of_group in zip(*columns, strict=True)]
    return states


def _start(query: Array, sink: Array | None) -> _Softmax:
    values = jnp.zeros(query.shape, jnp.float32)
    if sink is None:
        return _Softmax(jnp.full(query.shape[:1], _LOWEST), jnp.zeros(query.shape[:1]), values)
    return _Softmax(sink.astype(jnp.float32), jnp.ones(query.shape[:1]), values)


def _blocks(
    queries: list[Array],
    position: Array,
    first: Array,
    length: Array,
    single: bool,
    masked: bool,
    shifted: bool,
    inputs: _Inputs,
    attention: Attention,
    indices: Sequence[Array],
    states: list[_Softmax],
) -> list[_Softmax]:
    """Fold these blocks of the task's page list into the running softmax; not `masked` if every query reads all of one.

    Several of them only for a single query, without shifts or a window: a shifted block turns the query its own way,
    and a window skips blocks one by one.
    """
    masks = []
    for index in indices:
        start = first + index * BLOCK
        present = index * BLOCK + jnp.arange(BLOCK) < length
        positions = lax.dynamic_slice_in_dim(inputs.batch.positions, start, BLOCK)
        seen = None
        if masked:
            distance = position[:, None] - positions[None, :]
            seen = present[None, :] & (distance >= 0)
            if attention.window is not None:
                seen &= distance < attention.window
        masks.append((start, present, positions, seen))

    def fold() -> list[_Softmax]:
        turned, loaded = queries, []
        for start, present, _, seen in masks:
            pages = lax.dynamic_slice_in_dim(inputs.batch.pages, start, BLOCK)
            pages = jnp.where(present, pages, 0) if masked else pages
            keys, values = (_load(pool, pages, queries[0].dtype) for pool in (inputs.k_pool, inputs.v_pool))
            if shifted:
                shifts = lax.dynamic_slice_in_dim(inputs.batch.shifts, start, BLOCK)
                shifts = jnp.where(present, shifts, shifts[0])
                turned, keys = _turn(queries, keys, shifts, single, inputs, attention)
            loaded.append((keys, values, seen))
        return _fold(turned, loaded, states, single, attention)

    if attention.window is None:
        return fold()
    ((_, present, positions, _),) = masks
    newest = jnp.max(jnp.where(present, positions, -1))
    return lax.cond(position[0] - newest < attention.window, fold, lambda: states)


def _fold(
    queries: list[Array],
    blocks: list[tuple[Array, Array, Array | None]],
    states: list[_Softmax],
    single: bool,
    attention: Attention,
) -> list[_Softmax]:
    """Blocks of keys and values [BLOCK, G*E]; the third, bool [M, BLOCK], hides some from some."""
    width = blocks[0][0].shape[1] // len(queries)
    columns = [slice(i * width, (i + 1) * width) for i in range(len(queries))]
    if not single:
        ((keys, values, seen),) = blocks
        weighted = lambda own: lambda weights: dot(weights, values[:, own], 0)  # noqa: E731
        return [
            _soften([(dot(query, keys[:, own], 1), seen, weighted(own))], state, values.dtype, attention)
            for query, own, state in zip(queries, columns, states, strict=True)
        ]

    # The few queries are turned around for the dot rather than the keys, and the softmax is one of all heads.
    def scored(keys: Array) -> Array:
        of_heads = [dot(keys[:, own], query, 1) for query, own in zip(queries, columns, strict=True)]
        return jnp.concatenate(of_heads, axis=1).T

    def summed(values: Array, weights: Array) -> Array:
        of_heads = jnp.split(weights, len(queries))
        return jnp.concatenate([dot(w, values[:, own], 0) for w, own in zip(of_heads, columns, strict=True)])

    softened = [(scored(keys), seen, functools.partial(summed, values)) for keys, values, seen in blocks]
    return [_soften(softened, states[0], blocks[0][1].dtype, attention)]


def _soften(
    blocks: list[tuple[Array, Array | None, Callable[[Array], Array]]],
    state: _Softmax,
    dtype: jnp.dtype,
    attention: Attention,
) -> _Softmax:
    """The state after blocks: scores [M, BLOCK], what is seen of them, and what sums its values by such weights."""
    all_scores = []
    for scores, seen, _ in blocks:
        if attention.softcap is not None:
            scores = attention.softcap * jnp.tanh(scores / attention.softcap)
        # So far below any maximum that it counts nothing, even where a query has seen no key yet.
        all_scores.append(scores if seen is None else jnp.where(seen, scores, 2 * _LOWEST))
    top = functools.reduce(jnp.maximum, [state.top, *(scores.max(axis=1) for scores in all_scores)])
    keep = jnp.exp(state.top - top)
    total, values = state.total * keep, state.values * keep[:, None]
    for scores, (_, _, weighted) in zip(all_scores, blocks, strict=True):
        weights = jnp.exp(scores - top[:, None])
        total, values = total + weights.sum(axis=1), values + weighted(weights.astype(dtype))
    return _Softmax(top, total, values)


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
    rows = pool.at[pages].get(mode="promise_in_bounds", wrap_negative_indices=False)
    if rows.dtype != jnp.uint16:
        return rows.astype(dtype)
    if dtype == jnp.float32:
        return lax.bitcast_convert_type(rows.astype(jnp.uint32) << 16, jnp.float32)
    return lax.bitcast_convert_type(rows, jnp.bfloat16).astype(dtype)
