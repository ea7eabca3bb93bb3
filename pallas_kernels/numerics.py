"""What kernels have in common about numbers."""

from __future__ import annotations

import functools
from typing import Any

from jax import lax
from jax import numpy as jnp


def dot(a: Any, b: Any, axis: int) -> Any:
    """a [M, K] with b contracted over `axis`, accumulated in float32 (and never in TF32)."""
    return lax.dot_general(
        a, b, (((1,), (axis,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


@functools.cache
def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; without, XLA widens bfloat16 operands at several times our cost."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            return "avx512_bf16" in info.read()
    except OSError:
        return False
