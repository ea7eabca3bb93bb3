"""From flags to an engine: the model, devices, and sizes as memory allows."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import jax

from akv_jax.config import Disaggregation, EngineConfig, ModelConfig
from akv_jax.disaggregated import over_devices
from akv_jax.engine import Engine, ServingEngine
from akv_jax.flags import FlagError, Nodes
from akv_jax.models.decoder import backends_of
from akv_jax.models.load import LoadedModel, load_model
from akv_jax.models.sharding import Layout, layout_of
from akv_jax.nodes import lead, mesh_of
from akv_jax.runtime.placement import model_mesh
from akv_jax.runtime.runner import Runner, default_dtype

if TYPE_CHECKING:
    from akv_jax.runtime.multi_process import Followers

Dtype = Literal["float32", "bfloat16"]

#: Defaults of --mem-fraction-static.
GPU_MEM_FRACTION, CPU_MEM_FRACTION = 0.85, 0.15

#: Tokens, and what the default pool is a multiple of. A smaller one means that memory is short.
MIN_POOL = 1024

#: More than any machine has; virtual ones would be made all the same.
MOST_DEVICES = 1024


def load_engine(
    arguments: argparse.Namespace, cache_dir: Path, nodes: Nodes | None = None, followers: Followers | None = None
) -> ServingEngine:
    """Load the model and build the engine, not warmed up yet.

    Raises:
        ModelError: the model cannot be had.
        FlagError: flags that do not fit this model or machine.
        NodeError: another node that cannot take part.
    """
    if nodes is not None and followers is not None:
        mesh = mesh_of(nodes)
        model, config = load_sized(arguments, cache_dir)
        runner = Runner(model.config, model.params, config, mesh)
        return Engine(model, config, runner=runner, device=lead(followers, model, config, runner))
    split: Disaggregation | None = arguments.disaggregation
    devices = _devices(arguments.tp if split is None else split.devices)
    model, config = load_sized(arguments, cache_dir)
    if split is not None:
        return over_devices(model, config, split, devices)
    mesh = model_mesh(devices) if len(devices) > 1 else None
    return Engine(model, config, runner=Runner(model.config, model.params, config, mesh))


def load_sized(arguments: argparse.Namespace, cache_dir: Path) -> tuple[LoadedModel, EngineConfig]:
    """The model, and an engine's sizes as they fit this machine."""
    try:
        backends_of(arguments.attention_backend)
    except ValueError as error:
        raise FlagError(f"--attention-backend: {error}") from None
    # The second start finds its programs compiled.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    wanted = default_dtype(jax.local_devices()[0].platform) if arguments.dtype == "auto" else arguments.dtype
    dtype = cast(Dtype, wanted)
    model = load_model(Path(arguments.model) if arguments.model else None, dtype, cache_dir / "models")
    return model, engine_config(arguments, model, dtype)


def _devices(count: int) -> Sequence[Any]:
    """So many devices. On a machine without GPUs they are virtual, and share its cores."""
    if count > MOST_DEVICES:
        raise FlagError(f"--tp or --disaggregation: {count} devices, expected at most {MOST_DEVICES}")
    if count > 1:
        # Has no effect on GPUs; must come before the first look at devices.
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        raise FlagError(
            f"--tp or --disaggregation: {count} devices wanted, and there are only {len(devices)} here "
            f"({devices[0].device_kind})"
        )
    return devices[:count]


def engine_config(arguments: argparse.Namespace, model: LoadedModel, dtype: Dtype) -> EngineConfig:
    """Flags and memory to the engine's sizes.

    The default pool is what memory allows, but never more than all running requests at full length could use.
    """
    split: Disaggregation | None = arguments.disaggregation
    # The side with fewer devices has more on each.
    layout = layout_of(model.config, arguments.tp if split is None else min(split.prefill, split.decode))
    longest = model.config.max_positions
    context_length = arguments.context_length or longest
    if context_length > longest:
        raise FlagError(f"--context-length {context_length}: {model.name} was trained for at most {longest} positions")
    num_pages, token = arguments.max_total_tokens, page_bytes(layout.local, dtype)
    devices = arguments.tp // arguments.nnodes if split is None else split.devices
    if num_pages is not None and num_pages * token > (most := _pool_bytes(1.0, layout, dtype, devices)):
        raise FlagError(f"--max-total-tokens {num_pages}: all memory has room for {most // token} tokens")
    if num_pages is None:
        fitting = _pool_bytes(arguments.mem_fraction_static, layout, dtype, devices) // token
        if fitting < MIN_POOL:
            raise FlagError(
                f"memory is left for a pool of {max(fitting, 0)} tokens only: "
                "raise --mem-fraction-static, or set --max-total-tokens to go on regardless"
            )
        num_pages = min(fitting // MIN_POOL * MIN_POOL, arguments.max_running_requests * context_length)
    return EngineConfig(
        context_length=context_length,
        num_pages=num_pages,
        max_running_requests=arguments.max_running_requests,
        max_queued_requests=arguments.max_queued_requests,
        chunked_prefill_size=arguments.chunked_prefill_size,
        attention_backend=arguments.attention_backend,
        dtype=dtype,
        seed=arguments.seed,
        reposition=arguments.reposition,
        disable_radix_cache=arguments.disable_radix_cache,
        eviction=arguments.eviction,
    )


def page_bytes(config: ModelConfig, dtype: Dtype) -> int:
    """K and V of one token in all layers, bytes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * _item_bytes(dtype)


def _item_bytes(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 2


def _pool_bytes(fraction: float | None, layout: Layout, dtype: Dtype, devices: int) -> int:
    """What `--mem-fraction-static` leaves for the pool on each of so many devices, bytes. On a GPU the weights come out
    of the fraction.

    Of all memory, not of what is free: the pool's size is part of every compiled program, and the next start is only
    quick if it is the same again.
    """
    memory = jax.local_devices()[0].memory_stats()
    if memory is None or "bytes_limit" not in memory:
        return int((fraction or CPU_MEM_FRACTION) * _host_memory()) // devices
    return int((fraction or GPU_MEM_FRACTION) * memory["bytes_limit"]) - layout.local_weights * _item_bytes(dtype)


def _host_memory() -> int:
    """Memory of the machine or, where it is less, of the container, bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total
