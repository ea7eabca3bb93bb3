"""Launches of the kernels at the sizes that serving has, for timing. Needs JAX and NumPy only, as `gpu_check` does.

What is right is decided on the small cases of `pallas_kernels`; here are only shapes, random pages and random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.reposition.api import MOVE_PADDING, MoveBatch, Rotation
from pallas_kernels.segment_attention.api import LIST_PADDING, Attention, Lists, SegmentBatch


class Shape(NamedTuple):
    """Attention of a model."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    sinks: bool = False


SMOLLM2 = Shape("SmolLM2-135M", 9, 3, 64)
QWEN3 = Shape("Qwen3-30B-A3B", 32, 4, 128)
GPT_OSS = Shape("GPT-OSS-120B", 64, 8, 64, sinks=True)


@dataclass(frozen=True, slots=True)
class Launch:
    """`sequences` alike: after `context` resident entries, `queries` new ones in `segments` of equal size.

    Each segment reads everything before it and itself, causally: one query is a decode step, one segment a prefill,
    several are what a restore of holes looks like.
    """

    shape: Shape
    sequences: int = 1
    context: int = 0
    queries: int = 1
    segments: int = 1
    window: int | None = None
    #: Entries of one shift in a row, with a shift for every run; 0 has no shift where some are allowed, and None
    #: promises that there are none (C8).
    run: int | None = None
    tile: int = 128

    @property
    def entries(self) -> int:
        """Of one sequence."""
        return self.context + self.queries

    @property
    def pages(self) -> int:
        """That are read, all of them different."""
        return self.sequences * self.entries

    @property
    def flops(self) -> int:
        """Multiplications and additions of the two dots, over the keys that each query sees."""
        seen = np.arange(self.context, self.entries, dtype=np.int64) + 1
        seen = np.minimum(seen, self.window or self.entries)
        return int(4 * self.shape.num_heads * self.shape.head_dim * self.sequences * seen.sum())

    def bytes_read(self, itemsize: int) -> int:
        """K and V that each segment sees, once a segment and a window's worth where there is one; queries and results.

        What is read again by every tile of queries is not counted: a good kernel finds it in a cache.
        """
        size = self.queries // self.segments
        ends = self.context + size * (1 + np.arange(self.segments, dtype=np.int64))
        reach = np.minimum(ends, size - 1 + (self.window or self.entries))
        row = self.shape.num_kv_heads * self.shape.head_dim * itemsize
        other = 2 * self.queries * self.shape.num_heads * self.shape.head_dim * itemsize
        return int(self.sequences * (2 * row * reach.sum() + other))

    @property
    def attention(self) -> Attention:
        """What is fixed for the layer."""
        shape = self.shape
        return Attention(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            scale=shape.head_dim**-0.5,
            window=self.window,
            tile=self.tile,
            shifts=self.run is not None,
        )


def batch_of(launch: Launch, num_pages: int, seed: int = 0) -> SegmentBatch:
    """The lists and tasks of a launch, NumPy, over a pool of `num_pages` of which page 0 is never listed."""
    generator = np.random.default_rng(seed)
    size = launch.queries // launch.segments
    # A segment lists everything up to its own end, so the lists of one sequence begin alike.
    ends = launch.context + size * (1 + np.arange(launch.segments))
    pages = 1 + generator.permutation(num_pages - 1)[: launch.pages].astype(np.int32).reshape(launch.sequences, -1)
    lists = [pages[sequence, :end] for sequence in range(launch.sequences) for end in ends]
    positions = [np.arange(end, dtype=np.int32) for _ in range(launch.sequences) for end in ends]
    shifts = [_shifts(len(one), launch.run) for one in positions]
    query_positions = np.tile(np.arange(launch.context, launch.entries, dtype=np.int32), launch.sequences)
    firsts = np.cumsum([0, *map(len, lists)])
    rows, tiles = list[tuple[int, ...]](), list[tuple[int, ...]]()
    for index, one in enumerate(lists):
        own, tasks = (1, rows) if size == 1 else (launch.tile, tiles)
        for start in range(0, size, own):
            count, before = min(own, size - start), len(one) - size + start
            tasks.append((index * size + start, count, int(firsts[index]), before + count, before + 1))
    padding = np.zeros(LIST_PADDING, np.int32)
    columns: list[Any] = [np.concatenate([*column, padding]) for column in (lists, positions, shifts)]
    stops = np.append(np.flatnonzero(np.diff(columns[2])) + 1, len(columns[2])).astype(np.int32)
    columns += [np.repeat(stops, np.diff(stops, prepend=0)), query_positions, _tasks(rows, room=1), _tasks(tiles)]
    return SegmentBatch(*columns)


