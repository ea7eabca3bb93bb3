"""A forward pass as executables, compiled ahead of time (DESIGN R3): one for a whole step, or one for a kind of layer.

Layer by layer, a model of thirty layers alike compiles, and is loaded from the compilation cache, thirty times as
fast; and on a CPU the thirty calls cost little (0 to 10 % of a step), for they are queued while the first one runs. A
GPU, whose step takes a few milliseconds, gets one executable for the whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from akv_jax.config import CompileUnit, ModelConfig
from akv_jax.models.decoder import Kernels, Params, Pool, decoder_layer, embed, forward, head
from akv_jax.models.rope import RotaryTable
from akv_jax.models.sharding import MODEL, POOL_SPEC
from akv_jax.runtime.batch import StepBatch
from akv_jax.runtime.placement import EVERYWHERE, compile_for, everywhere

#: From weights, tables, the donated pool and a batch to float32 logits [S, V] and the pool.
Step = Callable[[Params, Sequence[RotaryTable], Pool, StepBatch], tuple[jax.Array, Pool]]


def compile_step(
    unit: CompileUnit,
    config: ModelConfig,
    kernels: Kernels,
    *arguments: Any,
    tile: int,
    mesh: Mesh | None = None,
) -> Step:
    """Compile for arguments of these shapes (see `Step`) and shardings; their values are not looked at.

    On a mesh `config` is what one device computes with (`sharding.Layout.local`).
    """
    if unit == "layer":
        return LayeredStep(config, kernels, *arguments, tile=tile, mesh=mesh)
    axis = None if mesh is None else MODEL
    function = functools.partial(forward, config, kernels, tile=tile, axis=axis)
    pools: Any = (POOL_SPEC,) * config.num_layers
    return compile_for(mesh, function, arguments, (EVERYWHERE, Pool(pools, pools)), donate=(2,))


class LayeredStep:
    """Calls an executable for each layer in turn; layers alike share theirs."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        params: Any,
        tables: Any,
        pool: Any,
        batch: Any,
        *,
        tile: int,
        mesh: Mesh | None,
    ) -> None:
        """Of `params`, `tables`, `pool` and `batch` only shapes and shardings count."""
        self._mesh = mesh
        axis = None if mesh is None else MODEL
        outer = _outside_layers(params)
        self._embed = compile_for(mesh, functools.partial(embed, axis), (outer, batch), EVERYWHERE)
        (stream,) = jax.tree.leaves(self._embed.out_info)
        self._head = compile_for(mesh, functools.partial(head, config, axis), (outer, stream, batch), EVERYWHERE)
        kinds: dict[Any, Any] = {}
        self._layers = []
        for layer, weights, table, k, v in zip(config.layers, params["layers"], tables, *pool, strict=True):
            leaves, structure = jax.tree.flatten((weights, table, k, v))
            kind = layer, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if kind not in kinds:
                function = functools.partial(decoder_layer, config, layer, kernels, tile, axis)
                results = (EVERYWHERE, POOL_SPEC, POOL_SPEC)
                kinds[kind] = compile_for(
                    mesh, function, (weights, table, stream, k, v, batch), results, donate=(2, 3, 4)
                )
            self._layers.append(kinds[kind])

    def __call__(
        self, params: Params, tables: Sequence[RotaryTable], pool: Pool, batch: StepBatch
    ) -> tuple[jax.Array, Pool]:
        # Every layer reads it.
        batch = everywhere(self._mesh, batch)
        outer = _outside_layers(params)
        x = self._embed(outer, batch)
        keys, values = list(pool.k), list(pool.v)
        for index, (layer, weights, table) in enumerate(zip(self._layers, params["layers"], tables, strict=True)):
            x, keys[index], values[index] = layer(weights, table, x, keys[index], values[index], batch)
        return self._head(outer, x, batch), Pool(tuple(keys), tuple(values))


def _outside_layers(params: Any) -> Any:
    return {name: value for name, value in params.items() if name != "layers"}
