"""Grouped matrix product: rows sorted by group, each group times its own matrix, in one call (experts; DESIGN R2).

Shapes: R rows, E groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

#: (x [R, I], weight [E, O, I], sizes int32 [E], bias [E, O] | None) -> float32 [R, O].
#: Group e owns `sizes[e]` rows, those after the rows of the groups before it: row r of it becomes
#: weight[e] @ x[r] + bias[e], accumulated in float32. Rows after the last group come back as zeros. x and weight have
#: one dtype, float32 or bfloat16; sizes are values, never shapes, and sum to at most R.
GroupedMatmul = Callable[[Array, Array, Array, Array | None], Array]

BACKENDS = ("xla", "pallas_triton", "pallas_triton_interpret", "reference")


def backend(name: str) -> GroupedMatmul:
    """The implementation of that name; ValueError lists the known ones."""
    if name == "xla":
        from pallas_kernels.grouped_matmul.xla import grouped_matmul
    elif name == "pallas_triton":
        from pallas_kernels.grouped_matmul.triton import grouped_matmul
    elif name == "pallas_triton_interpret":
        from pallas_kernels.grouped_matmul.triton import interpreted as grouped_matmul
    elif name == "reference":
        from pallas_kernels.grouped_matmul.reference import grouped_matmul
    else:
        raise ValueError(f"unknown grouped matmul backend {name!r}: expected one of {', '.join(BACKENDS)}")
    return grouped_matmul
