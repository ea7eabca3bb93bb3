"""The kernels of `triton.py`: one walks page lists, the other merges what lists in several stretches came to.

Arguments are named tuples of references, in the place of the arrays that `triton.launch` gives. Everything else is
values; blocks are powers of two. Scores are in base 2.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.numerics import dot
from pallas_kernels.segment_attention.api import Attention, Lists, SegmentBatch

#: Below every score. It is finite, so that what is masked (-inf) weighs nothing where a query has seen no entry yet.
LOWEST = -1e30
_LOG2E = 1.4426950408889634
#: Stretches that are merged at once.
_MERGED = 16

Kind = Literal["rows", "tiles"]


class Config(NamedTuple):
    """How one launch is cut up and compiled."""

    #: Query vectors of an item at most, and entries that it reads at once: powers of two, 16 or more.
    vectors: int
    entries: int
    num_warps: int
    num_stages: int
    #: Lists shorter than this are not cut.
    stretch: int


class Operands(NamedTuple):
    """The arguments of an `api.SegmentAttention`; kernels get references in their place, tables only for shifts."""

    q: Any
    k_pool: Any
    v_pool: Any
    batch: SegmentBatch
    cos: Any
    sin: Any
    sinks: Any


class Form(NamedTuple):
    """What is fixed in one launch."""

    kind: Kind
    attention: Attention
    config: Config
    #: Queries of an item at most, and query heads that share a KV head.
    queries: int
    share: int
    #: head_dim up to a power of two.
    dim: int


class Division(NamedTuple):
    """How tasks are cut into items: int32 [tasks], `stretch` int32 [1] and `num` int32 [2].

    ends: items, for one KV head, of all tasks up to and including this one. slots: those of cut tasks before this one.
    merges: queries of cut tasks up to and including this one. stretch: most entries of an item. num: the last of `ends`
    and the last of `merges`.
    """

    ends: Any
    slots: Any
    merges: Any
    stretch: Any
    num: Any


class Softmax(NamedTuple):
    """Running maximum (of scores in base 2), sum and weighted values of query vectors."""

    top: Any
    total: Any
    values: Any


class _Vectors(NamedTuple):
    """The query vectors of an item: row, head, position, and whether it is one at all; [vectors]."""

    row: Any
    head: Any
    position: Any
    mine: Any


class _Span(NamedTuple):
    """What an item reads: entries `start .. stop - 1` of the list that begins at `first` and, from `whole` on, not
    every query all of them."""

    first: Any
    start: Any
    whole: Any
    stop: Any


def base_of(shared: Any, form: Form) -> Any:
    """An entry before which no query of a task reads any, since positions increase."""
    window = form.attention.window
    return jnp.zeros_like(shared) if window is None else jnp.maximum(shared - window, 0)


def stretches_of(entries: Any, stretch: Any) -> Any:
    """How many stretches of that length so many entries are cut into; one even if there are none."""
    return jnp.maximum(lax.div(entries + stretch - 1, stretch), 1)


def _each(num: Any, body: Any) -> None:
    """Call `body` with 0 .. num - 1, this program with its share of them."""
    program, programs = pl.program_id(0), pl.num_programs(0)
    turns = lax.div(num - program + programs - 1, programs)
    lax.fori_loop(0, turns, lambda turn, _: body(program + turn * programs), None)


def _find(ends: Any, item: Any) -> tuple[Any, Any]:
    """The task that an item is of, and how many items there are before that task's."""
    tasks = ends.shape[0]
    bits = tasks.bit_length()

    def halve(turn: Any, found: Any) -> Any:
        probe = found + lax.shift_right_logical(jnp.int32(1 << (bits - 1)), turn)
        past = ends[jnp.minimum(probe, tasks) - 1] <= item
        return jnp.where((probe <= tasks) & past, probe, found)

    found = lax.fori_loop(0, bits, halve, jnp.int32(0))
    return found, jnp.where(found > 0, ends[jnp.maximum(found - 1, 0)], 0)


