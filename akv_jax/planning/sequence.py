"""One running request as the planner sees it: what is computed, what is next, and which page holds what."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np

from akv_jax.cache.base import MatchResult
from akv_jax.cache.pages import SCRATCH_PAGE
from akv_jax.config import RepositionMode
from akv_jax.planning.active_set import ActiveSet
from akv_jax.planning.plan import Moves
from akv_jax.planning.restore import compute_set
from akv_jax.planning.versions import Places, Versions
from akv_jax.planning.visibility import NEVER, Timeline, View


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next queries of one sequence, before they have pages.

    indices: int32 [queries], logical. views: for each segment, one past its last query (an offset into `indices`), its
    epoch and its view; empty where the sequence's decode list already is the view. copies: logical indices and
    positions of the versions that copy mode has to make, in the order of the segments that need them.
    """

    indices: np.ndarray
    views: tuple[tuple[int, int, View], ...]
    copies: tuple[Places, ...]
    #: How many of the queries keep their K and V; resident ones are only computed for their logits.
    stored: int
    #: Entries of all its page lists, and queries whose logits are asked for.
    entries: int
    logits: int

    @property
    def pages_needed(self) -> int:
        return self.stored + sum(len(indices) for indices, _ in self.copies)


@dataclass(frozen=True, slots=True)
class ReadList:
    """A segment's page list (see `plan.Segment`) and one past its last query in the chunk."""

    stop: int
    pages: np.ndarray
    positions: np.ndarray
    shifts: np.ndarray


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """A chunk whose queries, lists and copies have pages: what one sequence gives to a `StepPlan`."""

    indices: np.ndarray
    tokens: np.ndarray
    positions: np.ndarray
    destinations: np.ndarray
    lists: tuple[ReadList, ...]
    moves: tuple[Moves, ...]
    #: Offsets of the queries whose logits are asked for.
    logits: np.ndarray
    #: How many of the moves are from a version that was itself rotated from another.
    hops: int


@dataclass(frozen=True, slots=True)
class Released:
    """Pages that no later query of a sequence reads, int32.

    births, versions: by logical index [T], its own page with K and V at birth, or at `positions`; -1 for none.
    useless: its own, for positions that no query will have again. leased: the cache's.
    """

    births: np.ndarray
    versions: np.ndarray
    positions: np.ndarray
    useless: np.ndarray
    leased: np.ndarray


class _DecodeList:
    """The page list of a decoding sequence, grown by one entry a step."""

    def __init__(self, read: ReadList) -> None:
        self.length = len(read.pages)
        self._columns = np.zeros((3, self.length + 256), np.int32)
        self._columns[:, : self.length] = read.pages, read.positions, read.shifts

    def extended(self, page: int, position: int) -> ReadList:
        if self.length == self._columns.shape[1]:
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
        self._columns[:, self.length] = page, position, 0
        self.length += 1
        pages, positions, shifts = self._columns[:, : self.length]
        return ReadList(1, pages, positions, shifts)


_NOTHING = np.zeros(0, np.int32)
_NOTHING_RELEASED = Released(*(_NOTHING,) * 5)


