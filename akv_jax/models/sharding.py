"""How a model is laid over the devices of a mesh ("data", "model") (DESIGN R5): which device has which weights.

Only a description: what is cut along "model", and how it is padded to come out even. `runtime/placement.py` puts
arrays where this says, and `models/decoder.py` computes with one device's part and knows nothing of the others but the
sums over them. docs/sharding.md has the rules with examples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from jax.sharding import PartitionSpec

from akv_jax.config import ModelConfig
from akv_jax.models.weights.table import ArrayInfo, weight_table
from akv_jax.runtime.host_array import empty_aligned

#: The mesh's axes; everything is cut along the second and repeated along the first.
DATA, MODEL = "data", "model"
#: A place that is there to come out even: all of its weights are zero.
NOTHING = -1
#: Columns of the KV pool, a page a row.
POOL_SPEC = PartitionSpec(None, MODEL)


@dataclass(frozen=True, slots=True)
class Layout:
    """A model over `size` devices. Every device has the same number of slots, a *slot* being a KV head with the query
    heads that read it; so all of them run one program, on the same shapes."""

    #: The whole model.
    config: ModelConfig
    size: int
    #: The KV head of each slot, and the query heads of each slot one after another; NOTHING where there is none.
    kv_heads: tuple[int, ...]
    query_heads: tuple[int, ...]

    @property
    def slots(self) -> int:
        return len(self.kv_heads)

    @property
    def splits_experts(self) -> bool:
        """Whole experts on each device; otherwise a part of every expert's intermediate dimension."""
        return self.config.moe is not None and self.config.moe.num_experts % self.size == 0

    @property
    def local(self) -> ModelConfig:
        """What one device computes with. Vocabulary and experts stay the model's own: tokens and routes are global."""
        return replace(
            self.config,
            num_heads=len(self.query_heads) // self.size,
            num_kv_heads=self.slots // self.size,
            intermediate_size=-(-self.config.intermediate_size // self.size),
        )

    @property
    def local_weights(self) -> int:
        """How many numbers the weights on one device are."""
        return sum(
            math.prod(self.shape(info)) // (1 if self.split_axis(info) is None else self.size)
            for info in weight_table(self.config)
        )

    def split_axis(self, info: ArrayInfo) -> int | None:
        """The dimension of a weight that is cut, None if every device has all of it."""
        cut = {"vocab", "heads", "kv_heads", "experts" if self.splits_experts else "ffn"}
        if "experts" not in info.axes:
            cut.add("ffn")
        return next((axis for axis, name in enumerate(info.axes) if name in cut), None)

    def spec(self, info: ArrayInfo) -> PartitionSpec:
        """Where the parts of a weight are."""
        axis = self.split_axis(info)
        return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, MODEL)

    def shape(self, info: ArrayInfo) -> tuple[int, ...]:
        """The shape of a weight over all devices, padding and repeated heads included."""
        axis = self.split_axis(info)
        if axis is None:
            return info.shape
        shape = list(info.shape)
        places = self._places(info, axis)
        shape[axis] = shape[axis] // self._count(info, axis) * len(places)
        return tuple(shape)

    def arrange(self, info: ArrayInfo, array: np.ndarray) -> np.ndarray:
        """A weight in that shape: heads in the order of the slots, zeros where there is nothing."""
        axis = self.split_axis(info)
        if axis is None:
            return array
        return _take(array, axis, self._count(info, axis), self._places(info, axis))

    def to_slots(self, rows: np.ndarray) -> np.ndarray:
        """Rows of K or V of the model's heads [pages, G*D] as the pool has them [pages, slots*D]."""
        return _take(rows, 1, self.config.num_kv_heads, self.kv_heads)

    def from_slots(self, rows: np.ndarray) -> np.ndarray:
        """The model's heads [pages, G*D] of rows of the pool [pages, slots*D]."""
        first = [self.kv_heads.index(head) for head in range(self.config.num_kv_heads)]
        return _take(rows, 1, self.slots, first)

    def _count(self, info: ArrayInfo, axis: int) -> int:
        """How many things that stay whole a dimension consists of."""
        heads = {"heads": self.config.num_heads, "kv_heads": self.config.num_kv_heads}
        return heads.get(info.axes[axis] or "", info.shape[axis])

    def _places(self, info: ArrayInfo, axis: int) -> tuple[int, ...]:
        """Which of them is at each place, in the order of the devices."""
        heads = {"heads": self.query_heads, "kv_heads": self.kv_heads}
        if (name := info.axes[axis] or "") in heads:
            return heads[name]
        return _padded(tuple(range(info.shape[axis])), self.size)


def layout_of(config: ModelConfig, size: int) -> Layout:
    """The layout of a model over `size` devices.

    Fewer KV heads than devices: each is repeated as often as there is room, and its query heads are dealt out to the
    copies. Where the numbers do not divide, zero heads fill up a slot's query heads, and empty slots the last devices.
    """
    share = config.num_heads // config.num_kv_heads
    # More copies than query heads would leave some of them without any.
    of_slot = -(-share // min(max(1, size // config.num_kv_heads), share))
    kv_heads: list[int] = []
    query_heads: list[int] = []
    for head in range(config.num_kv_heads):
        mine = _padded(tuple(range(head * share, (head + 1) * share)), of_slot)
        query_heads += mine
        kv_heads += [head] * (len(mine) // of_slot)
    slots = _padded(tuple(kv_heads), size)
    return Layout(config, size, slots, (*query_heads, *(NOTHING,) * (len(slots) * of_slot - len(query_heads))))


def _padded(items: tuple[int, ...], multiple: int) -> tuple[int, ...]:
    return (*items, *(NOTHING,) * (-len(items) % multiple))


def _take(array: np.ndarray, axis: int, count: int, places: tuple[int, ...] | list[int]) -> np.ndarray:
    """`axis` consists of `count` equal blocks; those of `places` in their order, zeros for NOTHING."""
    if tuple(places) == tuple(range(count)):
        return array
    index = np.array(places)
    shape = array.shape
    blocks = array.reshape(*shape[:axis], count, shape[axis] // count, *shape[axis + 1 :])
    out = empty_aligned((*shape[:axis], len(index), *blocks.shape[axis + 1 :]), array.dtype)
    before = (slice(None),) * axis
    out[(*before, index != NOTHING)] = blocks[(*before, index[index != NOTHING])]
    out[(*before, index == NOTHING)] = 0
    return out.reshape(*shape[:axis], -1, *shape[axis + 1 :])