def segment_attention_walk(
    form: Form, operands: Operands, tasks: Lists, division: Division, _: Any, out: Any, partial: Any
) -> None:
    """Every item: results of lists in one stretch go to `out`, of others to `partial`."""
    groups, num = form.attention.num_kv_heads, division.num[0]

    def one(item: Any) -> None:
        # The last first: within a segment they read most.
        _item(form, operands, tasks, division, out, partial, lax.rem(item, groups), num - 1 - lax.div(item, groups))

    _each(num * groups, one)


def _item(
    form: Form, operands: Operands, tasks: Lists, division: Division, out: Any, partial: Any, group: Any, item: Any
) -> None:
    task, before = _find(division.ends, item)
    query, count, first, length, shared = (column[task] for column in tasks[:5])
    base, stretch = base_of(shared, form), division.stretch[0]
    stretches = stretches_of(length - base, stretch)
    tile, piece = lax.div(item - before, stretches), lax.rem(item - before, stretches)
    vectors = _vectors(form, operands, group, query, count, tile)
    # Positions are whole numbers and increase: so many entries at most are between two of them.
    begin = tile * form.queries
    last = jnp.minimum(begin + form.queries, count) - 1
    at = [operands.batch.query_positions[query + i] for i in (0, begin, last, count - 1)]
    reached = jnp.maximum(shared, length - (at[3] - at[1]))
    start, stop = base + piece * stretch, jnp.minimum(length, shared + (at[2] - at[0]))
    stop = jnp.minimum(stop, start + stretch)
    if form.attention.window is not None:
        start = jnp.maximum(start, reached - form.attention.window)
    state = _start(form, operands, vectors, piece == 0)
    state = _read(form, operands, group, vectors, _Span(first, start, reached, stop), state)

    @pl.when(stretches == 1)
    def _() -> None:
        dims = jnp.arange(form.dim)
        values = state.values / jnp.maximum(state.total, 1e-30)[:, None]
        mask = vectors.mine[:, None] & (dims < form.attention.head_dim)[None, :]
        at = out.at[vectors.row[:, None], vectors.head[:, None], dims[None, :]]
        plt.store(at, values.astype(out.dtype), mask=mask)

    @pl.when(stretches > 1)
    def _() -> None:
        dims, each = jnp.arange(form.dim), jnp.arange(form.config.vectors)
        slot = division.slots[task] + item - before
        plt.store(partial.top.at[slot, group, each], state.top)
        plt.store(partial.total.at[slot, group, each], state.total)
        mask = jnp.broadcast_to((dims < form.attention.head_dim)[None, :], state.values.shape)
        plt.store(partial.values.at[slot, group, each[:, None], dims[None, :]], state.values, mask=mask)


def _vectors(form: Form, operands: Operands, group: Any, query: Any, count: Any, tile: Any) -> _Vectors:
    each = jnp.arange(form.config.vectors)
    local, head = lax.div(each, form.share), group * form.share + lax.rem(each, form.share)
    index = tile * form.queries + local
    mine, row = (local < form.queries) & (index < count), query + index
    position = _load(operands.batch.query_positions, (row,), mine)
    return _Vectors(row, head, position, mine)


def _start(form: Form, operands: Operands, vectors: _Vectors, first: Any) -> Softmax:
    """Before anything is read. A sink counts in the first stretch."""
    size = form.config.vectors
    top, total = jnp.full(size, LOWEST, jnp.float32), jnp.zeros(size, jnp.float32)
    if operands.sinks is not None:
        sink = plt.load(operands.sinks.at[vectors.head]).astype(jnp.float32) * _LOG2E
        top, total = jnp.where(first, sink, top), jnp.where(first, 1.0, total)
    return Softmax(top, total, jnp.zeros((size, form.dim), jnp.float32))