def _shifts(entries: int, run: int | None) -> np.ndarray:
    """Runs with shifts 0, -run, -2 run, …: as if before each run as much had been dropped."""
    return -(np.arange(entries, dtype=np.int32) // run * run) if run else np.zeros(entries, np.int32)


def _tasks(tasks: list[tuple[int, ...]], room: int = 0) -> Lists:
    columns = np.array(tasks or [(0,) * 5] * room, np.int32).reshape(-1, 5).T
    return Lists(*columns, num=np.int32(len(tasks)))  # pyright: ignore[reportArgumentType]


def table(rows: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines float32 [rows, pairs] of a plain rotary table."""
    angles = np.arange(rows)[:, None] * 10_000.0 ** (-np.arange(pairs) / pairs)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def pool(pages: int, width: int, dtype: Any, seed: int) -> jax.Array:
    """Unit-variance numbers [pages, width] on the device; uint16 are bfloat16 bits. Blocks of 65,536 rows repeat."""
    kind = jnp.bfloat16 if dtype == jnp.uint16 else dtype
    block = jax.random.normal(jax.random.key(seed), (min(pages, 1 << 16), width), jnp.float32).astype(kind)
    block = jax.lax.bitcast_convert_type(block, jnp.uint16) if dtype == jnp.uint16 else block
    return jnp.tile(block, (-(-pages // len(block)), 1))[:pages] if pages > len(block) else block


def queries_of(launch: Launch, dtype: Any, seed: int = 2) -> jax.Array:
    """Unit-variance queries [T, H, D]."""
    shape = launch.sequences * launch.queries, launch.shape.num_heads, launch.shape.head_dim
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def sinks_of(shape: Shape) -> jax.Array | None:
    """Logits float32 [H] of a model that has attention sinks."""
    return jax.random.normal(jax.random.key(3), (shape.num_heads,)) if shape.sinks else None


class Arguments(NamedTuple):
    """Of an `api.SegmentAttention`."""

    q: jax.Array
    k_pool: jax.Array
    v_pool: jax.Array
    batch: SegmentBatch
    cos: jax.Array
    sin: jax.Array
    sinks: jax.Array | None
    attention: Attention


def arguments_of(launch: Launch, k_pool: jax.Array, v_pool: jax.Array) -> Arguments:
    """On the device, over pools [P, G*D] with more pages than the launch reads."""
    dtype = jnp.bfloat16 if k_pool.dtype == jnp.uint16 else k_pool.dtype
    batch = jax.device_put(batch_of(launch, len(k_pool)))
    cos, sin = (jnp.asarray(a) for a in table(launch.entries + 1, launch.shape.head_dim // 2))
    sinks = sinks_of(launch.shape)
    return Arguments(queries_of(launch, dtype), k_pool, v_pool, batch, cos, sin, sinks, launch.attention)


def moves_of(count: int, num_pages: int, run: int = 500, seed: int = 0) -> MoveBatch:
    """That many moves between pages of which none is both source and target, in runs of one shift; on the device."""
    generator = np.random.default_rng(seed)
    chosen = 1 + generator.permutation(num_pages - 1)[: 2 * count].astype(np.int32)
    shift = -(np.arange(count, dtype=np.int32) // run * run + run)
    columns = (np.pad(column, (0, MOVE_PADDING)) for column in (chosen[:count], chosen[count:], shift))
    return jax.device_put(MoveBatch(*columns, num=np.int32(count)))  # pyright: ignore[reportArgumentType]


def rotation_of(shape: Shape) -> Rotation:
    """Half-split over the whole head."""
    return Rotation(shape.num_kv_heads, shape.head_dim)


def attention_launches(gpu: bool) -> dict[str, Launch]:
    """What is timed, by name: on a GPU the sizes that it is for, elsewhere what a CPU serves."""
    if not gpu:
        return {
            "SmolLM2 decode 8 x 2k": Launch(SMOLLM2, 8, 1999),
            "SmolLM2 decode 8 x 2k, runs of 500": Launch(SMOLLM2, 8, 1999, run=500),
            "SmolLM2 prefill 2k": Launch(SMOLLM2, queries=2048),
            "SmolLM2 restore 8 x 512": Launch(SMOLLM2, queries=4096, segments=8),
            "Qwen3 decode 8 x 2k": Launch(QWEN3, 8, 1999),
            "Qwen3 prefill 2k": Launch(QWEN3, queries=2048),
        }
    kinds = {"Qwen3": (QWEN3, None), "GPT-OSS": (GPT_OSS, None), "GPT-OSS window": (GPT_OSS, 128)}
    found: dict[str, Launch] = {}
    for name, (shape, window) in kinds.items():
        for batch in (16, 64):
            for context in (4, 32, 96):
                launch = Launch(shape, batch, context * 1024 - 1, window=window)
                found[f"{name} decode {batch} x {context}k"] = launch
        for segments in (1, 8, 32):
            launch = Launch(shape, 1, 32 * 1024, 8192, segments, window)
            found[f"{name} prefill 8k in {segments} over 32k"] = launch
    for run in (100, 500):
        found[f"GPT-OSS decode 16 x 32k, runs of {run}"] = Launch(GPT_OSS, 16, 32 * 1024 - 1, run=run)
    return found


def move_launches(gpu: bool) -> dict[str, tuple[Shape, int]]:
    """Repositions that are timed: a model's shape and how many pages move."""
    count = 96 * 1024 if gpu else 4096
    return {f"{shape.name} {count // 1024}k moves": (shape, count) for shape in (QWEN3, GPT_OSS if gpu else SMOLLM2)}


class Experts(NamedTuple):
    """A product of a step's tokens with one projection of the experts that one of four devices has."""

    name: str
    experts: int
    experts_per_token: int
    inputs: int
    outputs: int
    tokens: int
    bias: bool = False

    def sizes(self) -> np.ndarray:
        """Rows int32 [E] of each expert here, of tokens that go anywhere at random."""
        everywhere = 4 * self.experts
        chosen = np.random.default_rng(0).multinomial(self.rows, np.full(everywhere, 1 / everywhere))
        return chosen[: self.experts].astype(np.int32)

    @property
    def rows(self) -> int:
        """Every token once for each of its experts, wherever they are: those elsewhere are rows of no group."""
        return self.tokens * self.experts_per_token

    @property
    def flops(self) -> int:
        """Multiplications and additions for the rows of experts here."""
        return 2 * int(self.sizes().sum()) * self.inputs * self.outputs

    def bytes_moved(self, itemsize: int) -> int:
        """Weights of experts that have a row, and rows of experts here, read once; a float32 result for every row."""
        sizes = self.sizes()
        read = int((sizes > 0).sum()) * self.outputs * self.inputs + int(sizes.sum()) * self.inputs
        return itemsize * read + 4 * self.rows * self.outputs

    def arguments(self, dtype: Any) -> tuple[Any, ...]:
        """x [R, I], weight [E, O, I], sizes and bias of a `GroupedMatmul`, on the device; products of unit variance."""
        x = pool(self.rows, self.inputs, dtype, 0)
        weight = pool(self.experts * self.outputs, self.inputs, dtype, 1) * self.inputs**-0.5
        weight = weight.astype(dtype).reshape(self.experts, self.outputs, self.inputs)
        bias = pool(self.experts, self.outputs, dtype, 2) if self.bias else None
        return x, weight, jnp.asarray(self.sizes()), bias


def experts_launches(gpu: bool) -> dict[str, Experts]:
    """Grouped products that are timed: a quarter of each model's experts, as tensor parallel over 4 cuts them."""
    up, down = Experts("Qwen3 up", 32, 8, 2048, 768, 0), Experts("Qwen3 down", 32, 8, 768, 2048, 0)
    kinds = [Experts("GPT-OSS", 32, 4, 2880, 2880, 0, bias=True), up, down] if gpu else [up, down]
    sizes = (16, 64, 8192) if gpu else (16, 64)
    return {f"{kind.name}, {tokens} tokens": kind._replace(tokens=tokens) for kind in kinds for tokens in sizes}


def moved_bytes(shape: Shape, count: int, itemsize: int) -> int:
    """K and V of every source read, of every target written."""
    return 4 * count * shape.num_kv_heads * shape.head_dim * itemsize
