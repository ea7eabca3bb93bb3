"""Is a kernel right? Every case against the oracle, as the tests have it. Needs JAX, NumPy and ml_dtypes only.

    verdict = prepare_attention("mixed", case, backend("mine"))()
    assert verdict.wrong is None

Preparing compiles, and may be done in threads; the call runs and judges.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np

from pallas_kernels import cases as attention_cases
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.grouped_matmul.api import GroupedMatmul
from pallas_kernels.grouped_matmul.reference import multiply
from pallas_kernels.reposition import cases as reposition_cases
from pallas_kernels.reposition.api import Reposition
from pallas_kernels.reposition.reference import move
from pallas_kernels.segment_attention.api import SegmentAttention
from pallas_kernels.segment_attention.reference import attend

#: Largest and mean error of unit-variance inputs that is right.
FLOAT32, BFLOAT16, BFLOAT16_MEAN = 2e-5, 2e-2, 2e-3


class Verdict(NamedTuple):
    """What came of one case. `wrong` says what is, and is None if nothing is."""

    case: str
    error: float
    mean: float
    wrong: str | None


Check = Callable[[], Verdict]


def prepare_attention(name: str, case: attention_cases.Case, function: SegmentAttention) -> Check:
    """Of segment-batch attention. Pages of no list and queries of no task hold NaN, so that reading them shows.

    A backend that takes `out`, and writes over it, is run over NaN as well: what it does not write shows.
    """
    inputs, used, poisons = attention_cases.make(case), attention_cases.rows_in_use(case), _takes_out(function)
    listed = inputs.batch.pages[: sum(segment.entries for segment in case.segments)]
    unlisted = np.setdiff1d(np.arange(1, len(inputs.k_pool)), listed)
    for pool in (inputs.k_pool, inputs.v_pool):
        pool[unlisted] = 0x7FC0 if case.kind == "bits" else np.nan
    inputs.q[used:] = np.nan
    out_of = {value: {"out": np.full_like(inputs.q, value)} if poisons else {} for value in (0.0, np.nan)}
    compiled = jax.jit(function, static_argnums=7).lower(*inputs, **out_of[0.0]).compile()

    def check() -> Verdict:
        out = np.asarray(compiled(*inputs[:-1], **out_of[0.0])).astype(np.float64)
        meant = attend(inputs.q.astype(np.float64), *inputs[1:-1], attention=inputs.attention)
        error = np.abs(out - meant)
        wrong = _verdict(error, case.kind)
        if wrong is None and out[used:].any():
            wrong = "rows of no task are not zeros"
        if wrong is None and poisons:
            over = np.asarray(compiled(*inputs[:-1], **out_of[np.nan])).astype(np.float64)
            if not np.array_equal(over[:used], out[:used]):
                wrong = "not every element is written"
            elif not np.isnan(over[used:]).all():
                wrong = "rows of no task are written"
        return Verdict(name, *_size(error), wrong)

    return check


def prepare_grouped_matmul(name: str, case: grouped_cases.Case, function: GroupedMatmul) -> Check:
    """Of the grouped matrix product. Rows of no group hold NaN, and so does `out` of a backend that takes it."""
    inputs = grouped_cases.make(case)
    inputs.x[inputs.sizes.sum() :] = np.nan
    shape = len(inputs.x), inputs.weight.shape[1]
    out_of = {"out": np.full(shape, np.nan, np.float32)} if _takes_out(function) else {}
    compiled = jax.jit(function).lower(*inputs, **out_of).compile()

    def check() -> Verdict:
        error = np.abs(np.asarray(compiled(*inputs, **out_of)).astype(np.float64) - multiply(*inputs))
        # The product of two bfloat16 numbers is exact in float32: only sums are rounded, whatever the dtype.
        return Verdict(name, *_size(error), _verdict(error, "float32"))

    return check


def prepare_reposition(name: str, case: reposition_cases.Case, function: Reposition) -> Check:
    """Of reposition. Target pages hold NaN before, so that what is not written shows."""
    inputs = reposition_cases.make(case)
    targets = inputs.moves.target[: int(inputs.moves.num)]
    others = np.setdiff1d(np.arange(1, case.pages), targets)
    exact = inputs._replace(k_pool=_numbers(inputs.k_pool), v_pool=_numbers(inputs.v_pool))
    meant, copied = move(*exact[:-1], rotation=inputs.rotation)
    for pool in inputs[:2]:
        pool[..., targets, :] = 0x7FC0 if case.kind == "bits" else np.nan
    compiled = jax.jit(function, static_argnums=5).lower(*inputs).compile()

    def check() -> Verdict:
        k, v = (np.asarray(pool) for pool in compiled(*inputs[:-1]))
        error = np.abs(_numbers(k) - meant)[..., targets, :]
        if case.kind == "float32":
            wrong = _verdict(error, case.kind)
        else:
            # One rounding: half a unit in the last of bfloat16's 8 places, and what float32 adds.
            right = error <= np.abs(meant[..., targets, :]) * 2**-8 + 1e-6
            wrong = None if right.all() else f"keys are off by {_size(error)[0]:.2g}, more than one rounding"
        if wrong is None and not np.array_equal(_numbers(v)[..., targets, :], copied[..., targets, :]):
            wrong = "values are not copied exactly"
        if wrong is None and not all(
            out[..., others, :].tobytes() == was[..., others, :].tobytes()
            for out, was in zip((k, v), inputs[:2], strict=True)
        ):
            wrong = "pages that are no target have changed"
        return Verdict(name, *_size(error), wrong)

    return check


#: By operation: its cases, and how to prepare one.
CHECKS: dict[str, tuple[dict[str, Any], Callable[[str, Any, Any], Check]]] = {
    "segment_attention": (attention_cases.cases(), prepare_attention),
    "reposition": (reposition_cases.cases(), prepare_reposition),
    "grouped_matmul": (grouped_cases.cases(), prepare_grouped_matmul),
}


def _takes_out(function: Any) -> bool:
    return "out" in inspect.signature(function).parameters


def _verdict(error: np.ndarray, kind: str) -> str | None:
    largest, mean = _size(error)
    bound = FLOAT32 if kind == "float32" else BFLOAT16
    # A NaN is more than any bound.
    if not largest <= bound:
        return f"off by {largest:.2g}, more than {bound:g}"
    if kind != "float32" and not mean <= BFLOAT16_MEAN:
        return f"off by {mean:.2g} on average, more than {BFLOAT16_MEAN:g}"
    return None


def _size(error: np.ndarray) -> tuple[float, float]:
    return (float(error.max()), float(error.mean())) if error.size else (0.0, 0.0)


def _numbers(pool: np.ndarray) -> np.ndarray:
    return (pool.view(ml_dtypes.bfloat16) if pool.dtype == np.uint16 else pool).astype(np.float64)
