"""Pages of all layers as arrays of one size, out of a pool and into one: nothing compiles for other numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from akv_jax.cache.pages import SCRATCH_PAGE
from akv_jax.models.decoder import Pool
from akv_jax.models.sharding import MODEL, POOL_SPEC, layout_of
from akv_jax.runtime.placement import Placement, compile_for

#: Pages that are copied at once.
BLOCK = 512
#: Of a block [layers, 2, BLOCK, slots*D]: cut as the pool is.
BLOCK_SPEC = PartitionSpec(None, None, None, MODEL)


class PageBlocks:
    """Copies between one runner's pool and blocks. Everything is compiled here."""

    def __init__(self, placement: Placement, pool: Pool) -> None:
        """`pool` is one like those that are to come."""
        self._placement, mesh = placement, placement.mesh
        self._sharding: Sharding = pool.k[0].sharding if mesh is None else NamedSharding(mesh, BLOCK_SPEC)
        shape = (len(pool.k), 2, BLOCK, pool.k[0].shape[1])
        block = jax.ShapeDtypeStruct(shape, pool.k[0].dtype, sharding=self._sharding)
        numbers: Any = np.zeros(BLOCK, np.int32)
        pools: Any = (POOL_SPEC,) * len(pool.k)
        self._gather = compile_for(mesh, _gather, (pool, numbers), BLOCK_SPEC)
        self._scatter = compile_for(mesh, _scatter, (pool, numbers, block), Pool(pools, pools), donate=(0,))

    def out_of(self, pool: Pool, pages: np.ndarray) -> list[jax.Array]:
        """What int32 [pages] hold."""
        return [self._gather(pool, numbers) for numbers in self._numbers(pages)]

    def bring(self, blocks: list[jax.Array]) -> list[jax.Array]:
        """Blocks from beside another runner's pool to beside this one's, once they are there."""
        return jax.block_until_ready([self._beside(block) for block in blocks])

    def into(self, pool: Pool, pages: np.ndarray, blocks: list[jax.Array]) -> Pool:
        """The pool with these blocks in int32 [pages]; the one given is used up."""
        for numbers, block in zip(self._numbers(pages), blocks, strict=True):
            pool = self._scatter(pool, numbers, block)
        return pool

    def _numbers(self, pages: np.ndarray) -> Iterator[jax.Array]:
        """Page numbers, int32 [BLOCK] each; the last ones filled up with the scratch page."""
        for start in range(0, len(pages), BLOCK):
            numbers = np.full(BLOCK, SCRATCH_PAGE, np.int32)
            numbers[: len(pages) - start] = pages[start : start + BLOCK]
            yield self._placement.everywhere(numbers)

    def _beside(self, block: jax.Array) -> jax.Array:
        """A block of another runner's on this one's devices, with its slots in this one's order.

        It is only copied. A computation on the other runner's devices, started from here, would come between the parts
        of a step there, whose devices then wait for one another for ever.
        """
        mine, where = self._placement.layout, block.sharding
        others = layout_of(mine.config, where.mesh.shape[MODEL] if isinstance(where, NamedSharding) else 1)
        arranged: Any = block
        if others != mine:
            # Over a different number of devices the slots are others, and the host puts them in order.
            rows = others.from_slots(np.asarray(block).reshape(-1, block.shape[-1]))
            arranged = mine.to_slots(rows).reshape(*block.shape[:-1], -1)
        return jax.device_put(arranged, self._sharding)


def _gather(pool: Pool, pages: jax.Array) -> jax.Array:
    return jnp.stack([jnp.stack([k[pages], v[pages]]) for k, v in zip(pool.k, pool.v, strict=True)])


def _scatter(pool: Pool, pages: jax.Array, block: jax.Array) -> Pool:
    def put(kind: int, pools: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = (block[layer, kind] for layer in range(len(pools)))
        return tuple(p.at[pages].set(r, mode="promise_in_bounds") for p, r in zip(pools, rows, strict=True))

    return Pool(put(0, pool.k), put(1, pool.v))
