"""One radix tree whose path is the canonical history (DESIGN C1-C5): shared and evicted by meaning.

A path from a tenant's root is a history: runs of tokens, drops of the indices they newly deactivate, repositions. Two
requests share exactly their longest common history. A run owns *versions* of its tokens' K and V, page by page: the
birth version, and where repositions make copies, others that are K rotated to other positions. Where all of a token's
pages were evicted a tombstone is left, so that what follows is still found. Only the planner decides what to do about
holes.

Numbers about pages (whose they are, how many lease them) are kept in arrays by page, not in nodes: a split moves
nothing but slices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from akv_jax.cache.base import CacheStats, MatchResult
from akv_jax.cache.eviction import EvictionClass, EvictionQueue
from akv_jax.cache.export import TreeExport, from_nodes
from akv_jax.cache.history import common, steps
from akv_jax.cache.node import Edge, Node
from akv_jax.cache.pages import PageError, PagePool
from akv_jax.config import EvictionPolicy, RepositionMode
from akv_jax.planning.restore import first_query
from akv_jax.planning.visibility import NEVER, Timeline, View

_NO_TOKENS = np.zeros(0, np.int32)
#: Stretches of one shift in a run that is offered: where there are more, it is cut, so that arrays stay small.
_MOST_STRETCHES = 8


class RadixCache:
    """See `base.KVCache`."""

    def __init__(
        self,
        pool: PagePool,
        *,
        reposition: RepositionMode = "on_read",
        eviction: EvictionPolicy = "drop_aware",
        max_tokens: int | None = None,
    ) -> None:
        """`max_tokens` bounds the tokens that paths may remember, tombstones included (C5); default 16 a page."""
        self.stats = CacheStats()
        self.lease_changes = 0
        self._pool, self._reposition, self._eviction = pool, reposition, eviction
        self._max_tokens = 16 * pool.num_pages if max_tokens is None else max_tokens
        self._tokens = self._pages = 0
        self._clock, self._numbers, self._receipts = itertools.count(1), itertools.count(), itertools.count()
        self._nodes: dict[int, Node] = {}
        self._roots: dict[str, Node] = {}
        self._leases: dict[int, np.ndarray] = {}
        self._idle = EvictionQueue(pool.num_pages, eviction)
        size = pool.num_pages + 1
        self._references = np.zeros(size, np.int32)
        # Of cached pages: their node and place in it, shift, and logical index; and room to tell pages apart.
        self._owner = np.full(size, -1, np.int64)
        self._offset, self._shift, self._index, self._mark = (np.zeros(size, np.int32) for _ in range(4))

    # -- base.KVCache ------------------------------------------------------------------------------------------------

    def match(self, timeline: Timeline, salt: str, looked_at: int | None = None) -> MatchResult:
        now = next(self._clock)
        pages = np.full(timeline.count, -1, np.int32)
        end, derived = 0, [_NO_TOKENS]
        for node, start, length in self._walk(timeline, salt):
            node.last_used = now
            pages[start : start + length] = node.any_version(slice(length))
            end = start + length
            derived += [version[:length] for shift, version in node.versions.items() if shift]
        first = first_query(timeline, pages < 0, timeline.count - 1 if looked_at is None else looked_at)
        unread = np.flatnonzero((timeline.dropped[: timeline.count] <= timeline.epoch_of(first)) & (pages >= 0))
        passed, pages[unread] = pages[unread], -1
        receipt = next(self._receipts)
        self._leases[receipt] = _NO_TOKENS
        self._lease(receipt, pages[pages >= 0])
        # By recency alone, what is on the path has been used, and what is a version of it has not.
        self._leave(passed if self._eviction == "lru" else np.concatenate([passed, *derived]), timeline)
        encoded = timeline.birth[: timeline.count] + np.where(pages >= 0, self._shift[pages], 0)
        return MatchResult(pages, encoded, receipt, end)

    def lease_versions(
        self, match: MatchResult, timeline: Timeline, salt: str, views: Sequence[View]
    ) -> list[np.ndarray]:
        # Of the birth versions the match has told already.
        born = np.where(match.encoded == timeline.birth[: timeline.count], match.pages, -1)
        found = [np.where(view.shifts == 0, born[view.indices], -1) for view in views]
        for node, start, length in self._walk(timeline, salt):
            derived = [(shift, version) for shift, version in node.versions.items() if shift]
            for view, pages in zip(views, found, strict=True) if derived else ():
                first, last = np.searchsorted(view.indices, (start, start + length))
                offsets, shifts = view.indices[first:last] - start, view.shifts[first:last]
                for shift, version in derived:
                    there = np.flatnonzero(shifts == shift)
                    pages[first + there] = version[offsets[there]]
        pages = np.concatenate([_NO_TOKENS, *found])
        self._lease(match.receipt, self._without(pages[pages >= 0], self._leases[match.receipt]))
        return found

    def leased_births(self, timeline: Timeline, salt: str) -> np.ndarray:
        leased = np.zeros(timeline.count, bool)
        for node, start, length in self._walk(timeline, salt):
            births = node.versions.get(0)
            if births is not None:
                pages = births[:length]
                leased[start : start + length] = (pages >= 0) & (self._references[pages] > 0)
        return leased

    def release(self, match: MatchResult, timeline: Timeline, pages: np.ndarray | None = None) -> None:
        held = self._leases.pop(match.receipt)
        if pages is None:
            leaving = held
        else:
            leaving = pages
            self._leases[match.receipt] = self._without(held, pages)
        self.lease_changes += 1
        self._references[leaving] -= 1
        self._rest(leaving[self._references[leaving] == 0], timeline)
        self._forget()

    def keep(
        self,
        timeline: Timeline,
        salt: str,
        pages: np.ndarray,
        positions: np.ndarray | None = None,
        match: MatchResult | None = None,
    ) -> np.ndarray:
        offered, shifts = pages[pages >= 0], np.zeros_like(pages)
        if not len(offered):
            return offered
        if positions is not None:
            # K that was turned back to its birth is not quite what it was: no birth version (see `base.KVCache`).
            shifts = positions - timeline.birth[: len(pages)]
            pages = np.where(shifts == 0, -1, pages)
        own = np.flatnonzero(pages >= 0)
        if not len(own):
            return offered
        taken = [_NO_TOKENS]
        runs, rest = self._grow(timeline, salt, int(own[-1]) + 1, next(self._clock))
        for run, begin in runs:
            stop = begin + len(run.tokens)
            for node, start in self._pieces(run, begin, np.where(pages[begin:stop] >= 0, shifts[begin:stop], 0)):
                stop = start + len(node.tokens)
                taken.append(self._take(node, start, pages[start:stop], shifts[start:stop]))
        if rest is not None:
            self._prune(rest)
        new = np.concatenate(taken)
        self._pool.to_cached(new)
        if match is None:
            self._rest(new, timeline)
        else:
            self._lease(match.receipt, new)
        self._forget()
        return self._without(offered, new)

    def evictable(self) -> int:
        return len(self._idle)

    def evict(self, count: int) -> int:
        pages = self._idle.take(count)
        for number, evicted in enumerate(np.bincount(self._idle.classes(pages), minlength=len(EvictionClass)).tolist()):
            self.stats.evicted[number] += evicted
        self._remove(pages)
        return len(pages)

    def flush(self) -> int:
        pages = self._idle.take(len(self._idle))
        self._remove(pages)
        return len(pages)

    def cached_pages(self) -> list[np.ndarray]:
        return [pages[pages >= 0] for node in self._nodes.values() for pages in node.versions.values()]

    def leased(self) -> int:
        return self._pages - len(self._idle)

    @property
    def remembered(self) -> int:
        """Tokens on all paths, tombstones included."""
        return self._tokens

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    def roots(self) -> Mapping[str, Node]:
        """The tree by salt, to be read and not changed."""
        return self._roots

    def is_leased(self, pages: np.ndarray) -> np.ndarray:
        """Bool, for each of these cached pages."""
        return self._references[pages] > 0

    def check(self) -> None:
        """The tree is well-formed and its books are right. PageError if not."""
        references = np.zeros_like(self._references)
        for pages in self._leases.values():
            references[pages] += 1
        if not np.array_equal(references, self._references):
            raise PageError("leases and reference counts disagree")
        tokens = tombstones = 0
        for number, node in self._nodes.items():
            tokens += len(node.tokens)
            tombstones += int((node.any_version(slice(None)) < 0).sum())
            good = node.parent is None or node.parent.children.get(node.edge) is node
            for shift, pages in node.versions.items():
                there = np.flatnonzero(pages >= 0)
                named = (self._owner[pages[there]] == number) & (self._offset[pages[there]] == there)
                named &= self._shift[pages[there]] == shift
                good &= len(pages) == len(node.tokens) and len(there) == node.resident[shift] > 0 and bool(named.all())
            if not good or node.versions.keys() != node.resident.keys():
                raise PageError(f"node {number} is malformed")
        cached = np.concatenate([_NO_TOKENS, *self.cached_pages()])
        counts = len(cached), tokens, tombstones, int((self._shift[cached] != 0).sum())
        if counts != (self._pages, self._tokens, self.stats.tombstones, self.stats.versions):
            raise PageError("pages or tokens of the tree are counted wrong")
        idle = self._idle.idle(np.arange(len(self._owner)))
        if not np.array_equal(idle, (self._owner >= 0) & (references == 0)) or idle.sum() != len(self._idle):
            raise PageError("the pages that may be evicted are not those that nobody leases")
        order = self._idle.order()
        if len(order) != len(self._idle) or np.bincount(order, minlength=1).max() > 1:
            raise PageError("a page is queued for eviction twice, or not at all")

    # -- as plain values ---------------------------------------------------------------------------------------------

    def export(self) -> tuple[TreeExport, np.ndarray]:
        """The tree as it stands, and the page of each of its slots, int32. PageError if a page is leased."""
        if self.leased():
            raise PageError("a cache is exported when nobody leases from it")
        nodes = list(self._roots.values())
        for node in nodes:
            nodes.extend(node.children.values())
        place = {node.number: index for index, node in enumerate(nodes)}
        order = self._idle.order()
        # What would go last comes first, but for derived versions, which cost no more than a copy.
        slots = np.lexsort((-np.arange(len(order)), self._shift[order] != 0))
        pages = order[slots]
        tree = from_nodes(
            [(place[n.parent.number] if n.parent else -1, n.edge, n.tokens, n.last_used) for n in nodes],
            nodes=np.array([place[number] for number in self._owner[pages].tolist()], np.int32),
            offsets=self._offset[pages],
            shifts=self._shift[pages],
            ranks=slots.astype(np.int32),
            left=self._idle.classes(pages) <= EvictionClass.LEFT_BIRTH,
        )
        return tree, pages

    def restore(self, tree: TreeExport, pages: np.ndarray) -> None:
        """Become what was exported, with these private pages for its slots, int32 [slots].

        ValueError, and nothing has changed, if something is cached already or if no tree could be like this.
        """
        if self._nodes or len(pages) != tree.num_slots:
            raise ValueError("only an empty cache can be restored, with a page for each slot")
        tree.validate()
        nodes: list[Node] = []
        for parent, edge, tokens, last_used in tree.paths():
            nodes.append(self._add(nodes[parent] if parent >= 0 else None, edge, tokens, last_used))
        self._roots = {str(node.edge): node for node in nodes if node.parent is None}
        starts = tree.starts()
        for index, shift, slots in tree.by_version():
            offered = np.full(len(nodes[index].tokens), -1, np.int32)
            offered[tree.offsets[slots]] = pages[slots]
            self._take(nodes[index], int(starts[index]), offered, np.full_like(offered, shift))
        self._pool.to_cached(pages)
        classes = EvictionClass.FINISHED_BIRTH - 2 * tree.left - (tree.shifts != 0)
        order = np.argsort(-tree.ranks)
        self._idle.put(pages[order], classes[order].astype(np.uint8))
        self._clock = itertools.count(1 + int(tree.last_used.max(initial=0)))
        for node in reversed(nodes):
            # Where not every slot was given a page, some paths lead to nothing.
            if node.number in self._nodes:
                self._prune(node)
        self._forget()

    # -- pages -------------------------------------------------------------------------------------------------------

    def _lease(self, receipt: int, pages: np.ndarray) -> None:
        """Add pages to a lease that does not have them yet."""
        self.lease_changes += 1
        self._references[pages] += 1
        self._idle.withdraw(pages)
        self._leases[receipt] = np.concatenate([self._leases[receipt], pages])

    def _without(self, pages: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Those of `pages` that are not among `others`, each once: sets of pages without sorting them."""
        order = np.arange(len(pages), dtype=np.int32)
        self._mark[pages] = order
        self._mark[others] = -1
        return pages[self._mark[pages] == order]

    def _rest(self, pages: np.ndarray, timeline: Timeline) -> None:
        """Cached pages that nobody leases now, the last to do so for this history. Of one path its end goes first."""
        pages = pages[np.argsort(self._index[pages], kind="stable")]
        self._idle.put(pages, self._classes(pages, timeline))

    def _leave(self, pages: np.ndarray, timeline: Timeline) -> None:
        """Of versions on its path, a history leaves behind what it has dropped, or reads somewhere else (C5)."""
        pages = pages[pages >= 0]
        pages = pages[self._idle.idle(pages)]
        if self._eviction == "drop_aware":
            # What had been left behind before stays where it is in the order.
            pages = pages[self._idle.classes(pages) > EvictionClass.LEFT_BIRTH]
            pages = pages[self._classes(pages, timeline) <= EvictionClass.LEFT_BIRTH]
        # What is passed over may be a derived version itself, where a birth has gone.
        pages = self._without(pages, _NO_TOKENS)
        if len(pages):
            self._rest(pages, timeline)

    def _classes(self, pages: np.ndarray, timeline: Timeline) -> np.ndarray:
        """What these pages are to a history that has all of them on its path: `EvictionClass`, uint8."""
        index, shift = self._index[pages], self._shift[pages]
        left = timeline.dropped[index] != NEVER
        if self._reposition == "copy" and len(pages):
            view = timeline.view(timeline.num_epochs - 1)
            ends = np.full(timeline.count, -1, np.int32)
            ends[view.indices] = view.shifts
            left |= ends[index] != shift
        return (EvictionClass.FINISHED_BIRTH - 2 * left - (shift != 0)).astype(np.uint8)

    def _take(self, node: Node, start: int, pages: np.ndarray, shifts: np.ndarray) -> np.ndarray:
        """Put offered pages (of each token of a run, -1: none) where it has none; returns those that were put."""
        taken = [_NO_TOKENS]
        for shift in np.unique(shifts[pages >= 0]).tolist():
            version = node.versions.get(shift)
            version = np.full(len(node.tokens), -1, np.int32) if version is None else version
            at = np.flatnonzero((pages >= 0) & (shifts == shift) & (version < 0))
            if not len(at):
                continue
            self.stats.tombstones -= int((node.any_version(at) < 0).sum())
            self.stats.versions += len(at) if shift else 0
            new = version[at] = pages[at]
            node.versions[shift] = version
            node.resident[shift] = node.resident.get(shift, 0) + len(at)
            self._owner[new], self._offset[new], self._shift[new] = node.number, at, shift
            self._index[new] = start + at
            taken.append(new)
        new = np.concatenate(taken)
        self._pages += len(new)
        return new

    def _remove(self, pages: np.ndarray) -> None:
        """Free cached pages that nobody leases, and the paths on which nothing is left."""
        self._idle.withdraw(pages)
        pages = pages[np.lexsort((self._shift[pages], self._owner[pages]))]
        breaks = (np.diff(self._owner[pages]) != 0) | (np.diff(self._shift[pages]) != 0)
        for group in np.split(pages, np.flatnonzero(breaks) + 1) if len(pages) else ():
            node, shift = self._nodes[int(self._owner[group[0]])], int(self._shift[group[0]])
            at = self._offset[group]
            node.versions[shift][at] = -1
            node.resident[shift] -= len(group)
            if node.resident[shift] == 0:
                del node.versions[shift], node.resident[shift]
            self.stats.tombstones += int((node.any_version(at) < 0).sum())
            self.stats.versions -= len(group) if shift else 0
            self._prune(node)
        self._owner[pages] = -1
        self._pages -= len(pages)
        self._pool.free(pages)

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _walk(self, timeline: Timeline, salt: str) -> Iterator[tuple[Node, int, int]]:
        """Runs on the path of the history: (node, logical index of its first token, tokens of it that agree)."""
        node = self._roots.get(salt)
        for edge, start, stop in steps(timeline):
            node = node if edge is None or node is None else node.children.get(edge)
            at = start
            while node is not None and at < stop:
                node = node.children.get(int(timeline.tokens[at]))
                if node is None:
                    return
                length = common(node.tokens, timeline.tokens[at:stop])
                yield node, at, length
                at += length
                if length < len(node.tokens):
                    return
            if node is None:
                return

    def _grow(self, timeline: Timeline, salt: str, end: int, now: int) -> tuple[list[tuple[Node, int]], Node | None]:
        """Make the path of the history's first `end` tokens.

        Returns its runs, each with its first logical index; and what was cut off a run, which may hold nothing. That
        happens once at most: below the cut all is new.
        """
        if salt not in self._roots:
            self._roots[salt] = self._add(None, salt, _NO_TOKENS, now)
        node, runs, rest = self._roots[salt], [], None
        for edge, start, stop in steps(timeline):
            if start >= end:
                break
            if edge is not None:
                node = node.children.get(edge) or self._add(node, edge, _NO_TOKENS, now)
            at, stop = start, min(stop, end)
            while at < stop:
                child = node.children.get(int(timeline.tokens[at]))
                if child is None:
                    tokens = timeline.tokens[at:stop].copy()
                    child = self._add(node, int(tokens[0]), tokens, now)
                length = common(child.tokens, timeline.tokens[at:stop])
                if length < len(child.tokens):
                    rest, child = child, self._split(child, length)
                child.last_used = now
                runs.append((child, at))
                node, at = child, at + length
        return runs, rest

    def _add(self, parent: Node | None, edge: Edge, tokens: np.ndarray, now: int) -> Node:
        node = Node(next(self._numbers), parent, edge, tokens, now)
        self._nodes[node.number] = node
        self._tokens += len(tokens)
        self.stats.tombstones += len(tokens)
        if parent is not None:
            parent.children[edge] = node
        return node

    def _split(self, node: Node, length: int) -> Node:
        """Cut a run in two; returns the first part, which is a new node. Leases are on pages and do not notice."""
        assert node.parent is not None
        first = self._add(node.parent, node.edge, node.tokens[:length], node.last_used)
        self._tokens -= length
        self.stats.tombstones -= length
        node.parent, node.edge = first, int(node.tokens[length])
        node.tokens = node.tokens[length:]
        first.children[node.edge] = node
        versions, node.versions, node.resident = node.versions, {}, {}
        for shift, pages in versions.items():
            for part, own in ((first, pages[:length].copy()), (node, pages[length:].copy())):
                there = np.flatnonzero(own >= 0)
                if len(there):
                    part.versions[shift], part.resident[shift] = own, len(there)
                    self._owner[own[there]], self._offset[own[there]] = part.number, there
        return first

    def _pieces(self, node: Node, start: int, shifts: np.ndarray) -> list[tuple[Node, int]]:
        """A run and its first logical index, cut where it is to get many short stretches of different shifts."""
        pieces, at = [], 0
        for cut in (np.flatnonzero(np.diff(shifts)) + 1)[_MOST_STRETCHES - 1 :: _MOST_STRETCHES].tolist():
            pieces.append((self._split(node, cut - at), start + at))
            at = cut
        return [*pieces, (node, start + at)]

    def _prune(self, node: Node) -> None:
        """Remove a node that holds nothing and leads nowhere, then its parent if that is now one, and so on."""
        while node.parent is not None and not node.children and not node.versions:
            del node.parent.children[node.edge], self._nodes[node.number]
            self._tokens -= len(node.tokens)
            self.stats.tombstones -= len(node.tokens)
            node = node.parent
        if node.parent is None and not node.children:
            self._roots.pop(str(node.edge), None)
            self._nodes.pop(node.number, None)

    def _forget(self) -> None:
        """Keep the remembered tokens within bounds: the ends of the oldest paths go first (C5).

        Paths that lead to leased pages do not count: nobody else's are given up for what cannot go.
        """
        if self._tokens <= self._max_tokens:
            return
        held = self._held()
        # Somewhat more than need be, for it takes a look at every leaf.
        bound = self._max_tokens - self._max_tokens // 16 + sum(len(self._nodes[number].tokens) for number in held)
        leaves = [(n.last_used, n.number) for n in self._nodes.values() if not n.children and n.number not in held]
        heapq.heapify(leaves)
        while leaves and self._tokens > bound:
            leaf = self._nodes[heapq.heappop(leaves)[1]]
            pages, parent = np.concatenate([_NO_TOKENS, *(p[p >= 0] for p in leaf.versions.values())]), leaf.parent
            self.stats.forgotten += len(pages)
            self._remove(pages)
            # Whatever was empty above the leaf has gone with it.
            while parent is not None and parent.number not in self._nodes:
                parent = parent.parent
            if parent is not None and not parent.children and parent.number not in held:
                heapq.heappush(leaves, (parent.last_used, parent.number))

    def _held(self) -> set[int]:
        """Numbers of the nodes that have leased pages, or lead to some."""
        held: set[int] = set()
        for number in np.unique(self._owner[self._references > 0]).tolist():
            node: Node | None = self._nodes[number]
            while node is not None and node.number not in held:
                held.add(node.number)
                node = node.parent
        return held
