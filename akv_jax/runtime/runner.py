"""Carries out step plans on the device: owns weights, rotary tables and the KV pool (DESIGN R2, R3).

Every executable is compiled ahead of time, one for each bucket of query rows; after warm-up nothing compiles.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from akv_jax.config import CompileUnit, EngineConfig, ModelConfig
from akv_jax.models.decoder import Params, Pool, kernels
from akv_jax.models.rope import rotary_table
from akv_jax.planning.plan import NO_MOVES, Segment, StepPlan
from akv_jax.runtime.batch import StepBatch, build
from akv_jax.runtime.page_blocks import PageBlocks
from akv_jax.runtime.placement import Placement
from akv_jax.runtime.sampling import Adjustment, Sampled, SamplingBatch, sample
from akv_jax.runtime.step import Step, compile_step
from pallas_kernels.numerics import cpu_multiplies_bfloat16

#: Pages that are written at once when a stored cache is loaded.
LOAD_BLOCK = 1024

#: Called with what is being made ready, how many parts are done, and how many there are.
Progress = Callable[[str, int, int], None]


class SamplingPlan(NamedTuple):
    """How the logit rows of a plan are sampled, as NumPy arrays with one entry a row (see `sampling.SamplingBatch`)."""

    batch: SamplingBatch
    adjustment: Adjustment | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One entry a logit row of the plan, NumPy; the logits stay on the device until they are asked for."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    device_logits: jax.Array

    def logits(self, row: int) -> np.ndarray:
        """Float32 [V] of one row."""
        return np.array(np.asarray(self.device_logits)[row])


class CompilationCounter:
    """Counts backend compilations of this process from the moment it is made (DESIGN R3)."""

    def __init__(self) -> None:
        self.total = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.total += 1


def token_buckets(config: EngineConfig) -> tuple[int, ...]:
    """Numbers of query rows that get an executable, ascending: one row, then sixteen and its multiples by four.

    On a CPU, float32 runs one row three times as fast as two to sixteen, which all take the same time, and bfloat16
    runs four rows faster than one.
    """
    largest = max(config.chunked_prefill_size, config.max_running_requests + 1)
    smaller = [bucket for bucket in (16, 64, 256, 1024, 4096) if bucket < largest]
    return tuple(sorted({1 if config.dtype == "float32" else 4, *smaller, max(largest, 4)}))


def default_dtype(platform: str) -> str:
    """bfloat16 where a device of that platform computes it in hardware, else float32."""
    if platform != "cpu":
        return "bfloat16"
    return "bfloat16" if cpu_multiplies_bfloat16() else "float32"


def default_compile_unit(platform: str) -> CompileUnit:
    """Layer by layer where a call costs little beside what it computes."""
    return "layer" if platform == "cpu" else "step"


class Runner:
    """The device side of an engine."""

    def __init__(self, model: ModelConfig, params: Params, config: EngineConfig, mesh: Mesh | None = None) -> None:
        """`params` as `models/weights/table.py` declares them, NumPy or JAX, already of the engine's dtype.

        `mesh` has axes "data" and "model", and the model lies over "model" (`placement.model_mesh`, DESIGN R5); without
        one it is on JAX's default device.
        """
        self.model, self.config = model, config
        self.buckets = config.token_buckets or token_buckets(config)
        self.compilations = CompilationCounter()
        self.placement = Placement(model, mesh)
        self._params = self.placement.params(params)
        tables = {layer.rotary: None for layer in model.layers}
        # Rotation is by at most the context length; a shifted query would reach twice as far (DESIGN C8).
        tables = {rotary: rotary_table(rotary, config.context_length + 1) for rotary in tables}
        tables = {rotary: self.placement.everywhere(table) for rotary, table in tables.items()}
        self._tables = tuple(tables[layer.rotary] for layer in model.layers)
        self._pool = self._empty_pool()
        self._steps: dict[int, Step] = {}
        self._samplers: dict[tuple[int, bool], Any] = {}

    @property
    def largest_bucket(self) -> int:
        return self.buckets[-1]

    def logit_rows(self, rows: int) -> int:
        """How many rows of a step of that bucket may have their logits returned."""
        return logit_rows(self.config, rows)

    def list_capacity(self, rows: int) -> int:
        """How many entries the page lists of a step of that bucket may have together."""
        return list_capacity(self.config, rows)

    @property
    def move_capacity(self) -> int:
        return self.config.num_pages if self.config.reposition == "copy" else 0

    def warm_up(self, progress: Progress = lambda *_: None) -> None:
        """Compile every executable and run each once."""
        self.rehearse(self.run, progress, self.compile(progress))

    def compile(self, progress: Progress = lambda *_: None, samples: bool = True) -> int:
        """Compile every executable; `samples` says whether tokens will be sampled here. Returns how many they are."""
        jobs: list[tuple[str, Callable[[], Any]]] = []
        for rows in reversed(self.buckets):
            jobs.append((f"step of {rows} rows", functools.partial(self._step, rows)))
        for rows in sorted({self.logit_rows(rows) for rows in self.buckets}) if samples else ():
            for adjusted in (False, True):
                jobs.append((f"sampling of {rows} rows", functools.partial(self._sampler, rows, adjusted)))
        # XLA compiles outside Python's lock, and mostly on one core each. The largest come first.
        with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
            running = {pool.submit(job): name for name, job in jobs}
            for done, future in enumerate(as_completed(running)):
                progress(running[future], done, len(jobs) + 1)
                future.result()
        return len(jobs)

    def rehearse(self, run: Callable[[StepPlan, SamplingPlan], StepResult], progress: Progress, compiled: int) -> None:
        """`run` a full step of every bucket: some kernels are only built when they first run."""
        progress("first runs", compiled, compiled + 1)
        for rows in self.buckets:
            # Go through every branch.
            run(rehearsal(rows), SamplingPlan(empty_sampling(1), None))
        progress("ready", compiled + 1, compiled + 1)

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """One forward pass and one sampled token for each logit row."""
        logits = self.forward(plan)
        # Every device of a mesh has all of them; one is enough to sample.
        logits = logits if self.placement.mesh is None else logits.addressable_shards[0].data
        padded = jax.tree.map(lambda a: _pad_rows(a, logits.shape[0]), sampling)
        arguments = (padded.batch,) if padded.adjustment is None else (padded.batch, padded.adjustment)
        sampled: Sampled = self._sampler(logits.shape[0], padded.adjustment is not None)(logits, *arguments)
        tokens, logprobs, top_ids, top_logprobs = jax.device_get(sampled)
        return StepResult(tokens, logprobs, top_ids, top_logprobs, logits)

    def forward(self, plan: StepPlan) -> jax.Array:
        """One forward pass: float32 logits [logit rows of its bucket, V] on every device, before they are there."""
        rows = next((bucket for bucket in self.buckets if bucket >= len(plan.tokens)), None)
        if rows is None:
            raise ValueError(f"a step of {len(plan.tokens)} queries, the largest bucket has {self.largest_bucket}")
        batch = self._build(plan, rows)
        logits, self._pool = self._step(rows)(self._params, self._tables, self._pool, batch)
        return logits

    def read_pages(self, pages: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """What int32 [pages] hold: layer by layer K, then V, each [pages, G*D] with a name.

        float32, or bfloat16's bits as uint16.
        """
        for layer, pools in enumerate(zip(self._pool.k, self._pool.v, strict=True)):
            for kind, pool in zip("kv", pools, strict=True):
                rows = self.placement.pool_rows(pool, pages)
                yield _array_name(layer, kind), rows if rows.dtype == np.float32 else rows.view(np.uint16)

    def write_pages(self, pages: np.ndarray, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
        """Put what `read_pages` gave into pages, int32 [pages]. Compiles, and so is for the time before serving.

        ValueError if the arrays are not this model's; some pages may have been written by then.
        """
        keys, values = list(self._pool.k), list(self._pool.v)
        places = [(layer, kind) for layer in range(len(keys)) for kind in "kv"]
        width = self.model.num_kv_heads * self.model.head_dim
        dtype = np.float32 if self.config.dtype == "float32" else np.uint16
        try:
            for (layer, kind), (name, rows) in zip(places, arrays, strict=True):
                if name != _array_name(layer, kind) or rows.shape != (len(pages), width) or rows.dtype != dtype:
                    expected = f"{_array_name(layer, kind)}, {np.dtype(dtype)} {(len(pages), width)}"
                    raise ValueError(f"array {name}, {rows.dtype} {rows.shape}, where {expected} was expected")
                pools = keys if kind == "k" else values
                for start in range(0, len(pages), LOAD_BLOCK):
                    block = slice(start, start + LOAD_BLOCK)
                    padded, there = (_pad_rows(a[block], LOAD_BLOCK) for a in (rows, pages))
                    pools[layer] = _put(pools[layer], there, self.placement.slot_rows(padded))
        finally:
            self._pool = Pool(tuple(keys), tuple(values))

    @functools.cached_property
    def page_blocks(self) -> PageBlocks:
        """Compiled when they are first asked for: only transfers between pools need them."""
        return PageBlocks(self.placement, self._pool)

    def copy_out(self, pages: np.ndarray) -> list[jax.Array]:
        """What int32 [pages] hold, as blocks beside the pool (`transfer.PageCopier`)."""
        return self.page_blocks.out_of(self._pool, pages)

    def bring(self, blocks: list[jax.Array]) -> list[jax.Array]:
        """Another runner's blocks on this one's devices, once they are there."""
        return self.page_blocks.bring(blocks)

    def copy_in(self, pages: np.ndarray, blocks: list[jax.Array]) -> None:
        """Put such blocks into int32 [pages]."""
        self._pool = self.page_blocks.into(self._pool, pages, blocks)

    def _build(self, plan: StepPlan, rows: int) -> StepBatch:
        return build(
            plan,
            rows=rows,
            logit_rows=self.logit_rows(rows),
            list_capacity=self.list_capacity(rows),
            move_capacity=self.move_capacity,
            tile=self.config.tile,
        )

    def _empty_pool(self) -> Pool:
        bfloat16 = self.config.dtype == "bfloat16"
        # XLA on a CPU updates bfloat16 arrays out of place, the same bits as uint16 in place.
        dtype = (jnp.uint16 if jax.default_backend() == "cpu" else jnp.bfloat16) if bfloat16 else jnp.float32
        both = (
            tuple(self.placement.empty_pool(self.config.num_pages + 1, dtype) for _ in self.model.layers)
            for _ in range(2)
        )
        return Pool(*both)

    def _step(self, rows: int) -> Step:
        """The forward pass for that many query rows."""
        if rows not in self._steps:
            self._steps[rows] = compile_step(
                self.config.compile_unit or default_compile_unit(jax.default_backend()),
                self.placement.model,
                kernels(self.model, self.config.attention_backend, self.config.reposition),
                *(self._params, self._tables, self._pool, self._build(rehearsal(rows), rows)),
                tile=self.config.tile,
                mesh=self.placement.mesh,
            )
        return self._steps[rows]

    def _sampler(self, rows: int, adjusted: bool) -> Any:
        key = rows, adjusted
        if key not in self._samplers:
            vocabulary = self.model.vocab_size
            device = self.placement.first_device
            shapes: list[Any] = [jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32, sharding=device)]
            shapes.append(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), empty_sampling(rows)))
            if adjusted:
                full = jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32)
                seen = jax.ShapeDtypeStruct((rows, vocabulary), jnp.bool_)
                shapes.append(Adjustment(full, seen, jax.ShapeDtypeStruct((rows,), jnp.float32)))
            self._samplers[key] = jax.jit(sample).lower(*shapes).compile()
        return self._samplers[key]


def _array_name(layer: int, kind: str) -> str:
    return f"layer-{layer:03d}-{kind}"


# Padding writes zeros to the scratch page.
@functools.partial(jax.jit, donate_argnums=0)
def _put(pool: jax.Array, pages: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows [LOAD_BLOCK, G*D] at `pages`, in place."""
    if pool.dtype == jnp.bfloat16:
        rows = jax.lax.bitcast_convert_type(rows, jnp.bfloat16)
    return pool.at[pages].set(rows, mode="promise_in_bounds")


