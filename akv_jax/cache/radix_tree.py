"""One radix tree whose path is the canonical history (DESIGN C1, C4, C5): shared and evicted by meaning.

A path from a tenant's root is a history: runs of tokens, drops of the indices they newly deactivate, repositions. Two
requests share exactly their longest common history. A run owns the birth version of its tokens' K and V, page by page;
where a page was evicted a tombstone (-1) is left, so that what follows is still found. Only the planner decides what to
do about holes.

Numbers about pages (who leases them, when they were last used) are kept in arrays by page, not in nodes: a split moves
nothing but slices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from akv_jax.cache.base import MatchResult
from akv_jax.cache.pages import PageError, PagePool
from akv_jax.planning.visibility import Timeline

#: What leads from a node to a child: the next token, or the bytes of an operation.
_Edge = int | bytes
_REPOSITION = b"reposition"
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(eq=False, slots=True)
class _Node:
    """A run of tokens, or an operation (no tokens).

    versions: by shift (position of K - position at birth), int32 pages of the run, -1 where none is resident (C2).
    Shift 0 is the birth version; there is no array without a page.
    """

    number: int
    parent: _Node | None
    edge: _Edge
    tokens: np.ndarray
    last_used: int
    versions: dict[int, np.ndarray] = field(default_factory=dict)
    children: dict[_Edge, _Node] = field(default_factory=dict)

    def any_version(self) -> np.ndarray:
        """A resident page of each token, int32: the birth version where it is one, else another, else -1 (C3)."""
        pages = self.versions.get(0)
        pages = np.full(len(self.tokens), -1, np.int32) if pages is None else pages
        for shift, others in self.versions.items():
            if shift:
                pages = np.where(pages < 0, others, pages)
        return pages


class RadixCache:
    """See `base.KVCache`."""

    def __init__(self, pool: PagePool, *, max_tokens: int | None = None) -> None:
        """`max_tokens` bounds the tokens that paths may remember, tombstones included (C5); default 16 a page."""
        self._pool = pool
        self._max_tokens = 16 * pool.num_pages if max_tokens is None else max_tokens
        self._tokens = 0
        self._clock = itertools.count(1)
        self._numbers = itertools.count()
        self._nodes: dict[int, _Node] = {}
        self._roots: dict[str, _Node] = {}
        self._receipts = itertools.count()
        self._leases: dict[int, np.ndarray] = {}
        size = pool.num_pages + 1
        self._references = np.zeros(size, np.int32)
        # Of cached pages: their node and place in it, logical index, time, and whether their last user dropped them.
        self._owner = np.full(size, -1, np.int64)
        self._offset = np.zeros(size, np.int32)
        self._index = np.zeros(size, np.int32)
        self._shift = np.zeros(size, np.int32)
        self._used = np.zeros(size, np.int64)
        self._dropped = np.zeros(size, bool)

    # -- base.KVCache ------------------------------------------------------------------------------------------------

    def match(self, timeline: Timeline, salt: str) -> MatchResult:
        now = next(self._clock)
        pages = np.full(timeline.count, -1, np.int32)
        end = 0
        for node, start, length in self._walk(timeline, salt):
            node.last_used = now
            pages[start : start + length] = node.any_version()[:length]
            end = start + length
        resident = pages[pages >= 0]
        self._references[resident] += 1
        self._used[resident] = now
        receipt = next(self._receipts)
        self._leases[receipt] = resident
        encoded = timeline.birth[: timeline.count] + np.where(pages >= 0, self._shift[pages], 0)
        return MatchResult(pages, encoded, receipt, end)

    def release(self, match: MatchResult, timeline: Timeline, pages: np.ndarray | None = None) -> None:
        held = self._leases.pop(match.receipt)
        if pages is None:
            leaving = held
        else:
            leaving = pages
            self._leases[match.receipt] = np.setdiff1d(held, pages, assume_unique=True)
        self._references[leaving] -= 1
        dropped = match.pages[timeline.dropped[: len(match.pages)] < timeline.num_epochs]
        self._dropped[leaving] = np.isin(leaving, dropped)
        self._used[leaving] = next(self._clock)

    def keep(self, timeline: Timeline, salt: str, pages: np.ndarray) -> np.ndarray:
        own = np.flatnonzero(pages >= 0)
        if not len(own):
            return pages[own]
        now = next(self._clock)
        refused = []
        runs, rests = self._grow(timeline, salt, int(own[-1]) + 1, now)
        for node, start in runs:
            offered = pages[start : start + len(node.tokens)]
            there = node.versions.setdefault(0, np.full(len(node.tokens), -1, np.int32))
            taken = np.flatnonzero((offered >= 0) & (there < 0))
            refused.append(offered[(offered >= 0) & (there >= 0)])
            new = offered[taken]
            there[taken] = new
            if not (there >= 0).any():
                del node.versions[0]
            self._pool.to_cached(new)
            self._owner[new], self._offset[new], self._index[new] = node.number, taken, start + taken
            self._shift[new] = 0
            self._used[new] = now
            self._dropped[new] = timeline.dropped[start + taken] < timeline.num_epochs
        for rest in rests:
            self._prune(rest)
        self._forget()
        return np.concatenate([np.zeros(0, np.int32), *refused])

    def evictable(self) -> int:
        return int(((self._owner >= 0) & (self._references == 0)).sum())

    def evict(self, count: int) -> int:
        if count <= 0:
            return 0
        idle = np.flatnonzero((self._owner >= 0) & (self._references == 0))
        # Dropped by their last user first, then the least recently used; of one path its end first.
        order = np.lexsort((-self._index[idle], self._used[idle], ~self._dropped[idle]))
        chosen = idle[order[:count]]
        self._remove(chosen)
        return len(chosen)

    def flush(self) -> int:
        return self.evict(len(self._owner))

    def cached_pages(self) -> list[np.ndarray]:
        return [pages[pages >= 0] for node in self._nodes.values() for pages in node.versions.values()]

    def leased(self) -> int:
        return int(((self._owner >= 0) & (self._references > 0)).sum())

    @property
    def remembered(self) -> int:
        """Tokens on all paths, tombstones included."""
        return self._tokens

    def check(self) -> None:
        """The tree is well-formed and its books are right. PageError if not."""
        references = np.zeros_like(self._references)
        for pages in self._leases.values():
            references[pages] += 1
        if not np.array_equal(references, self._references):
            raise PageError("leases and reference counts disagree")
        owned = 0
        for number, node in self._nodes.items():
            good = node.parent is None or node.parent.children.get(node.edge) is node
            for shift, pages in node.versions.items():
                there = np.flatnonzero(pages >= 0)
                owned += len(there)
                named = self._owner[pages[there]] == number
                named &= (self._offset[pages[there]] == there) & (self._shift[pages[there]] == shift)
                good = good and len(pages) == len(node.tokens) and len(there) > 0 and bool(named.all())
            if not good:
                raise PageError(f"node {number} is malformed")
        if owned != int((self._owner >= 0).sum()) or self._tokens != sum(len(n.tokens) for n in self._nodes.values()):
            raise PageError("pages or tokens of the tree are counted wrong")

    # -- the tree ----------------------------------------------------------------------------------------------------

    def _walk(self, timeline: Timeline, salt: str) -> Iterator[tuple[_Node, int, int]]:
        """Runs on the path of the history: (node, logical index of its first token, tokens of it that agree)."""
        node = self._roots.get(salt)
        for edge, start, stop in _steps(timeline):
            node = node if edge is None or node is None else node.children.get(edge)
            at = start
            while node is not None and at < stop:
                node = node.children.get(int(timeline.tokens[at]))
                if node is None:
                    return
                length = _common(node.tokens, timeline.tokens[at:stop])
                yield node, at, length
                at += length
                if length < len(node.tokens):
                    return
            if node is None:
                return

    def _grow(self, timeline: Timeline, salt: str, end: int, now: int) -> tuple[list[tuple[_Node, int]], list[_Node]]:
        """Make the path of the history's first `end` tokens.

        Returns its runs, each with its first logical index; and what was cut off runs, which may hold nothing.
        """
        if salt not in self._roots:
            self._roots[salt] = self._add(None, b"", _NO_TOKENS, now)
        node, runs, rests = self._roots[salt], [], []
        for edge, start, stop in _steps(timeline):
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
                length = _common(child.tokens, timeline.tokens[at:stop])
                if length < len(child.tokens):
                    rests.append(child)
                    child = self._split(child, length)
                child.last_used = now
                runs.append((child, at))
                node, at = child, at + length
        return runs, rests

    def _add(self, parent: _Node | None, edge: _Edge, tokens: np.ndarray, now: int) -> _Node:
        node = _Node(next(self._numbers), parent, edge, tokens, now)
        self._nodes[node.number] = node
        self._tokens += len(tokens)
        if parent is not None:
            parent.children[edge] = node
        return node

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a run in two; returns the first part, which is a new node. Leases are on pages and do not notice."""
        assert node.parent is not None
        self._tokens -= length
        first = self._add(node.parent, node.edge, node.tokens[:length], node.last_used)
        node.parent, node.edge = first, int(node.tokens[length])
        node.tokens = node.tokens[length:]
        first.children[node.edge] = node
        versions, node.versions = node.versions, {}
        for shift, pages in versions.items():
            for part, own in ((first, pages[:length].copy()), (node, pages[length:].copy())):
                there = np.flatnonzero(own >= 0)
                if len(there):
                    part.versions[shift] = own
                    self._owner[own[there]], self._offset[own[there]] = part.number, there
        return first

    def _remove(self, pages: np.ndarray) -> None:
        """Free cached pages that nobody leases, and the paths on which nothing is left."""
        pages = pages[np.lexsort((self._shift[pages], self._owner[pages]))]
        breaks = (np.diff(self._owner[pages]) != 0) | (np.diff(self._shift[pages]) != 0)
        for group in np.split(pages, np.flatnonzero(breaks) + 1):
            if len(group):
                node, shift = self._nodes[int(self._owner[group[0]])], int(self._shift[group[0]])
                node.versions[shift][self._offset[group]] = -1
                if not (node.versions[shift] >= 0).any():
                    del node.versions[shift]
                    self._prune(node)
        self._owner[pages] = -1
        self._pool.free(pages)

    def _prune(self, node: _Node) -> None:
        """Remove a node that holds nothing and leads nowhere, then its parent if that is now one, and so on."""
        while node.parent is not None and not node.children and not node.versions:
            del node.parent.children[node.edge], self._nodes[node.number]
            self._tokens -= len(node.tokens)
            node = node.parent
        if node.parent is None and not node.children:
            self._roots = {salt: root for salt, root in self._roots.items() if root is not node}
            self._nodes.pop(node.number, None)

    def _forget(self) -> None:
        """Keep the remembered tokens within bounds: the ends of the oldest paths go first (C5)."""
        if self._tokens <= self._max_tokens:
            return
        leaves = [(node.last_used, node.number) for node in self._nodes.values() if not node.children]
        heapq.heapify(leaves)
        while leaves and self._tokens > self._max_tokens:
            leaf = self._nodes[heapq.heappop(leaves)[1]]
            pages, parent = _joined(leaf.versions.values()), leaf.parent
            if self._references[pages].any():
                continue
            self._remove(pages)
            # Whatever was empty above the leaf has gone with it.
            while parent is not None and parent.number not in self._nodes:
                parent = parent.parent
            if parent is not None and not parent.children:
                heapq.heappush(leaves, (parent.last_used, parent.number))


def _steps(timeline: Timeline) -> Iterator[tuple[_Edge | None, int, int]]:
    """The canonical history by epochs: (the operation that begins it, first logical index, one past its last)."""
    dropped = timeline.dropped[: timeline.count]
    order = np.argsort(dropped, kind="stable").astype(np.int32)
    bounds = np.searchsorted(dropped[order], np.arange(timeline.num_epochs + 1))
    repositions = set(timeline.repositions)
    for epoch in range(timeline.num_epochs):
        edge: _Edge | None = None
        if epoch in repositions:
            edge = _REPOSITION
        elif epoch:
            edge = order[bounds[epoch] : bounds[epoch + 1]].tobytes()
        yield edge, timeline.starts[epoch], timeline.stop(epoch)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens agree."""
    size = min(len(a), len(b))
    different = a[:size] != b[:size]
    return int(different.argmax()) if different.any() else size


def _joined(versions: Iterable[np.ndarray]) -> np.ndarray:
    """The pages of several versions, int32."""
    return np.concatenate([_NO_TOKENS, *(pages[pages >= 0] for pages in versions)])
