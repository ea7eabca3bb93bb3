"""Grouped matrix product: rows sorted by group, each group times its own matrix, in one call (experts; DESIGN R2).

Shapes: R rows, E groups, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

from pallas_kernels.backends import find

#: (x [R, I], weight [E, O, I], sizes int32 [E], bias [E, O] | None) -> float32 [R, O].
#: Group e owns `sizes[e]` rows, those after the rows of the groups before it: row r of it becomes
#: weight[e] @ x[r] + bias[e], accumulated in float32. Rows after the last group come back as zeros. x and weight have
#: one dtype, float32 or bfloat16; sizes are values, never shapes, and sum to at most R.
GroupedMatmul = Callable[[Array, Array, Array, Array | None], Array]

#: Ours, as "module:function". reference is the oracle, pallas_triton_interpret is pallas_triton without a GPU.
_KNOWN = {
    "xla": "pallas_kernels.grouped_matmul.xla:grouped_matmul",
    "pallas_triton": "pallas_kernels.grouped_matmul.triton:grouped_matmul",
    "pallas_triton_interpret": "pallas_kernels.grouped_matmul.triton:interpreted",
    "reference": "pallas_kernels.grouped_matmul.reference:grouped_matmul",
}
BACKENDS = tuple(_KNOWN)


def backend(name: str) -> GroupedMatmul:
    """The implementation of that name (DESIGN R4): one of `BACKENDS`, or `grouped_matmul` of anybody's module.

    ValueError if there is no such name or module, or no such function in the module.
    """
    return find("grouped_matmul", name, _KNOWN)
