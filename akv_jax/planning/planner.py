"""Puts the placed chunks of one step together as a `StepPlan` (DESIGN R1, R2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from akv_jax.planning.plan import NO_MOVES, Moves, Segment, StepPlan
from akv_jax.planning.sequence import PlacedChunk


def assemble(chunks: Sequence[PlacedChunk]) -> StepPlan:
    """One flat batch: the queries of every chunk in turn, each with its segments, moves and logit rows."""
    segments, logit_rows, start = [], [], 0
    for chunk in chunks:
        begin = 0
        for read in chunk.lists:
            segments.append(Segment(start + begin, start + read.stop, read.pages, read.positions, read.shifts))
            begin = read.stop
        logit_rows.append(chunk.logits + start)
        start += len(chunk.indices)
    return StepPlan(
        tokens=_joined(chunk.tokens for chunk in chunks),
        positions=_joined(chunk.positions for chunk in chunks),
        destinations=_joined(chunk.destinations for chunk in chunks),
        segments=tuple(segments),
        moves=_moves([moves for chunk in chunks for moves in chunk.moves]),
        logit_rows=_joined(logit_rows),
    )


def _moves(moves: list[Moves]) -> Moves:
    if not moves:
        return NO_MOVES
    return Moves(_joined(m.source for m in moves), _joined(m.target for m in moves), _joined(m.shift for m in moves))


def _joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *arrays]).astype(np.int32)
