"""One step as host data (DESIGN R1). The planner makes it, the runner carries it out; neither does the other's work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Segment:
    """A maximal run of queries with one view: query rows `start .. stop - 1` of the plan, and the entries they read.

    The entries are in logical order, those of the segment's own queries included, and their positions increase: which
    of them one query reads follows from positions alone.
    """

    start: int
    stop: int
    #: int32 [entries]: page, position in this view, and shift = position - position the page's key is rotated to.
    pages: np.ndarray
    positions: np.ndarray
    shifts: np.ndarray


@dataclass(frozen=True, slots=True)
class Moves:
    """Copy mode: rotate K of `source` by `shift` into `target` and copy V. No source is another move's target."""

    #: int32 [moves].
    source: np.ndarray
    target: np.ndarray
    shift: np.ndarray


NO_MOVES = Moves(*(np.zeros(0, np.int32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The queries of one forward pass, of any number of requests."""

    #: int32 [queries]: token, position, and the page that its K and V are written to.
    tokens: np.ndarray
    positions: np.ndarray
    destinations: np.ndarray
    #: In query order; together they cover every query.
    segments: tuple[Segment, ...]
    #: Applied in every layer after K and V of the queries are written and before anything is read.
    moves: Moves
    #: int32: query rows whose logits are asked for.
    logit_rows: np.ndarray
