"""Segment-batch attention for GPUs: one kernel in Pallas' Triton backend, launched for rows and again for tiles.

A program takes *items* in turn: one KV head, a few queries with all query heads that share it, and a *stretch* of their
page list. It walks the stretch block by block, gathering keys and values straight from the pool, with the softmax taken
online. Where there are too few queries to fill the device, lists are cut into several stretches, whose results a second
kernel merges. How many items there are is a value; how many programs there are is a shape (DESIGN R3).

Keys that are stored turned are read as they are: for every run of entries of one shift the queries are turned back
instead, once (DESIGN C8). Where no entry has a shift there is one run, and turning by nothing reads no table.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.segment_attention.api import Attention, Lists, SegmentBatch
from pallas_kernels.segment_attention.triton_kernels import (
    Config,
    Division,
    Form,
    Kind,
    Operands,
    Softmax,
    base_of,
    segment_attention_merge,
    segment_attention_walk,
    stretches_of,
)

#: Most programs of a launch: more than a device runs at once, to even out what each of them takes.
_PROGRAMS = 1024
#: Lists are cut until there are about this many items: enough for a device of 108 or 132 multiprocessors, of which each
#: runs one program with tiles at a time, or a few with rows.
_ITEMS = {"rows": 512, "tiles": 256}

#: By kind, dtype and head_dim (up to). Found by compiling every case, and the steps of benchmarks/aot, for an A100
#: (sm_80, jaxlib 0.10.2, ptxas 13.0): large blocks for which none of them spills a register, with and without shifts,
#: soft-cap and sinks. 64 entries for bfloat16 tiles of 64 dimensions spill 12 bytes where three heads share, and
#: nothing where eight do. Five stages hold two blocks of keys and values, three hold one: page numbers are loaded a
#: stage ahead.
_CONFIGS = {
    ("rows", "bfloat16", 64): Config(16, 64, 4, 5, 256),
    ("rows", "bfloat16", 128): Config(16, 64, 4, 5, 256),
    ("rows", "float32", 64): Config(16, 64, 4, 3, 256),
    ("rows", "float32", 128): Config(16, 32, 4, 3, 256),
    ("tiles", "bfloat16", 64): Config(128, 32, 8, 5, 512),
    ("tiles", "bfloat16", 128): Config(128, 32, 8, 5, 512),
    ("tiles", "float32", 64): Config(64, 16, 8, 3, 512),
    ("tiles", "float32", 128): Config(32, 16, 8, 3, 512),
}
#: Instead, where there is a window, pairs are interleaved, or more than 16 heads share: there ptxas spills a few bytes
#: of the above to fit one more block on a multiprocessor, and of these where there is nothing of the kind.
_OTHERS = {
    ("rows", "float32", 64): Config(16, 32, 8, 3, 256),
    ("rows", "float32", 128): Config(16, 16, 8, 3, 256),
}


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
    interpret: bool = False,
) -> Array:
    """See `api.SegmentAttention`. `out` holds rows of no task, zeros by default; `interpret` needs no GPU, slowly."""
    only_rows = batch.tiles.query.shape[0] == 0
    if only_rows:
        # Empty arrays are no operands for Pallas.
        batch = batch._replace(tiles=batch.rows)
    operands = Operands(q, k_pool, v_pool, batch, cos, sin, sinks)
    # Zeros that wait for the queries: XLA would make those of all layers at once, at the start, and keep them.
    before = lax.optimization_barrier((q, jnp.zeros_like(q)))[1] if out is None else out
    rows = launch("rows", operands, batch.rows, before, attention, interpret=interpret)
    return rows if only_rows else launch("tiles", operands, batch.tiles, rows, attention, interpret=interpret)


interpreted = functools.partial(segment_attention, interpret=True)


def config_of(kind: Kind, attention: Attention, dtype: Any) -> Config:
    """The choice for queries of `dtype`."""
    name, share = "float32" if jnp.dtype(dtype) == jnp.float32 else "bfloat16", _share(attention)
    key = kind, name, 64 if attention.head_dim <= 64 else 128
    plain = attention.window is None and attention.rotary_style == "half" and share <= 16
    chosen = _CONFIGS[key] if plain else _OTHERS.get(key, _CONFIGS[key])
    # No more than a task has, and no fewer than one query has.
    most = pl.next_power_of_2(share * (attention.tile if kind == "tiles" else 1))
    return chosen._replace(vectors=max(16, pl.next_power_of_2(share), min(chosen.vectors, most)))


def launch(kind: Kind, operands: Operands, tasks: Lists, out: Array, attention: Attention, *, interpret: bool) -> Array:
    """Write the rows of these tasks over `out` [T, H, D], and nothing else."""
    form, groups = _form(kind, attention, operands.q.dtype), attention.num_kv_heads
    division, tasks = _divide(tasks, form), tasks._replace(num=jnp.reshape(tasks.num, 1))
    tiles = tasks.query.shape[0] * pl.cdiv(attention.tile if kind == "tiles" else 1, form.queries)
    programs = min(_PROGRAMS, (tiles + _items(form)) * groups)
    call = functools.partial(_call, programs=3 if interpret else programs, interpret=interpret)
    slots = (2 * _items(form), groups, form.config.vectors)
    numbers = jax.ShapeDtypeStruct(slots, jnp.float32)
    partial = Softmax(numbers, numbers, jax.ShapeDtypeStruct((*slots, attention.head_dim), jnp.float32))
    if not attention.shifts:
        operands = operands._replace(cos=None, sin=None)
    inputs = operands, tasks, division
    out, partial = call(functools.partial(segment_attention_walk, form), inputs, out, (partial,), *form.config[2:4])
    return call(functools.partial(segment_attention_merge, form), (tasks, division, partial), out, (), 4, 2)[0]


def _call(
    kernel: Any, inputs: Any, out: Array, others: Any, warps: int, stages: int, *, programs: int, interpret: bool
) -> Any:
    """Run a kernel over references to `inputs`, `out`, `out` again as it is written, and `others`: (out, *others)."""
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=(jax.ShapeDtypeStruct(out.shape, out.dtype), *others),
        input_output_aliases={len(jax.tree.leaves(inputs)): 0},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*inputs, out)


def _form(kind: Kind, attention: Attention, dtype: Any) -> Form:
    config, share = config_of(kind, attention, dtype), _share(attention)
    dim = max(16, pl.next_power_of_2(attention.head_dim))
    return Form(kind, attention, config, config.vectors // share if kind == "tiles" else 1, share, dim)


def _share(attention: Attention) -> int:
    return attention.num_heads // attention.num_kv_heads


def _items(form: Form) -> int:
    """How many items, for one KV head, lists are cut into."""
    return max(1, _ITEMS[form.kind] // form.attention.num_kv_heads)


def _divide(tasks: Lists, form: Form) -> Division:
    """Cut long lists, all into stretches of the same length, so that a device has enough to do."""
    real = jnp.arange(tasks.query.shape[0]) < tasks.num
    count = jnp.where(real, tasks.count, 0)
    tiles = pl.cdiv(count, form.queries)
    entries = jnp.where(real, tasks.length - base_of(tasks.shared, form), 0)
    # Tasks that are cut come to at most twice `entries * tiles / stretch` items: that many slots there are.
    work = jnp.sum(entries.astype(jnp.float32) * tiles)
    stretch = jnp.ceil(work * 1.001 / _items(form)).astype(jnp.int32)
    stretch = pl.cdiv(jnp.maximum(stretch, form.config.stretch), form.config.entries) * form.config.entries
    stretches = stretches_of(entries, stretch)
    items = tiles * stretches
    pieces = jnp.where(stretches > 1, items, 0)
    ends, slots, merges = jnp.cumsum(jnp.stack([items, pieces, jnp.where(stretches > 1, count, 0)]), axis=1)
    return Division(ends, slots - pieces, merges, stretch[None], jnp.stack([ends[-1], merges[-1]]))
