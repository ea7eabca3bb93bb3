"""Cases of the grouped matrix product that every backend must get right; tests and the AOT gate share them.

inputs = make(cases()["mixed"])
out = grouped_matmul(*inputs)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np


@dataclass(frozen=True, slots=True)
class Case:
    """Everything but the numbers."""

    #: Rows of each group, and rows of none after them.
    sizes: tuple[int, ...]
    spare: int = 0
    inputs: int = 64
    outputs: int = 64
    bias: bool = True
    kind: Literal["float32", "bfloat16"] = "float32"


class Inputs(NamedTuple):
    """The arguments of an `api.GroupedMatmul`, NumPy."""

    x: np.ndarray
    weight: np.ndarray
    sizes: np.ndarray
    bias: np.ndarray | None


_MIXED = (3, 0, 40, 17, 1)


def cases() -> dict[str, Case]:
    """Every case by name."""
    return {
        "mixed": Case(_MIXED, outputs=96),
        "no_bias": Case(_MIXED, outputs=96, bias=False),
        "rows_of_no_group": Case((5, 20), spare=30),
        "no_rows_of_any_group": Case((0, 0, 0), spare=20, outputs=32),
        "one_group": Case((50,), inputs=32),
        "one_row": Case((0, 0, 1, 0)),
        "widths_of_no_block": Case((16, 32, 9), spare=7, inputs=80, outputs=104),
        "first_and_last_empty": Case((0, 30, 0)),
        "bfloat16": Case(_MIXED, outputs=96, kind="bfloat16"),
        # So many rows a group that a launch takes large blocks.
        "many_rows": Case((300, 0, 170), spare=50, inputs=72, outputs=136, kind="bfloat16"),
    }


def make(case: Case) -> Inputs:
    """Random numbers whose products have about unit variance."""
    generator = np.random.default_rng(0)
    dtype = np.dtype(np.float32 if case.kind == "float32" else ml_dtypes.bfloat16)
    groups, rows = len(case.sizes), sum(case.sizes) + case.spare
    x = generator.standard_normal((rows, case.inputs)).astype(dtype)
    weight = (generator.standard_normal((groups, case.outputs, case.inputs)) / np.sqrt(case.inputs)).astype(dtype)
    bias = generator.standard_normal((groups, case.outputs)).astype(dtype) if case.bias else None
    return Inputs(x, weight, np.array(case.sizes, np.int32), bias)
