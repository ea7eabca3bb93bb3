"""A device without numbers: each page remembers whose K and V it holds and where K is encoded.

It carries out a `StepPlan` as the runner would (writes, then moves, then reads) and refuses one whose queries do not
read exactly what `spec/` says they see. A page that goes back to the pool forgets, so nothing is right by stale luck.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from akv_jax.cache.pages import PagePool
from akv_jax.planning.plan import Segment, StepPlan
from akv_jax.runtime.batch import SCRATCH_PAGE
from spec.model import reads
from spec.state import Query


class Content(NamedTuple):
    """K and V of one token of one history: what they are follows from these (DESIGN L4)."""

    owner: Hashable
    index: int
    #: The position that K is rotated to.
    encoded: int


class Expected(NamedTuple):
    """What one query row of a plan has to be. `windows` has one item a layer."""

    owner: Hashable
    query: Query
    windows: tuple[int | None, ...] = (None,)


class ForgetfulPool(PagePool):
    """A page pool that tells the device what is free again."""

    def __init__(self, num_pages: int, device: SymbolicDevice) -> None:
        super().__init__(num_pages)
        self._device = device

    def free(self, pages: np.ndarray) -> None:
        super().free(pages)
        for page in pages.tolist():
            self._device.pages.pop(page, None)


class SymbolicDevice:
    """Runs plans on symbols. AssertionError says what is wrong with one."""

    def __init__(self) -> None:
        self.pages: dict[int, Content] = {}

    def run(self, plan: StepPlan, rows: Sequence[Expected], *, turns_on_read: bool) -> None:
        """One step, `rows` being what each query must be; `turns_on_read` allows shifts and forbids moves."""
        self._check_shape(plan, rows)
        self._write(plan, rows)
        assert turns_on_read is False or len(plan.moves.source) == 0
        self._move(plan)
        for segment in plan.segments:
            assert turns_on_read or not segment.shifts.any()
            self._read(segment, rows[segment.start : segment.stop])

    def _check_shape(self, plan: StepPlan, rows: Sequence[Expected]) -> None:
        assert len(plan.tokens) == len(plan.positions) == len(plan.destinations) == len(rows)
        assert plan.tokens.tolist() == [row.query.token for row in rows]
        assert plan.positions.tolist() == [row.query.position for row in rows]
        edges = [0, *(segment.stop for segment in plan.segments)]
        assert [segment.start for segment in plan.segments] == edges[:-1] and edges[-1] == len(rows)
        assert all(segment.start < segment.stop for segment in plan.segments)
        arrays = [plan.tokens, plan.positions, plan.destinations, plan.logit_rows]
        arrays += [plan.moves.source, plan.moves.target, plan.moves.shift]
        arrays += [column for s in plan.segments for column in (s.pages, s.positions, s.shifts)]
        assert all(array.dtype == np.int32 for array in arrays)

    def _write(self, plan: StepPlan, rows: Sequence[Expected]) -> None:
        kept = [page for page in plan.destinations.tolist() if page != SCRATCH_PAGE]
        assert len(set(kept)) == len(kept), "two queries write to one page"
        for page, row in zip(plan.destinations.tolist(), rows, strict=True):
            if page != SCRATCH_PAGE:
                assert page not in self.pages, f"page {page} is overwritten while in use"
                self.pages[page] = Content(row.owner, row.query.index, row.query.position)

    def _move(self, plan: StepPlan) -> None:
        sources, targets = plan.moves.source.tolist(), plan.moves.target.tolist()
        assert not set(sources) & set(targets), "a source is another move's target"
        assert len(set(targets)) == len(targets) and SCRATCH_PAGE not in targets
        for source, target, shift in zip(sources, targets, plan.moves.shift.tolist(), strict=True):
            assert target not in self.pages, f"page {target} is overwritten while in use"
            content = self.pages[source]
            self.pages[target] = content._replace(encoded=content.encoded + shift)

    def _read(self, segment: Segment, rows: Sequence[Expected]) -> None:
        entries = list(zip(segment.pages.tolist(), segment.positions.tolist(), segment.shifts.tolist(), strict=True))
        positions = [position for _, position, _ in entries]
        assert positions == sorted(set(positions)), "positions of a page list increase"
        found = []
        for page, position, shift in entries:
            content = self.pages[page]
            assert content.encoded + shift == position, f"{content} is read as if at {position - shift}"
            found.append((content.owner, content.index, position))
        for owner, query, windows in rows:
            visible = [entry for entry in found if entry[2] <= query.position]
            for window in set(windows):
                read = [entry for entry in visible if reads(window, query.position, entry[2])]
                meant = [(owner, r.index, r.position) for r in query.view if reads(window, query.position, r.position)]
                assert read == meant, f"query {query.index} with window {window}"
