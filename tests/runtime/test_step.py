"""How a batch travels to the device (`runtime/step.py`)."""

from __future__ import annotations

import jax
import numpy as np

from akv_jax.runtime.step import Packed, Packing


def test_a_batch_is_the_same_after_packing() -> None:
    """Scalars, empty arrays, arrays on both sides of the limit; no small one travels alone, no large one is copied."""
    rng = np.random.default_rng(0)
    sizes = {"scalar": (), "empty": (0,), "row": (7,), "table": (3, 5), "below": (Packing.LARGE - 1,)}
    batch = {
        name: rng.integers(-9, 9, shape).astype(np.int32)
        for name, shape in {**sizes, "large": (Packing.LARGE,), "larger": (2, Packing.LARGE)}.items()
    }
    packing = Packing(jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), batch))
    packed = packing.pack(batch)
    assert packed.small.shape == (1 + 0 + 7 + 15 + Packing.LARGE - 1,)
    assert [large is batch[name] for large, name in zip(packed.large, ("large", "larger"), strict=True)] == [True, True]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), packed)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, shapes, packing.shapes))
    again = jax.jit(packing.unpack)(Packed(*packed))
    jax.tree.map(np.testing.assert_array_equal, again, batch)
