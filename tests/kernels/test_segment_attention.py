"""Every backend of segment-batch attention against the oracle, case by case (DESIGN R1-R4)."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from akv_jax.models.decoder import backends_of, kernels
from benchmarks.aot.shapes import QWEN3_30B_A3B
from pallas_kernels.cases import Case, Inputs, abstract, cases, make, rows_in_use
from pallas_kernels.segment_attention.api import BACKENDS, SegmentBatch, backend
from pallas_kernels.segment_attention.reference import attend
from tests.tiny_engine import quick_compiles

CASES = cases()
#: Those that run here; pallas_triton is pallas_triton_interpret on a GPU.
RUNNING = ["xla", "pallas_triton_interpret"]
on_each_backend = pytest.mark.parametrize("backend_name", RUNNING)


def named(*names: str) -> pytest.MarkDecorator:
    """Parametrizes by case; those that are not core are for `make test-long`."""
    marks = {True: (), False: (pytest.mark.long,)}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks[CASES[name].core]) for name in names])


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly() -> Iterator[None]:
    """Compiling is most of what these tests do."""
    with quick_compiles():
        yield


@functools.cache
def run(name: str, backend_name: str) -> np.ndarray:
    """What a backend makes of a case: compiled once for all tests."""
    return launch(make(CASES[name]), backend_name)


@functools.cache
def expected(name: str) -> np.ndarray:
    """The oracle's float64, not yet rounded to the queries' dtype."""
    inputs = make(CASES[name])
    return attend(inputs.q.astype(np.float64), *inputs[1:-1], attention=inputs.attention)


def launch(inputs: Inputs, backend_name: str) -> np.ndarray:
    return np.asarray(compiled(backend_name)(*inputs))


@functools.cache
def compiled(backend_name: str) -> Any:
    """One executable for each attention and set of shapes."""
    return jax.jit(backend(backend_name), static_argnums=7)


def check_close(case: Case, out: np.ndarray, meant: np.ndarray) -> None:
    """Float32 within 2e-5 of unit-variance values; bfloat16 within 2e-2, and 2e-3 on average."""
    error = np.abs(out.astype(np.float64) - meant)[: rows_in_use(case)]
    if case.kind == "float32":
        assert error.max(initial=0) <= 2e-5
    else:
        assert error.max() <= 2e-2
        assert error.mean() <= 2e-3


@on_each_backend
@named(*CASES)
def test_agrees_with_the_oracle(name: str, backend_name: str) -> None:
    """R4: and the result has the queries' shape and dtype, rows of no task being zeros."""
    case, inputs, out = CASES[name], make(CASES[name]), run(name, backend_name)
    assert out.shape == inputs.q.shape and out.dtype == inputs.q.dtype
    check_close(case, out, expected(name))
    assert not out[rows_in_use(case) :].any()
    read = expected(name)[: rows_in_use(case)].any(axis=(1, 2))
    assert read.all() or "empty" in name
    assert np.array_equal(out[: rows_in_use(case)].any(axis=(1, 2)), read)


#: Those that share an executable, or compile quickly, in `make test`; all of them in `make test-long`.
POISONED = {"mixed", "rows_only", "one_query", "exact_blocks", "empty_lists", "gaps", "short_runs"}


@on_each_backend
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in POISONED else pytest.mark.long) for name in CASES]
)
def test_every_element_of_a_task_is_written_and_no_other(name: str, backend_name: str) -> None:
    """R2: over an output full of NaN."""
    inputs, used = make(CASES[name]), rows_in_use(CASES[name])
    out = np.asarray(compiled(backend_name)(*inputs, out=np.full_like(inputs.q, np.nan)))
    check_close(CASES[name], out, expected(name))
    assert not np.isnan(out[:used].astype(np.float32)).any()
    assert np.isnan(out[used:].astype(np.float32)).all()


@named(*{abstract(case): name for name, case in reversed(CASES.items())}.values())
def test_lowers_for_a_gpu(name: str) -> None:
    """R4: the interpreter takes much that Triton does not. One case of each set of shapes."""
    lowered = jax.jit(backend("pallas_triton"), static_argnums=7).trace(*abstract(CASES[name]))
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    # Rows and tiles, each walked and merged.
    assert text.count("__gpu$xla.gpu.triton") == 4


@named(*CASES)
def test_abstract_cases_have_the_shapes_of_real_ones(name: str) -> None:
    """R3: but that a device holds bfloat16 as it is."""
    made, shapes = make(CASES[name]), abstract(CASES[name])
    bits = np.dtype(np.uint16)

    def shape(array: Any) -> Any:
        return np.shape(array), np.dtype(ml_dtypes.bfloat16) if array.dtype == bits else array.dtype

    assert jax.tree.map(shape, made[:-1]) == jax.tree.map(shape, shapes[:-1])
    assert made.attention == shapes.attention