def _read(form: Form, operands: Operands, group: Any, vectors: _Vectors, span: _Span, state: Softmax) -> Softmax:
    """Fold a whole span into `state`, run by run where there are shifts."""
    if not form.attention.shifts:
        return _blocks(form, operands, group, vectors, _load_query(form, operands, vectors), span, state)

    def run(carry: tuple[Any, Softmax]) -> tuple[Any, Softmax]:
        start, state = carry
        entry = span.first + start
        stop = jnp.minimum(operands.batch.run_stops[entry] - span.first, span.stop)
        q = _turned_query(form, operands, vectors, operands.batch.shifts[entry])
        part = span._replace(start=start, stop=stop)
        return stop, _blocks(form, operands, group, vectors, q, part, state)

    return lax.while_loop(lambda carry: carry[0] < span.stop, run, (span.start, state))[1]


def _load_query(form: Form, operands: Operands, vectors: _Vectors) -> Any:
    dims = jnp.arange(form.dim)
    mask = vectors.mine[:, None] & (dims < form.attention.head_dim)[None, :]
    return plt.load(operands.q.at[vectors.row[:, None], vectors.head[:, None], dims[None, :]], mask=mask, other=0)


def _turned_query(form: Form, operands: Operands, vectors: _Vectors, shift: Any) -> Any:
    """The query vectors [vectors, dim] turned by -shift, in float32. By 0 reads no tables and no partners."""
    q, dims, pairs = _load_query(form, operands, vectors), jnp.arange(form.dim), operands.cos.shape[1]
    turned = (dims < 2 * pairs) & (shift != 0)
    if form.attention.rotary_style == "half":
        second = dims >= pairs
        partner, angle = jnp.where(second, dims - pairs, dims + pairs), jnp.where(second, dims - pairs, dims)
        # Both go on for so long side by side: the compiler cannot know, and would load one at a time.
        side = pairs & -pairs
        partner, angle = (plt.max_contiguous(pl.multiple_of(index, side), side) for index in (partner, angle))
        at = operands.q.at[vectors.row[:, None], vectors.head[:, None], partner[None, :]]
        other = plt.load(at, mask=vectors.mine[:, None] & turned[None, :], other=0)
    else:
        second, angle = lax.rem(dims, 2) == 1, lax.div(dims, 2)
        even, odd = jnp.unstack(q.reshape(len(q), -1, 2), axis=2)
        other = jnp.stack([odd, even], axis=2).reshape(q.shape)
    row = jnp.abs(shift)
    cos = plt.load(operands.cos.at[row, angle], mask=turned, other=1.0)
    sin = plt.load(operands.sin.at[row, angle], mask=turned, other=0.0)
    # By an angle, (a, b) becomes (a cos - b sin, b cos + a sin); here it is -shift.
    sin = jnp.where(second == (shift < 0), sin, -sin)
    return (q.astype(jnp.float32) * cos[None, :] + other.astype(jnp.float32) * sin[None, :]).astype(q.dtype)


def _blocks(
    form: Form, operands: Operands, group: Any, vectors: _Vectors, q: Any, span: _Span, state: Softmax
) -> Softmax:
    """Fold entries of one shift: first blocks that need no mask, then what is left."""
    size = form.config.entries
    fold = functools.partial(_fold, form, operands, group, vectors, q, span)
    start = span.start
    if form.attention.window is None:
        whole = lax.div(jnp.maximum(jnp.minimum(span.whole, span.stop) - start, 0), size)
        state = lax.fori_loop(0, whole, lambda block, state: fold(False, start + block * size, state), state)
        start += whole * size
    left = lax.div(span.stop - start + size - 1, size)
    return lax.fori_loop(0, left, lambda block, state: fold(True, start + block * size, state), state)


