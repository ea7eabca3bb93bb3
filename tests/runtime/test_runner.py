"""The runner's limits (DESIGN R3). What it computes is checked by `spec/` and through the engine."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from akv_jax.config import EngineConfig
from akv_jax.planning.plan import NO_MOVES, Segment, StepPlan
from akv_jax.runtime.batch import build
from akv_jax.runtime.runner import (
    CompilationCounter,
    Runner,
    SamplingPlan,
    empty_sampling,
    rehearsal,
    token_buckets,
)
from tests.shared_engines import config, params
from tests.tiny_engine import TinyEngine, quick_compiles


def tiny(**settings: Any) -> TinyEngine:
    sizes = {"context_length": 256, "max_running_requests": 48, "chunked_prefill_size": 48}
    return TinyEngine(config(), params(), **{**sizes, "token_buckets": (48,), **settings})


@pytest.fixture(scope="module")
def runner() -> Runner:
    """Not warm: nothing here compiles a step."""
    return tiny().runner


def queries(count: int) -> StepPlan:
    column = np.arange(count, dtype=np.int32)
    return StepPlan(
        column, column, column + 1, (Segment(0, count, column + 1, column, 0 * column),), NO_MOVES, column[-1:]
    )


def test_a_step_larger_than_the_largest_bucket_is_refused(runner: Runner) -> None:
    with pytest.raises(ValueError, match="a step of 49 queries, the largest bucket has 48"):
        runner.run(queries(49), SamplingPlan(empty_sampling(1), None))


def test_a_plan_with_too_many_logit_rows_is_refused(runner: Runner) -> None:
    plan = queries(2)
    crowded = StepPlan(plan.tokens, plan.positions, plan.destinations, plan.segments, NO_MOVES, np.zeros(49, np.int32))
    with pytest.raises(ValueError, match="exceeds its bucket"):
        runner.run(crowded, SamplingPlan(empty_sampling(49), None))


def test_a_list_of_every_request_always_fits() -> None:
    """R3: whatever `max_list_entries` says, no request can be kept out for ever."""
    assert tiny(max_list_entries=1).runner.list_capacity(48) >= 48 * 256


def test_a_step_of_one_position_each_can_be_rehearsed() -> None:
    """R3: `--context-length 1`."""
    runner = tiny(context_length=1).runner
    batch = build(
        rehearsal(48), rows=48, logit_rows=48, list_capacity=runner.list_capacity(48), move_capacity=0, tile=16
    )
    assert batch.attention.rows.num == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("chunk", "running"), [(256, 16), (1, 1), (1, 64), (300, 8), (8192, 16)])
def test_buckets_hold_every_step(dtype: str, chunk: int, running: int) -> None:
    """R3: a full chunk, or every request decoding and one query more; a handful of executables."""
    sizes = EngineConfig(100, 100, max_running_requests=running, chunked_prefill_size=chunk, dtype=dtype)  # type: ignore[arg-type]
    buckets = token_buckets(sizes)
    assert list(buckets) == sorted(set(buckets)) and len(buckets) <= 8
    assert buckets[-1] >= max(chunk, running + 1)


@pytest.mark.parametrize("mode", ["on_read", "copy"])
def test_layer_by_layer_is_the_same(mode: str) -> None:
    """R2, R3: one executable for a step or one for each kind of layer, and the pool is left as it should be."""
    plans = [queries(20), _after(queries(20), 30)]
    results = []
    for unit in ("step", "layer"):
        runner = tiny(compile_unit=unit, reposition=mode).runner
        with quick_compiles():
            results.append([runner.run(plan, SamplingPlan(empty_sampling(1), None)).logits(0) for plan in plans])
    np.testing.assert_allclose(*results, rtol=0, atol=1e-5)


def _after(past: StepPlan, count: int) -> StepPlan:
    """More queries of the same sequence, which read the pages that it has written."""
    begin, end = len(past.tokens), len(past.tokens) + count
    positions = np.arange(end, dtype=np.int32)
    segment = Segment(0, count, positions + 1, positions, 0 * positions)
    new = positions[begin:]
    return StepPlan(new, new, new + 1, (segment,), NO_MOVES, np.array([count - 1], np.int32))


def test_compilations_are_counted() -> None:
    """R3: the counter that /metrics shows."""
    counter = CompilationCounter()
    function = jax.jit(lambda x: x * 3 + 1)
    function(np.ones(7, np.float32))
    compiled = counter.total
    assert compiled > 0
    function(np.zeros(7, np.float32))
    assert counter.total == compiled
