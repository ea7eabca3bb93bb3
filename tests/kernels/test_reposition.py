"""Every backend of reposition against the oracle, case by case (DESIGN C2, C8, R4)."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.reposition.api import BACKENDS, MoveBatch, backend
from pallas_kernels.reposition.cases import Case, Inputs, cases, make
from pallas_kernels.reposition.reference import move

CASES = cases()
#: Those of `make test`, for the backend that compiles slowly.
QUICK = {"some", "none", "one", "several_blocks", "all_different", "partial_interleaved", "layers_of_two_kinds", "bits"}
TESTED = [
    pytest.param(name, of, marks=[] if of == "xla" or name in QUICK else pytest.mark.long)
    for of in ("xla", "pallas_triton_interpret")
    for name in CASES
]


@functools.cache
def compiled(backend_name: str) -> Any:
    """One executable for each rotation and set of shapes, whatever the number of moves."""
    return jax.jit(backend(backend_name), static_argnums=5)


def numbers(pool: np.ndarray) -> np.ndarray:
    return (pool.view(ml_dtypes.bfloat16) if pool.dtype == np.uint16 else pool).astype(np.float64)


def launch(inputs: Inputs, backend_name: str) -> tuple[np.ndarray, np.ndarray]:
    k, v = compiled(backend_name)(*inputs)
    return np.asarray(k), np.asarray(v)


def targets_of(inputs: Inputs) -> np.ndarray:
    return inputs.moves.target[: int(inputs.moves.num)]


def exact(case: Case, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The oracle over float64 pools: its K is not rounded to the pool's dtype."""
    pools = numbers(inputs.k_pool), numbers(inputs.v_pool)
    return move(*pools, *inputs[2:-1], rotation=inputs.rotation)


@pytest.mark.parametrize(("name", "of"), TESTED)
def test_agrees_with_the_oracle(name: str, of: str) -> None:
    """C3, C8: keys within 2e-5 or one rounding, values bit by bit; every target is written, and nothing else."""
    case, inputs = CASES[name], make(CASES[name])
    targets = targets_of(inputs)
    meant, copied = exact(case, inputs)
    before = inputs.k_pool.copy(), inputs.v_pool.copy()
    for pool in (inputs.k_pool, inputs.v_pool):
        # NaN, so that an element left as it was shows.
        pool[..., targets, :] = 0x7FC0 if case.kind == "bits" else np.nan
    k, v = launch(inputs, of)
    assert k.dtype == inputs.k_pool.dtype and k.shape == inputs.k_pool.shape
    error = np.abs(numbers(k) - meant)[..., targets, :]
    if case.kind == "float32":
        assert error.max(initial=0) <= 2e-5
    else:
        # Half a unit in the last of bfloat16's 8 places, and what float32 adds.
        assert (error <= np.abs(meant[..., targets, :]) * 2**-8 + 1e-6).all()
    assert np.array_equal(numbers(v)[..., targets, :], copied[..., targets, :])
    # The scratch page, 0, is where padding may write.
    others = np.setdiff1d(np.arange(1, case.pages), targets)
    for after, was in zip((k, v), before, strict=True):
        assert after[..., others, :].tobytes() == was[..., others, :].tobytes()


def test_the_cases_turn_both_ways() -> None:
    """C8: a reposition may be undone, and pages may be read again where they were: shifts of either sign."""
    shifts = make(CASES["all_different"]).moves.shift[:200]
    assert (shifts < -1000).any() and (shifts > 1000).any()


@pytest.mark.parametrize("name", ["some", "partial", "interleaved", "partial_interleaved", "layers_of_two_kinds"])
def test_the_oracle_agrees_with_a_definition(name: str) -> None:
    """L7: turning is multiplication by exp(i·shift·frequency), which no mistake of the oracle may hide."""
    case, inputs = CASES[name], make(CASES[name])
    moves, dim = int(inputs.moves.num), case.rotary_dim or case.head_dim
    source, target, shift = (column[:moves] for column in inputs.moves[:3])
    meant, _ = exact(case, inputs)
    for layer in range(case.layers or 1):
        base = (10_000.0, 500_000.0)[case.tables[layer] if case.tables else 0]
        turn = np.exp(1j * np.outer(shift, base ** (-np.arange(0, dim, 2) / dim)))[:, None, :]
        pool, out = ((p[layer] if case.layers else p).astype(np.float64) for p in (inputs.k_pool, meant))
        was, now = (rows.reshape(moves, case.num_kv_heads, case.head_dim) for rows in (pool[source], out[target]))
        if case.style == "half":
            pairs, there = (h[..., : dim // 2] + 1j * h[..., dim // 2 : dim] for h in (was, now))
        else:
            pairs, there = (h[..., 0:dim:2] + 1j * h[..., 1:dim:2] for h in (was, now))
        np.testing.assert_allclose(there, pairs * turn, atol=1e-6)
        assert np.array_equal(now[..., dim:], was[..., dim:])


def test_moving_there_and_back_is_the_identity() -> None:
    """L3: from birth to a version and back, within the rounding of two rotations."""
    inputs = make(CASES["some"])
    count, (source, target, shift, num) = int(inputs.moves.num), inputs.moves
    k, v = launch(inputs, "xla")
    back = MoveBatch(target, _replaced(target, np.setdiff1d(np.arange(1, 1200), target)[:count]), -shift, num)
    k_back, v_back = launch(inputs._replace(k_pool=k, v_pool=v, moves=back), "xla")
    np.testing.assert_allclose(k_back[back.target[:count]], k[source[:count]], atol=2e-6)
    assert np.array_equal(v_back[back.target[:count]], v[source[:count]])


def _replaced(column: Any, values: np.ndarray) -> Any:
    out = column.copy()
    out[: len(values)] = values
    return out


@pytest.mark.parametrize("name", ["some", "bits_of_smollm2", "layers"])
def test_donated_pools_are_written_in_place(name: str) -> None:
    """R3: no copy of a pool, which would cost more than all moves."""
    inputs = make(CASES[name])
    donating = jax.jit(backend("xla"), static_argnums=5, donate_argnums=(0, 1)).lower(*inputs).compile()
    memory: Any = donating.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * inputs.k_pool.nbytes
    # Blocks of 256 moves in float32 on their way, at most.
    assert memory.temp_size_in_bytes < 16 * 256 * inputs.k_pool.shape[-1] * 4


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.kind != "bits"])
def test_lowers_for_cuda(name: str) -> None:
    """R4: Triton accepts what the interpreter does, and both pools are aliased to the outputs."""
    inputs = make(CASES[name])
    traced = jax.jit(backend("pallas_triton"), static_argnums=5, donate_argnums=(0, 1)).trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert text.count("output_operand_alias<") == 2


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a host callback of JAX hangs on one core")
def test_the_reference_backend_is_the_oracle() -> None:
    """R4: by name, under jit, as a model calls it."""
    inputs = make(CASES["one"])
    for out, meant in zip(launch(inputs, "reference"), move(*inputs[:-1], rotation=inputs.rotation), strict=True):
        assert np.array_equal(out, meant)


def test_names() -> None:
    """R4: by name or by module; an unknown name is refused with the known ones."""
    assert BACKENDS == ("xla", "pallas_triton", "pallas_triton_interpret", "reference")
    assert backend("pallas_kernels.reposition.xla") is backend("xla")
    with pytest.raises(ValueError, match=r"unknown reposition backend 'fast': expected one of xla, pallas_triton, "):
        backend("fast")
    with pytest.raises(ValueError, match=r"'pallas_kernels.cases' is a module without a function reposition"):
        backend("pallas_kernels.cases")