def dense(inputs: Inputs, name: str) -> np.ndarray:
    """The oracle once more, another way: one softmax over all entries of a query, keys stored where they are read."""
    case = CASES[name]
    out = np.zeros(inputs.q.shape)
    keys, values = (
        (pool.view(ml_dtypes.bfloat16) if case.kind == "bits" else pool).astype(np.float64)
        for pool in (inputs.k_pool, inputs.v_pool)
    )
    batch, share = inputs.batch, case.num_heads // case.num_kv_heads
    first = row = 0
    for segment in case.segments:
        view = slice(first, first + segment.entries)
        shape = segment.entries, case.num_kv_heads, case.head_dim
        k = turned(keys[batch.pages[view]].reshape(shape), batch.shifts[view], inputs, case)
        v = values[batch.pages[view]].reshape(shape)
        for query in range(row, row + segment.queries):
            q = inputs.q[query].astype(np.float64).reshape(case.num_kv_heads, share, case.head_dim)
            scores = np.einsum("gsd,egd->gse", q, k).reshape(case.num_heads, -1) / np.sqrt(case.head_dim)
            if case.softcap is not None:
                scores = np.tanh(scores / case.softcap) * case.softcap
            distance = batch.query_positions[query] - batch.positions[view]
            scores[:, (distance < 0) | (distance >= (case.window or np.inf))] = -np.inf
            sink = np.full((case.num_heads, 1), -np.inf) if inputs.sinks is None else inputs.sinks[:, None]
            weights = np.exp(np.concatenate([scores, sink], axis=1))
            weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
            weights = weights[:, :-1].reshape(case.num_kv_heads, share, -1)
            out[query] = np.einsum("gse,egd->gsd", weights, v).reshape(case.num_heads, case.head_dim)
        first, row = view.stop, row + segment.queries
    return out


