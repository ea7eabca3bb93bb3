"""Every backend of the grouped matrix product against the oracle (DESIGN R4)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.grouped_matmul.api import BACKENDS, backend
from pallas_kernels.grouped_matmul.cases import cases, make
from pallas_kernels.grouped_matmul.reference import multiply
from pallas_kernels.grouped_matmul.triton import Config, choose, grouped_matmul, tiles_of

CASES = cases()


@functools.cache
def compiled(backend_name: str) -> Any:
    return jax.jit(backend(backend_name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend_name", ["xla", "pallas_triton_interpret"])
def test_agrees_with_the_oracle(backend_name: str, name: str) -> None:
    """R4: within 2e-5 of values of about unit variance; rows of no group are zeros.

    The product of two bfloat16 numbers is exact in float32, so for them too only the sum is rounded.
    """
    inputs = make(CASES[name])
    out = np.asarray(compiled(backend_name)(*inputs))
    assert out.dtype == np.float32
    assert np.abs(out - multiply(*inputs)).max() <= 2e-5
    assert not out[inputs.sizes.sum() :].any()


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_written(name: str) -> None:
    """R4: over an output full of NaN, those of rows of no group too."""
    inputs = make(CASES[name])
    out = np.full((len(inputs.x), inputs.weight.shape[1]), np.nan, np.float32)
    written = np.asarray(compiled("pallas_triton_interpret")(*inputs, out=out))
    assert np.abs(written - multiply(*inputs)).max() <= 2e-5


def test_rows_of_no_group_may_hold_anything() -> None:
    inputs = make(CASES["rows_of_no_group"])
    inputs.x[inputs.sizes.sum() :] = np.nan
    for name in ("xla", "pallas_triton_interpret"):
        assert not np.asarray(compiled(name)(*inputs))[inputs.sizes.sum() :].any(), name


@pytest.mark.parametrize("tile", [16, 64])
def test_tiles_cover_every_row_once_and_straddle_no_groups(tile: int) -> None:
    """Whatever the sizes, the number of tiles that a launch has is enough."""
    generator, rows = np.random.default_rng(1), 150
    cut = jax.jit(tiles_of, static_argnums=(1, 2))
    for _ in range(50):
        sizes = generator.multinomial(generator.integers(0, rows + 1), generator.dirichlet(np.full(6, 0.4)))
        owner = np.repeat(np.arange(7), [*sizes, rows - sizes.sum()])
        seen = np.zeros(rows, np.int64)
        for group, start, stop in zip(*map(np.asarray, cut(sizes.astype(np.int32), rows, tile))):
            assert stop - start <= tile
            assert (owner[start:stop] == group).all()
            seen[start:stop] += 1
        assert (seen == 1).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rows", [8, 4096])
def test_lowers_for_cuda(rows: int, dtype: Any) -> None:
    """What the interpreter accepts Triton may not: every configuration that is chosen is lowered too."""
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    arguments = (shape((rows, 2880)), shape((4, 2880, 2880)), jax.ShapeDtypeStruct((4,), np.int32), shape((4, 2880)))
    lowered = jax.jit(grouped_matmul).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "xla.gpu.triton" in lowered.as_text()


def test_configurations_depend_on_what_a_group_has() -> None:
    few, many = choose(64, 32, jnp.dtype(jnp.bfloat16)), choose(1 << 15, 32, jnp.dtype(jnp.bfloat16))
    assert isinstance(few, Config)
    assert few.rows < many.rows


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match=", ".join(BACKENDS)):
        backend("cuda")