class Sequence:
    """Progress and page tables of one request, by logical index. Pages come from and go back to the scheduler."""

    def __init__(
        self,
        timeline: Timeline,
        match: MatchResult,
        *,
        window: int | None,
        mode: RepositionMode,
        logits_at: tuple[int, ...] = (),
        coming: ActiveSet | None = None,
    ) -> None:
        """`logits_at`: logical indices of prompt tokens whose logits are asked for beside the last one's. `coming`:
        what somebody else puts into pages of its own before its first step (see `filled`)."""
        self.timeline, self.match, self.mode = timeline, match, mode
        self.wanted = np.unique(np.array([*logits_at, timeline.count - 1], np.int32))
        resident = match.pages >= 0
        if coming is not None:
            resident[coming.indices] = True
        self.compute = compute_set(timeline, resident, self.wanted, window)
        #: How many of them the cache remembers but had to give up (DESIGN A6).
        self.restored = int(((self.compute < match.known) & ~resident[self.compute]).sum())
        self.cursor = 0
        self.forwards = 0
        self._page_of, self._encoded = match.pages.copy(), match.encoded.copy()
        self._private = np.zeros(timeline.count, bool)
        self._computed = np.zeros(timeline.count, bool)
        self.versions = Versions(timeline.count) if mode == "copy" else None
        #: Of pages in the cache: the last epoch whose queries read them or copies made from them.
        self._read_until = np.full(timeline.count, NEVER, np.int32)
        self._decode_list: _DecodeList | None = None
        self._coming = coming
        if coming is not None:
            births = coming.where(coming.births)
            self._page_of[births.indices], self._private[births.indices] = births.pages, True
            if self.versions is not None:
                self.versions.receive(coming.where(~coming.births))

    @property
    def remaining(self) -> int:
        """Queries still to run before the next token can be sampled."""
        return len(self.compute) - self.cursor

    @property
    def computes_last_epoch(self) -> bool:
        """Whether the next query is after the last operation."""
        return int(self.compute[self.cursor]) >= self.timeline.starts[-1]

    def views(self) -> list[tuple[int, View]]:
        """Every epoch of which a query runs, the one that generated tokens are in included, and its whole view."""
        epochs = np.searchsorted(self.timeline.starts, self.compute, side="right") - 1
        epochs = sorted({*np.unique(epochs).tolist(), self.timeline.num_epochs - 1})
        return [(epoch, self.timeline.view(epoch)) for epoch in epochs]

    def expect(self, views: Many[tuple[int, View]], pages: Many[np.ndarray]) -> None:
        """The cache has leased these `pages` (see `KVCache.lease_versions`) for these `views`, all that there are.

        They are read in place of copies; and what the match found is only read where it is itself in place, or until
        the last epoch for which it is the source of a copy.
        """
        assert self.versions is not None and self.cursor == 0
        matched = self.match.pages >= 0
        until, last = np.full(len(matched), -1, np.int32), np.full(len(matched), -1, np.int32)
        for (epoch, view), found in zip(views, pages, strict=True):
            elsewhere = (found >= 0) & (found != self.match.pages[view.indices])
            until[view.indices[~elsewhere]] = epoch
            new = elsewhere & (found != last[view.indices])
            self.versions.expect(epoch, view.indices[new], view.positions[new], found[new])
            last[view.indices[new]] = found[new]
        self._read_until[matched] = until[matched]

    @property
    def settled(self) -> bool:
        """Whether the last view is placed: every later query reads that, and what is generated."""
        return self._decode_list is not None

    def active_set(self) -> ActiveSet:
        """Every entry that later queries read and that has been computed, where they read it."""
        view = self.timeline.view(self.timeline.num_epochs - 1, self.timeline.count - self.remaining)
        pages, positions = self._page_of[view.indices], self._encoded[view.indices]
        births = positions == self.timeline.birth[view.indices]
        if self.versions is not None:
            copied = self.versions.page[view.indices] >= 0
            pages = np.where(copied, self.versions.page[view.indices], pages)
            positions = np.where(copied, self.versions.position[view.indices], positions)
            births &= ~copied
        return ActiveSet(view.indices, pages, positions, births).where(pages >= 0)

    def filled(self) -> None:
        """What was coming is there."""
        assert self._coming is not None
        self._computed[self._coming.indices[self._coming.births]] = True
        if self.versions is not None:
            self.versions.written(self._coming.indices[~self._coming.births])

    def append(self, token: int) -> None:
        """A sampled token becomes the next query."""
        self.timeline.append(token)
        index = self.timeline.count - 1
        self.compute, self.cursor = np.array([index], np.int32), 0
        self.wanted = self.compute
        if index >= len(self._page_of):
            room = max(256, index // 4)
            self._page_of = np.pad(self._page_of, (0, room), constant_values=-1)
            self._encoded, self._private, self._computed = (
                np.pad(a, (0, room)) for a in (self._encoded, self._private, self._computed)
            )
            if self.versions is not None:
                self._read_until = np.pad(self._read_until, (0, room), constant_values=NEVER)
                self.versions.grow(room)
        self._encoded[index] = self.timeline.birth[index]

    def next_chunk(self, size: int) -> Chunk:
        """The next `size` queries at most. Changes nothing."""
        indices = self.compute[self.cursor : self.cursor + size]
        stored = int((self._page_of[indices] < 0).sum())
        logits = int(np.isin(indices, self.wanted).sum())
        if self._decode_list is not None:
            return Chunk(indices, (), (), stored, self._decode_list.length + 1, logits)
        epochs = np.searchsorted(self.timeline.starts, indices, side="right") - 1
        stops = [*(np.flatnonzero(np.diff(epochs)) + 1).tolist(), len(indices)]
        views = tuple(
            (s, int(epochs[s - 1]), self.timeline.view(int(epochs[s - 1]), int(indices[s - 1]) + 1)) for s in stops
        )
        copies = self._copies(indices, [(epoch, view) for _, epoch, view in views])
        return Chunk(indices, views, copies, stored, sum(len(view.indices) for _, _, view in views), logits)

    def _copies(self, queries: np.ndarray, views: list[tuple[int, View]]) -> tuple[Places, ...]:
        if self.versions is None:
            return ()
        # Where every layer has a window, what no query can see need not be resident.
        there = self._page_of >= 0
        there[queries] = True
        turned = [there[view.indices] & (view.positions != self._encoded[view.indices]) for _, view in views]
        return self.versions.missing(views, turned)

    def place(self, chunk: Chunk, pages: np.ndarray) -> PlacedChunk:
        """Put `chunk` on `pages` (int32 [chunk.pages_needed]): first its queries in order, then its copies."""
        fresh = chunk.indices[self._page_of[chunk.indices] < 0]
        destinations = np.full(len(chunk.indices), SCRATCH_PAGE, np.int32)
        destinations[np.isin(chunk.indices, fresh)] = pages[: chunk.stored]
        self._page_of[fresh] = pages[: chunk.stored]
        self._private[fresh] = True
        if self._decode_list is not None:
            position = int(self.timeline.birth[chunk.indices[0]])
            lists, moves = (self._decode_list.extended(int(self._page_of[chunk.indices[0]]), position),), ()
        else:
            lists, moves = self._place_views(chunk, pages[chunk.stored :])
        hops = sum(int((self._encoded[at] != self.timeline.birth[at]).sum()) for at, _ in chunk.copies)
        return PlacedChunk(
            chunk.indices,
            self.timeline.tokens[chunk.indices],
            self.timeline.birth[chunk.indices],
            destinations,
            lists,
            moves,
            np.flatnonzero(np.isin(chunk.indices, self.wanted)),
            hops,
        )

    def _place_views(self, chunk: Chunk, pages: np.ndarray) -> tuple[tuple[ReadList, ...], tuple[Moves, ...]]:
        lists, moves = [], []
        for segment, (stop, epoch, view) in enumerate(chunk.views):
            if self.versions is not None:
                indices, positions = copies = chunk.copies[segment]
                targets, pages = pages[: len(indices)], pages[len(indices) :]
                moves.append(Moves(self._page_of[indices], targets, positions - self._encoded[indices]))
                self.versions.place(epoch, view, copies, targets)
            lists.append(self._read_list(stop, view))
            if stop == len(chunk.indices) and epoch == self.timeline.num_epochs - 1 and stop == self.remaining:
                self._decode_list = _DecodeList(lists[-1])
        return tuple(lists), tuple(moves)

    def _read_list(self, stop: int, view: View) -> ReadList:
        pages, shifts = self._page_of[view.indices], view.positions - self._encoded[view.indices]
        if self.versions is not None:
            elsewhere = (pages < 0) | (shifts != 0)
            pages = np.where(elsewhere, self.versions.page[view.indices], pages)
            shifts = np.zeros_like(shifts)
        # As in `_copies`.
        there = pages >= 0
        if there.all():
            return ReadList(stop, pages, view.positions, shifts)
        return ReadList(stop, pages[there], view.positions[there], shifts[there])

    def advance(self, chunk: Chunk) -> Released:
        """The step that computed `chunk` has run. Returns what may go."""
        self.cursor += len(chunk.indices)
        self.forwards += 1
        self._computed[chunk.indices] = True
        if not chunk.views:
            return _NOTHING_RELEASED
        useless, returned = (_NOTHING, _NOTHING) if self.versions is None else self.versions.ran()
        released = self.let_go()
        return replace(released, useless=useless, leased=np.concatenate([released.leased, returned]))

    def let_go(self) -> Released:
        """Give up the pages that are not read from the next query on."""
        epoch = self.timeline.num_epochs - 1
        if self.remaining:
            epoch = self.timeline.epoch_of(int(self.compute[self.cursor]))
        count = self.timeline.count
        gone = dropped = self.timeline.dropped[:count] <= epoch
        positions = versions = births = np.full(count, -1, np.int32)
        leased = _NOTHING
        if self.versions is not None:
            gone = dropped | (self._read_until[:count] < epoch)
            if self._decode_list is not None:
                # What the last view reads another version of is not read itself.
                gone |= self.versions.page[:count] >= 0
            indices = np.flatnonzero(dropped & (self.versions.page[:count] >= 0))
            positions, versions = self.versions.position[:count].copy(), versions.copy()
            versions[indices], leased = self.versions.drop(indices)
        gone = np.flatnonzero(gone & (self._page_of[:count] >= 0))
        pages, private = self._page_of[gone], self._private[gone]
        births = births.copy()
        births[gone[private]] = pages[private]
        self._page_of[gone] = -1
        return Released(births, versions, positions, _NOTHING, np.concatenate([pages[~private], leased]))

    @property
    def held(self) -> int:
        """Pages in use by this sequence, leased ones included."""
        return int((self._page_of >= 0).sum()) + (0 if self.versions is None else self.versions.held)

    @property
    def turns_back(self) -> bool:
        """Whether it holds a version of the cache's that is neither at its birth nor where its entry ends up."""
        count = len(self.match.pages)
        derived = (self._page_of[:count] >= 0) & (self.match.encoded != self.timeline.birth[:count])
        if not derived.any():
            return False
        view = self.timeline.view(self.timeline.num_epochs - 1, count)
        return bool((derived[view.indices] & (self.match.encoded[view.indices] != view.positions)).any())

    def private_pages(self) -> np.ndarray:
        """Every page that belongs to this sequence alone: int32."""
        births = self._page_of[self._private & (self._page_of >= 0)]
        return births if self.versions is None else np.concatenate([births, self.versions.own_pages()])

    def give(self, pages: np.ndarray) -> None:
        """These of its own pages are the cache's now, and leased to this sequence."""
        self._private &= ~np.isin(self._page_of, pages)
        if self.versions is not None:
            self.versions.give(pages)

    @property
    def made(self) -> list[Places]:
        """What its steps so far have made copies for."""
        return [] if self.versions is None else self.versions.made

    def birth_pages(self) -> np.ndarray:
        """By logical index, the private page with K and V at birth, or -1: int32 [T]. What a cache may keep.

        Pages of queries that were placed but have not run hold nothing yet.
        """
        return np.where(self._private & self._computed, self._page_of, -1)[: self.timeline.count]

    def version_pages(self) -> Places:
        """By logical index, the private page with K and V as the last view has them, or -1, and the position of K."""
        count = self.timeline.count
        if self.versions is None:
            return np.full(count, -1, np.int32), self.timeline.birth[:count]
        return self.versions.written_pages()[:count], self.versions.position[:count].copy()
