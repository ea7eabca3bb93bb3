"""Arrays on the host that the CPU backend takes over without a copy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import DTypeLike

#: Bytes: what XLA asks of a buffer that it does not copy.
_ALIGNMENT = 64


def empty_aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Uninitialised, C-contiguous, at a boundary that `jax.device_put` on a CPU takes as it is."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