def _fold(
    form: Form,
    operands: Operands,
    group: Any,
    vectors: _Vectors,
    q: Any,
    span: _Span,
    masked: bool,
    start: Any,
    state: Softmax,
) -> Softmax:
    """One block of entries. Not `masked`: every query reads all of it."""
    attention, entry = form.attention, start + jnp.arange(form.config.entries)
    present = entry < span.stop if masked else None
    pages = _load(operands.batch.pages, (span.first + entry,), present)
    keys = _load_heads(form, operands.k_pool, pages, group, present, q.dtype)
    scores = dot(q, keys, 1)
    if attention.softcap is None:
        scale = attention.scale * _LOG2E
    else:
        scores, scale = jnp.tanh(scores * (attention.scale / attention.softcap)), attention.softcap * _LOG2E
    if present is not None:
        positions = _load(operands.batch.positions, (span.first + entry,), present)
        distance = vectors.position[:, None] - positions[None, :]
        seen = present[None, :] & (distance >= 0)
        if attention.window is not None:
            seen &= distance < attention.window
        scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(state.top, jnp.max(scores, axis=1) * scale)
    weights = jnp.exp2(scores * scale - top[:, None])
    keep = jnp.exp2(state.top - top)
    values = _load_heads(form, operands.v_pool, pages, group, present, q.dtype)
    return Softmax(
        top,
        state.total * keep + jnp.sum(weights, axis=1),
        state.values * keep[:, None] + dot(weights.astype(q.dtype), values, 0),
    )


def _load(column: Any, index: tuple[Any, ...], mask: Any) -> Any:
    """Zero where masked out: never an address that nobody gave."""
    return plt.load(column.at[index]) if mask is None else plt.load(column.at[index], mask=mask, other=0)


def _load_heads(form: Form, pool: Any, pages: Any, group: Any, present: Any, dtype: Any) -> Any:
    """One KV head of pages: [entries, dim]."""
    size, dims = form.attention.head_dim, jnp.arange(form.dim)
    mask = None if present is None else present[:, None]
    if size < form.dim:
        mask = (dims < size)[None, :] if mask is None else mask & (dims < size)[None, :]
    if mask is not None:
        mask = jnp.broadcast_to(mask, (form.config.entries, form.dim))
    rows = _load(pool, (pages[:, None], (group * size + dims)[None, :]), mask)
    return (lax.bitcast_convert_type(rows, jnp.bfloat16) if rows.dtype == jnp.uint16 else rows).astype(dtype)


def segment_attention_merge(form: Form, tasks: Lists, division: Division, partial: Softmax, _: Any, out: Any) -> None:
    """Put the stretches of cut tasks together: one query vector after the other."""
    heads, size = form.attention.num_heads, form.attention.head_dim
    dims = jnp.arange(form.dim)

    def one(vector: Any) -> None:
        head, query = lax.rem(vector, heads), lax.div(vector, heads)
        task, before = _find(division.merges, query)
        row, length, shared = (column[task] for column in (tasks.query, tasks.length, tasks.shared))
        stretches = stretches_of(length - base_of(shared, form), division.stretch[0])
        index = query - before
        slot = division.slots[task] + lax.div(index, form.queries) * stretches
        place = lax.div(head, form.share), lax.rem(index, form.queries) * form.share + lax.rem(head, form.share)

        def fold(block: Any, state: Softmax) -> Softmax:
            piece = block * _MERGED + jnp.arange(_MERGED)
            there = piece < stretches
            tops = plt.load(partial.top.at[slot + piece, *place], mask=there, other=LOWEST)
            totals = plt.load(partial.total.at[slot + piece, *place], mask=there, other=0.0)
            at = partial.values.at[(slot + piece)[:, None], *place, dims[None, :]]
            values = plt.load(at, mask=there[:, None] & (dims < size)[None, :], other=0.0)
            top = jnp.maximum(state.top, jnp.max(tops))
            weights, keep = jnp.exp2(tops - top), jnp.exp2(state.top - top)
            return Softmax(
                top,
                state.total * keep + jnp.sum(weights * totals),
                state.values * keep + jnp.sum(weights[:, None] * values, axis=0),
            )

        state = Softmax(jnp.float32(LOWEST), jnp.float32(0.0), jnp.zeros(form.dim, jnp.float32))
        state = lax.fori_loop(0, lax.div(stretches + _MERGED - 1, _MERGED), fold, state)
        values = state.values / jnp.maximum(state.total, 1e-30)
        plt.store(out.at[row + index, head, dims], values.astype(out.dtype), mask=dims < size)

    _each(division.num[1] * heads, one)
