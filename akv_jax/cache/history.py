"""A canonical history as the steps of a path in the cache's tree (DESIGN C1, L5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from akv_jax.planning.visibility import NEVER, Timeline

#: A drop is the bytes of its int32 indices, ascending, and so never this, whose length is no multiple of four.
REPOSITION = b"reposition"


def steps(timeline: Timeline) -> Iterator[tuple[bytes | None, int, int]]:
    """The canonical history by epochs: (the operation that begins it, first logical index, one past its last)."""
    dropped = timeline.dropped[: timeline.count]
    gone = np.flatnonzero(dropped != NEVER)
    order = gone[np.argsort(dropped[gone], kind="stable")].astype(np.int32)
    bounds = np.searchsorted(dropped[order], np.arange(timeline.num_epochs + 1))
    repositions = set(timeline.repositions)
    for epoch in range(timeline.num_epochs):
        operation: bytes | None = None
        if epoch in repositions:
            operation = REPOSITION
        elif epoch:
            operation = order[bounds[epoch] : bounds[epoch + 1]].tobytes()
        yield operation, timeline.starts[epoch], timeline.stop(epoch)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens agree."""
    size = min(len(a), len(b))
    a, b = a[:size], b[:size]
    # Nearly always all of them do, and bytes are compared at once.
    return size if a.tobytes() == b.tobytes() else int((a != b).argmax())
