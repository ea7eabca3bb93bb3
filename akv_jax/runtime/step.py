"""A forward pass as executables, compiled ahead of time (DESIGN R3): one for a whole step, or one for a kind of layer.

Layer by layer, a model of thirty layers alike compiles, and is loaded from the compilation cache, thirty times as
fast; and on a CPU the thirty calls cost little (0 to 10 % of a step), for they are queued while the first one runs. A
GPU, whose step takes a few milliseconds, gets one executable for the whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from akv_jax.config import CompileUnit, ModelConfig
from akv_jax.models.decoder import Kernels, Params, Pool, decoder_layer, embed, forward, head
from akv_jax.models.rope import RotaryTable
from akv_jax.models.sharding import MODEL, POOL_SPEC
from akv_jax.runtime.batch import StepBatch
from akv_jax.runtime.host_array import empty_aligned
from akv_jax.runtime.placement import EVERYWHERE, compile_for, everywhere, struct_of

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
    make = LayeredStep if unit == "layer" else WholeStep
    *arrays, batch = arguments
    params, tables, pool = jax.tree.map(lambda array: struct_of(array, mesh), arrays)
    return make(StepSpec(config, kernels, params, tables, pool, Packing(batch), tile, mesh))


class Packed(NamedTuple):
    """A batch as few arrays: all its small ones one after another, int32 [total], and each large one as it is."""

    small: Any
    large: tuple[Any, ...]


class Packing:
    """How the arrays of a batch of given shapes are put together: every array costs time on its way to a device."""

    #: Entries from which an array is better left alone than copied.
    LARGE = 1 << 14

    def __init__(self, batch: Any) -> None:
        """`batch` is a tree of int32 arrays, of which only shapes count."""
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a), a.dtype), batch)
        leaves, self._structure = jax.tree.flatten(shapes)
        self._places: list[tuple[int, int] | None] = []
        end = 0
        for leaf in leaves:
            assert leaf.dtype == np.int32
            size = math.prod(leaf.shape)
            self._places.append((end, size) if size < self.LARGE else None)
            end += size if size < self.LARGE else 0
        self._leaves = leaves
        large = tuple(leaf for leaf, place in zip(leaves, self._places, strict=True) if place is None)
        #: What `pack` gives, as shapes.
        self.shapes = Packed(jax.ShapeDtypeStruct((end,), np.int32), large)

    def pack(self, batch: Any) -> Packed:
        """NumPy in, NumPy out."""
        small = empty_aligned(self.shapes.small.shape, np.int32)
        large = []
        for leaf, place in zip(jax.tree.leaves(batch), self._places, strict=True):
            if place is None:
                large.append(leaf)
            else:
                small[place[0] : sum(place)] = np.ravel(leaf)
        return Packed(small, tuple(large))

    def unpack(self, packed: Packed) -> Any:
        """The batch again, inside an executable."""
        large = iter(packed.large)
        leaves = [
            next(large) if place is None else packed.small[place[0] : sum(place)].reshape(leaf.shape)
            for leaf, place in zip(self._leaves, self._places, strict=True)
        ]
        return jax.tree.unflatten(self._structure, leaves)


@dataclass(frozen=True, slots=True)
class StepSpec:
    """What a step is compiled for (see `compile_step`). It holds no arrays."""

    config: ModelConfig
    kernels: Kernels
    #: Trees of `jax.ShapeDtypeStruct`.
    params: Any
    tables: Any
    pool: Any
    packing: Packing
    tile: int
    mesh: Mesh | None

    @property
    def axis(self) -> str | None:
        return None if self.mesh is None else MODEL

    def put(self, batch: StepBatch) -> Packed:
        """A batch on every device."""
        return everywhere(self.mesh, self.packing.pack(batch))


class WholeStep:
    """One executable, `compiled`."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        config, unpack = spec.config, spec.packing.unpack
        # Layers share tables, and an argument that is there once for each of them counts as often.
        kinds = list(dict.fromkeys(layer.rotary for layer in config.layers))
        uses = [kinds.index(layer.rotary) for layer in config.layers]
        self._firsts = [uses.index(kind) for kind in range(len(kinds))]

        def function(params: Params, tables: Sequence[RotaryTable], pool: Pool, packed: Packed) -> Any:
            each = [tables[kind] for kind in uses]
            return forward(config, spec.kernels, params, each, pool, unpack(packed), tile=spec.tile, axis=spec.axis)

        pools: Any = (POOL_SPEC,) * config.num_layers
        results = (EVERYWHERE, Pool(pools, pools))
        arguments = spec.params, self._distinct(spec.tables), spec.pool, spec.packing.shapes
        self.compiled = compile_for(spec.mesh, function, arguments, results, donate=(2,))

    def __call__(
        self, params: Params, tables: Sequence[RotaryTable], pool: Pool, batch: StepBatch
    ) -> tuple[jax.Array, Pool]:
        return self.compiled(params, self._distinct(tables), pool, self._spec.put(batch))

    def _distinct(self, tables: Sequence[RotaryTable]) -> tuple[RotaryTable, ...]:
        """Of one table a layer, each that differs once."""
        return tuple(tables[layer] for layer in self._firsts)


class LayeredStep:
    """Calls an executable for each layer in turn; layers alike share theirs."""

    def __init__(self, spec: StepSpec) -> None:
        self._spec = spec
        config, kernels, axis, mesh = spec.config, spec.kernels, spec.axis, spec.mesh
        outer, packed, unpack = _outside_layers(spec.params), spec.packing.shapes, spec.packing.unpack

        def first(outer: Params, packed: Packed) -> jax.Array:
            return embed(axis, outer, unpack(packed))

        def last(outer: Params, x: jax.Array, packed: Packed) -> jax.Array:
            return head(config, axis, outer, x, unpack(packed))

        self._embed = compile_for(mesh, first, (outer, packed), EVERYWHERE)
        (stream,) = jax.tree.leaves(self._embed.out_info)
        self._head = compile_for(mesh, last, (outer, stream, packed), EVERYWHERE)
        kinds: dict[Any, Any] = {}
        self._layers = []
        for layer, weights, table, k, v in zip(
            config.layers, spec.params["layers"], spec.tables, *spec.pool, strict=True
        ):
            leaves, structure = jax.tree.flatten((weights, table, k, v))
            kind = layer, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            if kind not in kinds:
                function = functools.partial(decoder_layer, config, layer, kernels, spec.tile, axis)
                kinds[kind] = compile_for(
                    mesh,
                    lambda weights, table, x, k, v, packed, run=function: run(weights, table, x, k, v, unpack(packed)),
                    (weights, table, stream, k, v, packed),
                    (EVERYWHERE, POOL_SPEC, POOL_SPEC),
                    donate=(2, 3, 4),
                )
            self._layers.append(kinds[kind])

    def __call__(
        self, params: Params, tables: Sequence[RotaryTable], pool: Pool, batch: StepBatch
    ) -> tuple[jax.Array, Pool]:
        # Every layer reads it.
        packed = self._spec.put(batch)
        outer = _outside_layers(params)
        x = self._embed(outer, packed)
        keys, values = list(pool.k), list(pool.v)
        for index, (layer, weights, table) in enumerate(zip(self._layers, params["layers"], tables, strict=True)):
            x, keys[index], values[index] = layer(weights, table, x, keys[index], values[index], packed)
        return self._head(outer, x, packed), Pool(tuple(keys), tuple(values))


def _outside_layers(params: Any) -> Any:
    return {name: value for name, value in params.items() if name != "layers"}
