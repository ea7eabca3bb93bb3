"""A runner over several devices (DESIGN R5): what it communicates, what it copies, and how pages leave and enter it.

What it computes is checked by `spec/test_conformance_sharded.py`.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

from akv_jax.config import CompileUnit, EngineConfig
from akv_jax.models.sharding import layout_of
from akv_jax.models.weights.table import build_params, weight_table
from akv_jax.planning.plan import NO_MOVES, Segment, StepPlan
from akv_jax.runtime import step
from akv_jax.runtime.placement import Placement, model_mesh
from akv_jax.runtime.runner import Runner, SamplingPlan, empty_sampling
from spec.test_conformance_sharded import configs
from tests.tiny_engine import engine_model, quick_compiles

CONFIG = engine_model(configs()["uneven"])
MOE = engine_model(configs()["everything"])
PAGES = 40


def weights(model: Any, dtype: str = "float32") -> Any:
    rng = np.random.default_rng(3)
    return build_params(weight_table(model), lambda info: rng.normal(0, 0.2, info.shape).astype(dtype))


def runner_over(devices: int | None, model: Any = CONFIG, **settings: Any) -> Runner:
    sizes = {"num_pages": PAGES, "max_running_requests": 4, "chunked_prefill_size": 16, "token_buckets": (16,)}
    config = EngineConfig(**{"context_length": 64, "tile": 8, "max_list_entries": 256, **sizes, **settings})
    mesh = None if devices is None else model_mesh(jax.devices()[:devices])
    return Runner(model, weights(model, config.dtype), config, mesh)


def queries(count: int, past: int = 0) -> StepPlan:
    """The next tokens of one sequence, whose token i is on page i + 1."""
    positions = np.arange(past + count, dtype=np.int32)
    new = positions[past:]
    segment = Segment(0, count, positions + 1, positions, 0 * positions)
    return StepPlan(new, new, new + 1, (segment,), NO_MOVES, np.array([count - 1], np.int32))


def logits(runner: Runner, *plans: StepPlan) -> np.ndarray:
    results = [runner.run(plan, SamplingPlan(empty_sampling(1), None)) for plan in plans]
    return np.stack([result.logits(0) for result in results])


@pytest.mark.parametrize("unit", ["layer", pytest.param("step", marks=pytest.mark.long)])
def test_nothing_compiles_and_no_pool_is_copied_after_warm_up(unit: CompileUnit) -> None:
    """R3: every device's part of every pool stays where it is, step after step."""
    with quick_compiles():
        runner = runner_over(4, compile_unit=unit)
        runner.warm_up()
    compiled, places = runner.compilations.total, _places(runner)
    logits(runner, queries(13), queries(1, past=13), queries(5, past=14))
    assert runner.compilations.total == compiled
    assert _places(runner) == places and len(places) == 2 * CONFIG.num_layers * 4


def _places(runner: Runner) -> list[int]:
    pools = [*runner._pool.k, *runner._pool.v]
    return [shard.data.unsafe_buffer_pointer() for pool in pools for shard in pool.addressable_shards]


