"""Where the arrays of an engine are: on one device, or over the "model" axis of a mesh (DESIGN R5).

`models/sharding.py` says which part of what is on which device; here arrays get there, one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from akv_jax.config import ModelConfig
from akv_jax.models.decoder import Params
from akv_jax.models.sharding import DATA, MODEL, POOL_SPEC, Layout, layout_of
from akv_jax.models.weights.table import ArrayInfo, weight_table

EVERYWHERE = PartitionSpec()


def model_mesh(devices: Sequence[Any]) -> Mesh:
    """A mesh over which one model is laid, all of `devices` along "model"."""
    return Mesh(np.array(devices).reshape(1, -1), (DATA, MODEL))


class Placement:
    """Puts weights, pool and batches where they belong. Without a mesh all of it is on the default device."""

    def __init__(self, model: ModelConfig, mesh: Mesh | None) -> None:
        self.mesh = mesh
        self.layout: Layout = layout_of(model, 1 if mesh is None else mesh.shape[MODEL])

    @property
    def model(self) -> ModelConfig:
        """What one device computes with."""
        return self.layout.local

    def __str__(self) -> str:
        """For people: the devices, and what is spread over them."""
        devices = jax.local_devices()[:1] if self.mesh is None else self.mesh.devices.flat
        kind = f"{devices[0].platform} ({devices[0].device_kind})"
        if self.mesh is None:
            return kind
        shape = " × ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        heads = f"{self.layout.config.num_kv_heads} KV heads in {self.layout.slots} slots"
        return f"{self.mesh.size} × {kind}, mesh {shape}, {heads}"

    @property
    def first_device(self) -> Sharding | None:
        """Of one device, what needs no more than one; None leaves it to JAX."""
        return None if self.mesh is None else SingleDeviceSharding(self.mesh.local_devices[0])

    def params(self, params: Params) -> Params:
        """Weights of `weight_table`, NumPy, on their devices. One array after another is padded and cut, and what needs
        neither is not even copied where the devices are this machine's CPUs."""
        if self.mesh is None:
            return jax.device_put(params)
        infos = {info.path: info for info in weight_table(self.layout.config)}

        def put(values: Params, path: tuple[str | int, ...]) -> dict[str, Any]:
            return {name: self._weight(infos[(*path, name)], value) for name, value in values.items()}

        layers = [put(values, ("layers", number)) for number, values in enumerate(params["layers"])]
        return {**put({name: value for name, value in params.items() if name != "layers"}, ()), "layers": layers}

    def _weight(self, info: ArrayInfo, array: Any) -> jax.Array:
        return self._cut(self.layout.arrange(info, np.asarray(array)), self.layout.spec(info))

    def everywhere(self, tree: Any) -> Any:
        """Arrays that every device reads all of."""
        return everywhere(self.mesh, tree)

    def empty_pool(self, pages: int, dtype: Any) -> jax.Array:
        """Zeros [pages, slots*D], cut by slots."""
        sharding = None if self.mesh is None else NamedSharding(self.mesh, POOL_SPEC)
        return jnp.zeros((pages, self.layout.slots * self.layout.config.head_dim), dtype, device=sharding)

    def pool_rows(self, pool: jax.Array, pages: np.ndarray) -> np.ndarray:
        """The model's own K or V [pages, G*D] of these pages: what leaves a pool does not depend on the mesh."""
        rows = np.empty((len(pages), pool.shape[1]), pool.dtype)
        for shard in pool.addressable_shards:
            rows[:, shard.index[1]] = np.asarray(shard.data)[pages]
        return self.layout.from_slots(rows)

    def slot_rows(self, rows: np.ndarray) -> Any:
        """Rows in that form, ready to be written to a pool."""
        return rows if self.mesh is None else self._cut(self.layout.to_slots(rows), POOL_SPEC)

    def _cut(self, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        assert self.mesh is not None
        return _cut(self.mesh, array, spec)


def everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """Arrays from the host, all of them on every device."""
    if mesh is None:
        return jax.device_put(tree)
    return jax.tree.map(lambda array: _cut(mesh, np.asarray(array), EVERYWHERE), tree)


def _cut(mesh: Mesh, array: np.ndarray, spec: PartitionSpec) -> jax.Array:
    # Unlike `device_put` it asks no other process whether it has the same.
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda index: array[index])


def compile_for(
    mesh: Mesh | None,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    results: Any,
    donate: tuple[int, ...] = (),
) -> Any:
    """Compile for arguments like these: arrays, or `jax.ShapeDtypeStruct` with their shardings.

    On a mesh `function` is called with each device's part of the arguments and returns its part of `results`, a tree of
    partition specs.
    """
    structs = jax.tree.map(lambda a: struct_of(a, mesh), tuple(arguments))
    if mesh is not None:
        specs = jax.tree.map(lambda struct: struct.sharding.spec, structs)
        function = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)
    return jax.jit(function, donate_argnums=donate).lower(*structs).compile()


def struct_of(array: Any, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    """What is known of an array; what comes from the host goes to every device."""
    sharding = None
    if mesh is not None:
        sharding = getattr(array, "sharding", None) or NamedSharding(mesh, EVERYWHERE)
    return jax.ShapeDtypeStruct(np.shape(array), array.dtype, sharding=sharding)
