"""Cases of reposition that every backend must get right; tests, benchmarks and the AOT gate share them.

case = cases()["partial"]
inputs = make(case)
k_pool, v_pool = reposition(*inputs)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np

from pallas_kernels.reposition.api import MOVE_PADDING, MoveBatch, Rotation

#: "bits" is a pool of uint16 that holds bfloat16 bits.
Kind = Literal["float32", "bfloat16", "bits"]


@dataclass(frozen=True, slots=True)
class Case:
    """Everything but the numbers."""

    moves: int
    num_kv_heads: int = 2
    head_dim: int = 64
    #: How many of the head's dimensions are turned; None is all of them.
    rotary_dim: int | None = None
    style: Literal["half", "interleaved"] = "half"
    #: Moves of one shift in a row, at most.
    run: int = 40
    #: 0 is one layer, [P, G*D]; else a pool of all layers.
    layers: int = 0
    #: Which table each layer uses; none is one for all.
    tables: tuple[int, ...] = ()
    pages: int = 1200
    kind: Kind = "float32"
    seed: int = 0


class Inputs(NamedTuple):
    """The arguments of an `api.Reposition`, NumPy."""

    k_pool: np.ndarray
    v_pool: np.ndarray
    moves: MoveBatch
    cos: np.ndarray
    sin: np.ndarray
    rotation: Rotation


#: Room in the lists of moves, and rows of a table.
_MOVES, _ROWS = 512, 3000


def cases() -> dict[str, Case]:
    """Every case by name."""
    return {
        "some": Case(100),
        "none": Case(0),
        "one": Case(1),
        "exact_block": Case(MOVE_PADDING),
        "several_blocks": Case(MOVE_PADDING + 33),
        "all_alike": Case(200, run=1000),
        "all_different": Case(200, run=1),
        "one_kv_head": Case(70, num_kv_heads=1),
        "three_kv_heads": Case(70, num_kv_heads=3),
        "eight_kv_heads": Case(70, num_kv_heads=8),
        "head_16": Case(70, head_dim=16),
        "head_96": Case(70, head_dim=96),
        "head_128": Case(70, head_dim=128),
        "partial": Case(70, rotary_dim=32),
        "interleaved": Case(70, style="interleaved"),
        "partial_interleaved": Case(70, head_dim=96, rotary_dim=24, style="interleaved"),
        "layers": Case(70, layers=3, pages=300),
        "layers_of_two_kinds": Case(70, layers=3, tables=(1, 0, 1), pages=300, style="interleaved"),
        "bfloat16": Case(300, kind="bfloat16"),
        "bfloat16_layers": Case(70, kind="bfloat16", layers=2, pages=300, head_dim=96, rotary_dim=64),
        "bits": Case(300, kind="bits"),
        "bits_of_smollm2": Case(300, kind="bits", num_kv_heads=3),
        "bits_partial_interleaved": Case(70, kind="bits", head_dim=96, rotary_dim=24, style="interleaved"),
    }


def make(case: Case) -> Inputs:
    """Random unit-variance numbers and moves. Page 0 is the scratch page, where padding writes."""
    generator = np.random.default_rng(case.seed)
    dtype = np.dtype(np.float32 if case.kind == "float32" else ml_dtypes.bfloat16)
    shape = (*([case.layers] if case.layers else []), case.pages, case.num_kv_heads * case.head_dim)
    k, v = (generator.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    if case.kind == "bits":
        k, v = k.view(np.uint16), v.view(np.uint16)
    # A source may be moved to several places, a target is written once.
    targets = 1 + generator.permutation(case.pages - 1)[: case.moves]
    others = np.setdiff1d(np.arange(1, case.pages), targets)
    columns: Any = np.zeros((3, _MOVES + MOVE_PADDING), np.int32)
    columns[0, : case.moves], columns[1, : case.moves] = generator.choice(others, case.moves), targets
    columns[2, : case.moves] = _shifts(generator, case)
    num: Any = np.int32(case.moves)
    cos, sin = _tables(case)
    rotation = Rotation(case.num_kv_heads, case.head_dim, case.style, case.tables)
    return Inputs(k, v, MoveBatch(*columns, num=num), cos, sin, rotation)


def _shifts(generator: np.random.Generator, case: Case) -> np.ndarray:
    """Runs of one shift, of either sign."""
    shifts = np.zeros(case.moves, np.int32)
    start = 0
    while start < case.moves:
        stop = start + int(generator.integers(1, case.run + 1))
        shifts[start:stop] = int(generator.integers(1 - _ROWS, _ROWS))
        start = stop
    return shifts


def _tables(case: Case) -> tuple[np.ndarray, np.ndarray]:
    dim = case.rotary_dim or case.head_dim
    exponents = np.arange(0, dim, 2) / dim
    bases = (10_000.0, 500_000.0)[: max(case.tables) + 1] if case.tables else (10_000.0,)
    angles = np.stack([np.arange(_ROWS)[:, None] * base**-exponents for base in bases])
    angles = angles if case.tables else angles[0]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
