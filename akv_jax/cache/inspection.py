"""The radix tree as values, for people and tools: a bounded walk that reads and changes nothing.

Which nodes are shown is chosen level by level, the most recently used first, so that a large tree is cut at its ends
and at its oldest branches. They come in depth-first order, a parent before its children.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from akv_jax.cache.radix_tree import RadixCache

Kind = Literal["root", "tokens", "drop", "reposition"]


class Node(Protocol):
    """What is read of a node of the tree."""

    @property
    def number(self) -> int: ...
    @property
    def parent(self) -> Node | None: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def versions(self) -> Mapping[int, np.ndarray]: ...
    @property
    def dropped(self) -> np.ndarray | None: ...
    @property
    def last_used(self) -> int: ...
    @property
    def children(self) -> Mapping[Any, Node]: ...


#: Of a run, the tokens that are copied; of a drop, the ranges of dropped indices.
FIRST_TOKENS, FIRST_RANGES = 24, 16


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the tree (DESIGN C1).

    number, parent: stay the same while the node lives; -1 is no parent. depth: nodes above it.
    tenant: of a root, a digest of its `cache_salt`, empty where there is none.
    start: logical index of its first token; of an operation, how many tokens were appended before it.
    length: tokens of a run, or indices that a drop newly deactivates.
    first: int32, the run's first tokens. ranges: the drop's first half-open ranges of logical indices.
    resident: tokens with a page in some version. versions: pages by shift (C2). leased: pages that a request leases.
    last_used: the cache's count of matches and offers then; a larger one is later.
    children: those that are shown, the latest used first. hidden: how many children are not.
    """

    number: int
    parent: int
    depth: int
    kind: Kind
    tenant: str
    start: int
    length: int
    first: np.ndarray
    ranges: tuple[tuple[int, int], ...]
    resident: int
    versions: Mapping[int, int]
    leased: int
    last_used: int
    children: tuple[int, ...]
    hidden: int

    @property
    def tombstones(self) -> int:
        """Tokens that are remembered without a page."""
        return self.length - self.resident if self.kind == "tokens" else 0


@dataclass(frozen=True, slots=True)
class TreeView:
    """What was shown of a tree that has `total_nodes` nodes and remembers `total_tokens` tokens."""

    nodes: tuple[NodeView, ...]
    total_nodes: int
    total_tokens: int


class _Place(NamedTuple):
    """A node that is shown, and where it is. `salt` is its own only where it is a root."""

    node: Node
    parent: int
    depth: int
    start: int
    salt: str


def tree_view(cache: RadixCache, *, max_nodes: int, max_depth: int, first_tokens: int = FIRST_TOKENS) -> TreeView:
    """At most `max_nodes` nodes, none with more than `max_depth` nodes above it (a tenant's root has none)."""
    places, children = _chosen(cache, max_nodes, max_depth)
    nodes = []
    # Depth first, the children of a node in their own order.
    stack = [number for number, place in reversed(places.items()) if place.parent < 0]
    while stack:
        number = stack.pop()
        nodes.append(_view(cache, places[number], tuple(children[number]), first_tokens))
        stack += reversed(children[number])
    return TreeView(tuple(nodes), cache.num_nodes, cache.remembered)


def _chosen(cache: RadixCache, max_nodes: int, max_depth: int) -> tuple[dict[int, _Place], dict[int, list[int]]]:
    """Nodes by number, level by level, and the numbers of the children that are among them."""
    places: dict[int, _Place] = {}
    children: dict[int, list[int]] = {}
    level = [_Place(root, -1, 0, 0, salt) for salt, root in cache.roots().items()]
    while level and len(places) < max_nodes:
        # Of all nodes of this depth.
        level = heapq.nlargest(max_nodes - len(places), level, key=lambda place: place.node.last_used)
        below: list[_Place] = []
        for place in level:
            node = place.node
            places[node.number], children[node.number] = place, []
            if place.parent >= 0:
                children[place.parent].append(node.number)
            if place.depth < max_depth:
                start = place.start + len(node.tokens)
                below += [_Place(child, node.number, place.depth + 1, start, "") for child in node.children.values()]
        level = below
    return places, children


def _view(cache: RadixCache, place: _Place, children: tuple[int, ...], first_tokens: int) -> NodeView:
    node = place.node
    versions = {shift: pages[pages >= 0] for shift, pages in node.versions.items()}
    resident = np.zeros(len(node.tokens), bool)
    for pages in node.versions.values():
        resident |= pages >= 0
    dropped = node.dropped
    return NodeView(
        number=node.number,
        parent=place.parent,
        depth=place.depth,
        kind=_kind(node),
        tenant=digest(place.salt),
        start=place.start,
        length=len(node.tokens) if dropped is None else len(dropped),
        first=node.tokens[:first_tokens].copy(),
        ranges=() if dropped is None else _ranges(dropped),
        resident=int(resident.sum()),
        versions={shift: len(pages) for shift, pages in sorted(versions.items()) if len(pages)},
        leased=sum(int(cache.is_leased(pages).sum()) for pages in versions.values()),
        last_used=node.last_used,
        children=children,
        hidden=len(node.children) - len(children),
    )


def _kind(node: Node) -> Kind:
    if node.parent is None:
        return "root"
    if len(node.tokens):
        return "tokens"
    return "reposition" if node.dropped is None else "drop"


def _ranges(indices: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The first half-open ranges of ascending indices."""
    cuts = np.flatnonzero(np.diff(indices) != 1)[:FIRST_RANGES] + 1
    runs = np.split(indices, cuts)[:FIRST_RANGES]
    return tuple((int(run[0]), int(run[-1]) + 1) for run in runs)


def digest(salt: str) -> str:
    """Tells tenants apart without their salts: the beginning of the salt's SHA-256; empty for the empty salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:12] if salt else ""
