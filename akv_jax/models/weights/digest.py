"""Which weights these are, by content: what was computed with one model is never used with another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from akv_jax.models.weights.table import Params


def weights_digest(params: Params) -> str:
    """SHA-256 (hex) over name, dtype, shape and every byte of every array, NumPy or JAX, as it is used.

    Every byte, because a sample would miss an edited row of an embedding. Hashing what is in memory instead of the
    files needs no reading, and takes in whatever the loader makes of them. Arrays are hashed on all cores (outside
    Python's lock), at about 1.5 GB/s each: a small part of the time that loading takes, whatever the model's size.
    """
    leaves = list(_leaves(params))
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        parts = threads.map(lambda leaf: _digest(leaf[1]), leaves)
        whole = hashlib.sha256()
        for (name, array), part in zip(leaves, parts, strict=True):
            whole.update(f"{name} {array.dtype} {array.shape} ".encode() + part)
    return whole.hexdigest()


def _leaves(tree: Any, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Arrays with their paths, in an order that does not depend on how the tree was built."""
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from _leaves(tree[key], f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for index, item in enumerate(tree):
            yield from _leaves(item, f"{name}.{index}")
    elif tree is not None:
        yield name, np.asarray(tree)


def _digest(array: np.ndarray) -> bytes:
    # Bytes: bfloat16 is no type that buffers know.
    return hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data).digest()