def turned(keys: np.ndarray, shifts: np.ndarray, inputs: Inputs, case: Case) -> np.ndarray:
    """Rotation as multiplication by complex numbers."""
    angle = np.arctan2(inputs.sin[1], inputs.cos[1]).astype(np.float64)
    turn = np.exp(1j * shifts[:, None, None] * angle)
    half = case.rotary_dim // 2 if case.rotary_dim else case.head_dim // 2
    out = keys.copy()
    real, imaginary = (
        (slice(0, half), slice(half, 2 * half))
        if case.style == "half"
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    product = (keys[..., real] + 1j * keys[..., imaginary]) * turn
    out[..., real], out[..., imaginary] = product.real, product.imag
    return out


@named(*CASES)
def test_the_oracle_agrees_with_a_dense_definition(name: str) -> None:
    """R4: so that no mistake of the oracle is the norm."""
    np.testing.assert_allclose(expected(name), dense(make(CASES[name]), name), atol=2e-4)


@on_each_backend
@named("mixed", "window_and_gaps", "everything", "shifts", "bits_of_smollm2", "sinks_and_window", "bits", "empty_lists")
def test_nothing_else_is_read(name: str, backend_name: str) -> None:
    """R1: pages that no list names hold NaN, padding of every array other garbage, and nothing changes."""
    case, inputs = CASES[name], make(CASES[name])
    total = sum(segment.entries for segment in case.segments)
    unlisted = np.setdiff1d(np.arange(1, len(inputs.k_pool)), inputs.batch.pages[:total])
    assert len(unlisted) > total
    poison = 0x7FC0 if case.kind == "bits" else np.nan
    for pool in (inputs.k_pool, inputs.v_pool):
        pool[unlisted] = poison
        # The scratch page may be read in place of padding, and must have no weight.
        pool[0] = 0x4700 if case.kind == "bits" else 1e4
    used = rows_in_use(case)
    inputs.q[used:] = np.nan
    inputs.batch.query_positions[used:] = 7
    for column in inputs.batch[:4]:
        column[total:] = np.resize([2**31 - 1, -(2**31), 0], len(column) - total)
    for tasks in (inputs.batch.rows, inputs.batch.tiles):
        for column in tasks[:5]:
            column[int(tasks.num) :] = 2**31 - 1
    assert np.array_equal(launch(inputs, backend_name), run(name, backend_name))


@on_each_backend
def test_entries_out_of_sight_have_no_weight(backend_name: str) -> None:
    """L6: neither what is ahead of a query nor what its window hides, however large."""
    inputs, name = make(CASES["window_and_gaps"]), "window_and_gaps"
    batch, case = inputs.batch, CASES[name]
    seen = np.zeros(len(inputs.k_pool), bool)
    first = row = 0
    for segment in case.segments:
        view = slice(first, first + segment.entries)
        queries = batch.query_positions[row : row + segment.queries]
        distance = queries[:, None] - batch.positions[view]
        seen[batch.pages[view][((distance >= 0) & (distance < case.window)).any(axis=0)]] = True
        first, row = view.stop, row + segment.queries
    assert 0 < seen.sum() < first
    inputs.k_pool[~seen] = inputs.v_pool[~seen] = 1e4
    np.testing.assert_allclose(launch(inputs, backend_name), run(name, backend_name), atol=1e-6)


@on_each_backend
@named("shifts", "all_shifted", "short_runs", "partial", "interleaved")
def test_turning_on_read_is_storing_turned_keys(name: str, backend_name: str) -> None:
    """C8: the two ways to reposition give the same attention."""
    case, inputs = CASES[name], make(CASES[name])
    total = sum(segment.entries for segment in case.segments)
    batch = inputs.batch
    pages, shifts = batch.pages[:total], batch.shifts[:total]
    assert shifts.any()
    heads = inputs.k_pool[pages].astype(np.float64).reshape(total, case.num_kv_heads, case.head_dim)
    inputs.k_pool[pages] = turned(heads, shifts, inputs, case).reshape(total, -1)
    stored = inputs._replace(
        batch=batch._replace(shifts=np.zeros_like(batch.shifts)),
        attention=dataclasses.replace(inputs.attention, shifts=False),
    )
    np.testing.assert_allclose(launch(stored, backend_name), run(name, backend_name), atol=3e-4)


@on_each_backend
def test_a_row_and_a_tile_of_one_query_agree(backend_name: str) -> None:
    """R3: how a plan is cut into tasks changes nothing."""
    rows, tiles = (make(dataclasses.replace(CASES["shifts"], short=short)) for short in (10_000, 0))
    assert int(rows.batch.tiles.num) == 0 and int(tiles.batch.rows.num) == 0
    np.testing.assert_allclose(launch(rows, backend_name), launch(tiles, backend_name), atol=2e-5)


@on_each_backend
def test_lists_may_share_pages(backend_name: str) -> None:
    """R1: two queries that read the same entries."""
    inputs = make(Case((dataclasses.replace(CASES["mixed"].segments[3], entries=300),) * 2, shifted=0.4))
    batch: SegmentBatch = inputs.batch
    for column in (batch.pages, batch.positions, batch.shifts):
        column[300:600] = column[:300]
    batch.run_stops[300:600] = 300 + np.minimum(batch.run_stops[:300], 300)
    inputs.q[1] = inputs.q[0]
    out = launch(inputs, backend_name)
    np.testing.assert_array_equal(out[0], out[1])


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a host callback of JAX hangs on one core")
def test_the_reference_backend_is_the_oracle() -> None:
    """R4: by name, under jit, as a model calls it."""
    np.testing.assert_allclose(run("window_1", "reference"), expected("window_1"), atol=1e-6)


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: an unknown name is refused with the known ones; a file of anybody's is a backend."""
    assert set(BACKENDS) == {"reference", "xla", "pallas_triton", "pallas_triton_interpret"}
    with pytest.raises(ValueError, match=r"unknown segment_attention backend 'flash': expected one of xla, pallas_tri"):
        backend("flash")
    with pytest.raises(ValueError, match=r"unknown segment_attention backend 'some\.flash'"):
        backend("some.flash")
    with pytest.raises(ValueError, match="unknown segment_attention backend ''"):
        backend("")
    with pytest.raises(ValueError, match="'json' is a module without a function segment_attention"):
        backend("json")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one_of_mine.py").write_text("def segment_attention(*arguments):\n    return arguments[0]\n")
    (tmp_path / "broken_one.py").write_text("import no_such_thing\n")
    assert backend("one_of_mine")(1, *[None] * 7) == 1  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError, match="no_such_thing"):
        backend("broken_one")


def test_a_module_need_not_have_every_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4: what it lacks is xla's, whatever the model and the mode need; one that has none of them is refused."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "only_attention.py").write_text("def segment_attention(*arguments): ...\n")
    (tmp_path / "only_experts.py").write_text("def grouped_matmul(*arguments): ...\n")
    xla = kernels(QWEN3_30B_A3B, "xla", "copy")
    mine = kernels(QWEN3_30B_A3B, "only_attention", "copy")
    assert mine.attention is backend("only_attention")
    assert (mine.reposition, mine.grouped_matmul) == (xla.reposition, xla.grouped_matmul)
    mine = kernels(QWEN3_30B_A3B, "only_experts", "on_read")
    assert mine.attention is xla.attention and mine.reposition is None
    assert mine.grouped_matmul is not xla.grouped_matmul
    assert backends_of("only_experts") == {
        "segment_attention": "xla",
        "reposition": "xla",
        "grouped_matmul": "only_experts",
    }
    with pytest.raises(ValueError, match="'json' is a module without any of the functions segment_attention, reposit"):
        kernels(QWEN3_30B_A3B, "json", "on_read")
    with pytest.raises(ValueError, match="unknown segment_attention backend 'flash'"):
        backends_of("flash")
