"""The radix tree as values, for people and tools: a bounded walk that reads and changes nothing.

Which nodes are shown is chosen level by level, the most recently used first, so that a large tree is cut at its ends
and at its oldest branches. They come in depth-first order, a parent before its children.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

import numpy as np

from akv_jax.cache.node import Node
from akv_jax.cache.radix_tree import RadixCache

Kind = Literal["root", "tokens", "drop", "reposition"]


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


def tree_view(cache: RadixCache, *, max_nodes: int, max_depth: int, first_tokens: int = FIRST_TOKENS) -> TreeView:
    """At most `max_nodes` nodes, none with more than `max_depth` nodes above it (a tenant's root has none)."""
    salts = {root.number: salt for salt, root in cache.roots().items()}
    chosen, children = _chosen(cache, max_nodes, max_depth)
    views: list[NodeView] = []
    # Depth first, the children of a node in their own order; each with its depth and first logical index.
    stack = [(node, 0, 0) for node in reversed(chosen) if node.parent is None]
    while stack:
        node, depth, start = stack.pop()
        below = children.get(node.number, [])
        tenant = digest(salts.get(node.number, ""))
        views.append(_view(cache, node, depth, start, tenant, below, first_tokens))
        stack += [(child, depth + 1, start + len(node.tokens)) for child in reversed(below)]
    return TreeView(tuple(views), cache.num_nodes, cache.remembered)


def _chosen(cache: RadixCache, max_nodes: int, max_depth: int) -> tuple[list[Node], dict[int, list[Node]]]:
    """The nodes, level by level, and by number the children of each that are among them."""
    chosen: list[Node] = []
    children: dict[int, list[Node]] = {}
    level: Iterable[Node] = cache.roots().values()
    for _ in range(max_depth + 1):
        if len(chosen) == max_nodes:
            break
        # Of all nodes of this depth. There may be very many below one: they are gone through without being kept.
        nodes = heapq.nlargest(max_nodes - len(chosen), level, key=attrgetter("last_used"))
        for node in nodes:
            if node.parent is not None:
                children.setdefault(node.parent.number, []).append(node)
        chosen += nodes
        level = (child for node in nodes for child in node.children.values())
    return chosen, children


def _view(
    cache: RadixCache, node: Node, depth: int, start: int, tenant: str, children: list[Node], first_tokens: int
) -> NodeView:
    versions = {shift: pages[pages >= 0] for shift, pages in sorted(node.versions.items())}
    dropped = node.dropped
    return NodeView(
        number=node.number,
        parent=-1 if node.parent is None else node.parent.number,
        depth=depth,
        kind=_kind(node),
        tenant=tenant,
        start=start,
        length=len(node.tokens) if dropped is None else len(dropped),
        first=node.tokens[:first_tokens].copy(),
        ranges=() if dropped is None else _ranges(dropped),
        resident=int(np.count_nonzero(node.any_version(slice(None)) >= 0)),
        versions={shift: len(pages) for shift, pages in versions.items()},
        leased=sum(int(np.count_nonzero(cache.is_leased(pages))) for pages in versions.values()),
        last_used=node.last_used,
        children=tuple(child.number for child in children),
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
    cuts = np.flatnonzero(np.diff(indices) != 1)[:FIRST_RANGES]
    starts, stops = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(indices) - 1]
    return tuple((int(indices[a]), int(indices[b]) + 1) for a, b in zip(starts, stops, strict=True))[:FIRST_RANGES]


def digest(salt: str) -> str:
    """Tells tenants apart without their salts: the beginning of the salt's SHA-256; empty for the empty salt."""
    return hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()[:12] if salt else ""
