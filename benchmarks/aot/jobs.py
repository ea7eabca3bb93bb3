"""What is compiled: each kernel over its cases, and whole engine steps of the two models (DESIGN R2-R5).

A job is a value that names what to compile; `compile_job` does it in this process and needs the CUDA plugin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from akv_jax.config import EngineConfig, ModelConfig, RepositionMode
from akv_jax.models.decoder import Pool, forward, kernels
from akv_jax.models.rope import RotaryTable
from akv_jax.models.sharding import MODEL, POOL_SPEC, layout_of
from akv_jax.models.weights.table import build_params, weight_table
from akv_jax.runtime.batch import build
from akv_jax.runtime.placement import EVERYWHERE, compile_for
from akv_jax.runtime.runner import list_capacity, logit_rows, rehearsal
from akv_jax.runtime.step import WholeStep, compile_step
from benchmarks.aot import shapes, target
from benchmarks.aot.memory import Estimate, estimate
from pallas_kernels import cases as attention_cases
from pallas_kernels.grouped_matmul import api as grouped_matmul
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.reposition import api as reposition
from pallas_kernels.reposition import cases as reposition_cases
from pallas_kernels.segment_attention import api as segment_attention

BACKEND = "pallas_triton"
#: Of the pool that arithmetic says is the largest, what the gate compiles with.
SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Job:
    """`operation` of `pallas_kernels` and its case, or "step" and a model."""

    operation: str
    case: str
    #: Of a step: query rows, and how many of the model's layers (0 is all of them).
    rows: int = 0
    layers: int = 0
    #: False leaves the pool in place and makes another: the gate must notice.
    donated: bool = True
    #: With "copy" it may move every page of the pool before it attends.
    reposition: RepositionMode = "on_read"

    @property
    def name(self) -> str:
        if self.operation != "step":
            return f"{self.operation}/{self.case}"
        kind = "prefill" if self.rows > ENGINE.max_running_requests else "decode"
        layers = f", {self.layers} layers" if self.layers else ""
        copy = ", with moves" if self.reposition == "copy" else ""
        return f"{self.case} {kind} {self.rows}{layers}{copy}{'' if self.donated else ', pool not donated'}"


#: How the target is served: what `serve` would be told there.
ENGINE = EngineConfig(
    context_length=131_072,
    num_pages=0,
    max_running_requests=64,
    chunked_prefill_size=8192,
    attention_backend=BACKEND,
    dtype="bfloat16",
)
#: Query rows of the steps: decoding 1, 16 and 64 requests, and a chunk of a prompt.
ROWS = (1, 16, 64, 8192)


def kernel_jobs() -> list[Job]:
    """Every case of every kernel, those that make the same executable once."""
    jobs: dict[Any, Job] = {}
    for operation, (cases, make) in _CASES.items():
        for name, case in cases().items():
            inputs = make(case)
            arrays, fixed = _split(inputs)
            key = operation, jax.tree.structure(arrays), tuple((a.shape, a.dtype.str) for a in jax.tree.leaves(arrays))
            jobs.setdefault((*key, fixed), Job(operation, name))
    return list(jobs.values())


def step_jobs(layers: int) -> list[Job]:
    """Every step of every model, with that many of their layers (0 is all)."""
    return [Job("step", model, rows, layers) for model in shapes.MODELS for rows in ROWS]


def compile_job(job: Job) -> Any:
    """The compiled executable. Whatever the compiler raises is raised."""
    return _compile_step(job) if job.operation == "step" else _compile_kernel(job)


def model_of(job: Job) -> ModelConfig:
    model = shapes.MODELS[job.case]
    return replace(model, layers=model.layers[: job.layers]) if job.layers else model


def engine_of(model: ModelConfig) -> EngineConfig:
    """How that model is served; `num_pages` is for the gate to choose."""
    return replace(ENGINE, context_length=min(ENGINE.context_length, model.max_positions))


def estimate_of(model: ModelConfig, rows: int) -> Estimate:
    """The arithmetic for a step of a model on the target."""
    engine = engine_of(model)
    return estimate(
        model,
        target.TENSOR_PARALLEL,
        rows=rows,
        list_entries=list_capacity(engine, rows),
        positions=engine.context_length + 1,
        logit_rows=logit_rows(engine, rows),
    )


def pages_of(model: ModelConfig) -> int:
    """The pool that the gate compiles with: one for all steps of a model, whatever layers of it are compiled."""
    whole = shapes.MODELS[model.name.lower()]
    return int(SHARE * min(estimate_of(whole, rows).largest_pool(target.BUDGET) for rows in ROWS))


def bytes_of_missing_layers(job: Job) -> int:
    """What the layers that a job leaves out would have of weights and pool on each device."""
    whole = shapes.MODELS[job.case]
    layout = layout_of(whole, target.TENSOR_PARALLEL)
    parts = [
        math.prod(layout.shape(i)) // (1 if layout.split_axis(i) is None else layout.size)
        for i in weight_table(whole)
        if i.path[0] == "layers" and int(i.path[1]) >= (job.layers or whole.num_layers)
    ]
    missing = whole.num_layers - model_of(job).num_layers
    page = 2 * layout.slots * whole.head_dim // layout.size
    return 2 * (sum(parts) + missing * page * (pages_of(whole) + 1))


def pool_array(job: Job) -> str:
    """The type of one layer's keys on one device, as HLO writes it."""
    model = model_of(job)
    width = layout_of(model, target.TENSOR_PARALLEL).slots * model.head_dim // target.TENSOR_PARALLEL
    return f"bf16[{pages_of(model) + 1},{width}]"


_CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "segment_attention": (attention_cases.cases, attention_cases.make),
    "reposition": (reposition_cases.cases, reposition_cases.make),
    "grouped_matmul": (grouped_cases.cases, grouped_cases.make),
}
_BACKENDS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "segment_attention": segment_attention.backend,
    "reposition": reposition.backend,
    "grouped_matmul": grouped_matmul.backend,
}


def _split(inputs: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """A case's arguments: trees of arrays, and after them what is fixed."""
    kinds = np.ndarray, np.generic
    fixed = [value for value in inputs if not all(isinstance(leaf, kinds) for leaf in jax.tree.leaves(value))]
    return tuple(inputs[: len(inputs) - len(fixed)]), tuple(fixed)


def _compile_kernel(job: Job) -> Any:
    cases, make = _CASES[job.operation]
    arrays, fixed = _split(make(cases()[job.case]))
    sharding = SingleDeviceSharding(target.devices()[0])
    structs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arrays)
    kernel = _BACKENDS[job.operation](BACKEND)
    donate = (0, 1) if job.operation == "reposition" else ()
    return jax.jit(lambda *arrays: kernel(*arrays, *fixed), donate_argnums=donate).lower(*structs).compile()


def _compile_step(job: Job) -> Any:
    model, mesh = model_of(job), target.mesh()
    layout, arguments = layout_of(model, target.TENSOR_PARALLEL), tuple(_arguments(job))
    chosen, tile = kernels(model, BACKEND, job.reposition), ENGINE.tile
    if job.donated:
        step = compile_step("step", layout.local, chosen, *arguments, tile=tile, mesh=mesh)
        assert isinstance(step, WholeStep)
        return step.compiled
    pools: Any = (POOL_SPEC,) * model.num_layers
    function = functools.partial(forward, layout.local, chosen, tile=tile, axis=MODEL)
    return compile_for(mesh, function, arguments, (EVERYWHERE, Pool(pools, pools)))


def _arguments(job: Job) -> Iterator[Any]:
    """Weights, tables, pool and batch of a step, as shapes with shardings."""
    model, mesh = model_of(job), target.mesh()
    layout, engine = layout_of(model, target.TENSOR_PARALLEL), engine_of(model)

    def struct(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = EVERYWHERE) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    half = jnp.dtype(jnp.bfloat16)
    yield build_params(weight_table(model), lambda info: struct(layout.shape(info), half, layout.spec(info)))
    angles = {
        rotary: RotaryTable(*(struct((engine.context_length + 1, rotary.dim // 2), jnp.dtype(jnp.float32)),) * 2)
        for rotary in {layer.rotary for layer in model.layers}
    }
    yield tuple(angles[layer.rotary] for layer in model.layers)
    page = struct((pages_of(model) + 1, layout.slots * model.head_dim), half, POOL_SPEC)
    yield Pool(*((page,) * model.num_layers,) * 2)
    batch = build(
        rehearsal(job.rows),
        rows=job.rows,
        logit_rows=logit_rows(engine, job.rows),
        list_capacity=list_capacity(engine, job.rows),
        move_capacity=pages_of(model) if job.reposition == "copy" else 0,
        tile=engine.tile,
    )
    yield jax.tree.map(lambda a: struct(np.shape(a), np.asarray(a).dtype), batch)