@pytest.mark.parametrize(
    ("model", "devices"), [(MOE, 4), *(pytest.param(model, 8, marks=pytest.mark.long) for model in (CONFIG, MOE))]
)
def test_what_is_communicated(model: Any, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5: a sum after the embedding and two a layer, the logits put together, and nothing else."""
    made, compile_for = [], step.compile_for

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(compile_for(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(step, "compile_for", noted)
    with quick_compiles():
        runner = runner_over(devices, model, compile_unit="step")
        runner._step(16)
    (compiled,) = made
    operations = re.findall(
        r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(", compiled.as_text()
    )
    assert sorted(operations) == ["all-gather"] + ["all-reduce"] * (1 + 2 * model.num_layers)
    # What is given back where it was taken is not counted as an output: all of the pool is.
    local = layout_of(model, devices).local
    pool = 2 * model.num_layers * (PAGES + 1) * local.num_kv_heads * model.head_dim * 4
    assert compiled.memory_analysis().alias_size_in_bytes == pool


@pytest.mark.parametrize(
    ("dtype", "meshes"), [("bfloat16", (None, 4)), pytest.param("float32", (None, 4, 8), marks=pytest.mark.long)]
)
def test_pages_go_from_any_mesh_to_any_other(dtype: str, meshes: tuple[int | None, ...]) -> None:
    """C7, R5: what leaves a pool is the model's own heads, so that a stored cache can be loaded over other devices, and
    the next token is what it would have been."""
    settings: dict[str, Any] = {"dtype": dtype, "compile_unit": "step"}
    pages = np.arange(1, 14, dtype=np.int32)
    with quick_compiles():
        runners = [runner_over(devices, **settings) for devices in meshes]
        stored, expected = [], []
        for runner in runners:
            logits(runner, queries(13))
            stored.append(list(runner.read_pages(pages)))
            expected.append(logits(runner, queries(1, past=13)))
        # bfloat16 rounds sums that were taken in other orders.
        tolerance = 1e-5 if dtype == "float32" else 3e-2
        for arrays in stored[1:]:
            for (name, one), (same, other) in zip(stored[0], arrays, strict=True):
                assert name == same and one.shape == other.shape == (13, CONFIG.num_kv_heads * CONFIG.head_dim)
                np.testing.assert_allclose(_numbers(one), _numbers(other), rtol=0, atol=tolerance)
        for source, runner in enumerate(runners, start=-1):
            runner.write_pages(pages[::-1] + 20, stored[source])
            for (_, one), (_, other) in zip(stored[source], runner.read_pages(pages[::-1] + 20), strict=True):
                np.testing.assert_array_equal(one, other)
            moved = queries(1, past=13)
            (segment,) = moved.segments
            there = np.append(pages[::-1] + 20, np.int32(14))
            segment = Segment(0, 1, there, segment.positions, segment.shifts)
            plan = StepPlan(moved.tokens, moved.positions, moved.destinations, (segment,), NO_MOVES, moved.logit_rows)
            np.testing.assert_allclose(logits(runner, plan), expected[0], rtol=0, atol=tolerance)


def _numbers(rows: np.ndarray) -> np.ndarray:
    return rows if rows.dtype == np.float32 else rows.view("bfloat16").astype(np.float32)


def test_pages_of_another_model_are_refused() -> None:
    runner, pages = runner_over(4), np.arange(1, 3, dtype=np.int32)
    rows = np.zeros((2, layout_of(CONFIG, 4).slots * CONFIG.head_dim), np.float32)
    with pytest.raises(ValueError, match=r"where layer-000-k, float32 \(2, 24\) was expected"):
        runner.write_pages(pages, [("layer-000-k", rows)])


def test_weights_that_come_out_even_are_not_copied() -> None:
    """A model is in this machine's memory once, however many of its CPUs' devices share it; but what is cut across its
    rows has to be copied."""
    model = engine_model(configs()["even"])
    host = weights(model)
    aligned = np.zeros(host["layers"][0]["q"].nbytes + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    q = aligned[start : start + host["layers"][0]["q"].nbytes].view(np.float32).reshape(host["layers"][0]["q"].shape)
    host["layers"][0]["q"] = q
    placed = Placement(model, model_mesh(jax.devices()[:4])).params(host)
    shards = placed["layers"][0]["q"].addressable_shards
    places = [shard.data.unsafe_buffer_pointer() - q.ctypes.data for shard in shards]
    assert places == [number * q.nbytes // 4 for number in range(4)]


def test_what_runs_where_is_told() -> None:
    mesh = model_mesh(jax.devices()[:4])
    assert str(Placement(CONFIG, mesh)) == "4 × cpu (cpu), mesh data 1 × model 4, 3 KV heads in 4 slots"
    assert str(Placement(CONFIG, None)) == "cpu (cpu)"
