"""Pages moved between pools that are laid over different numbers of devices (DESIGN R5)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from akv_jax.models.decoder import Pool
from akv_jax.runtime.page_blocks import PageBlocks
from akv_jax.runtime.placement import Placement, model_mesh
from akv_jax.runtime.runner import CompilationCounter
from tests.models.test_sharding import config


@pytest.mark.parametrize(("size", "others"), [(2, 1), (1, 4), (4, 4), (3, 2)])
def test_pages_are_the_same_on_the_other_side_and_back(size: int, others: int) -> None:
    """Nine query heads and three KV heads: slots are split and padded differently on the two sides."""
    model, devices, rng = config(9, 3), jax.devices(), np.random.default_rng(0)
    width = model.num_kv_heads * model.head_dim
    there = np.arange(1, 8), np.arange(20, 27), np.arange(30, 37)
    source, target, again = (pages.astype(np.int32) for pages in there)
    rows = rng.normal(size=(2, len(source), width)).astype(np.float32)
    places, pools, blocks = [], [], []
    for mesh in (model_mesh(devices[:size]), model_mesh(devices[size : size + others])):
        place = Placement(model, mesh)
        k, v = (place.empty_pool(50, jnp.float32) for _ in range(2))
        places.append(place)
        pools.append(Pool((k,), (v,)))
        blocks.append(PageBlocks(place, pools[-1]))
    k, v = (pool[0].at[source].set(places[0].slot_rows(r)) for pool, r in zip(pools[0], rows, strict=True))
    first = Pool((k,), (v,))
    second = blocks[1].into(pools[1], target, only_copied(blocks[1], blocks[0].out_of(first, source)))
    first = blocks[0].into(first, again, only_copied(blocks[0], blocks[1].out_of(second, target)))
    for place, pool, pages in ((places[1], second, target), (places[0], first, again), (places[0], first, source)):
        for array, row in zip(pool, rows, strict=True):
            np.testing.assert_array_equal(place.pool_rows(array[0], pages), row)


def only_copied(to: PageBlocks, out: list[jax.Array]) -> list[jax.Array]:
    """They are brought over without a computation, which would come between the parts of a step of the other side."""
    counter = CompilationCounter()
    brought = to.bring(out)
    assert counter.total == 0
    return brought