def logit_rows(config: EngineConfig, rows: int) -> int:
    """How many rows of a step of `rows` queries may have their logits returned."""
    return min(rows, config.max_running_requests)


def list_capacity(config: EngineConfig, rows: int) -> int:
    """How many entries the page lists of a step of `rows` queries may have together."""
    # Whatever the limit says, every running request must find room for its list.
    limit = max(config.max_list_entries, 2 * config.max_running_requests * config.context_length)
    return min(rows * config.context_length, limit)


def rehearsal(rows: int) -> StepPlan:
    """A full step that reads and writes the scratch page only: a segment of one query and one of all the others."""
    tokens = np.zeros(rows, np.int32)
    positions = np.arange(rows, dtype=np.int32)
    segments = [Segment(0, 1, tokens[:1], positions[:1], tokens[:1])]
    if rows > 1:
        segments.append(Segment(1, rows, tokens[1:], positions[1:], -(positions[1:] // 2)))
    return StepPlan(tokens, positions, tokens, tuple(segments), NO_MOVES, tokens[:1])


def empty_sampling(rows: int) -> SamplingBatch:
    """Greedy rows."""
    zeros = functools.partial(np.zeros, rows)
    return SamplingBatch(
        temperature=zeros(np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=zeros(np.int32),
        min_p=zeros(np.float32),
        seed=np.zeros((rows, 2), np.uint32),
        step=zeros(np.int32),
        want_top=np.bool_(False),
    )


def _pad_rows(array: np.ndarray, rows: int) -> np.ndarray:
    """Zeros after the last row; scalars as they are. Zero is harmless in every field: such rows are greedy."""
    if np.ndim(array) == 0:
        return array
    if len(array) == rows:
        return array
    out = np.zeros((rows, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    return out
