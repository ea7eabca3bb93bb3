"""`GET /cache/tree`: what the cache holds, for people and tools."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.cache.inspection import NodeView, TreeView
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.errors import invalid
from serving.responses import answer
from serving.state import server_of

#: Nodes and levels that are shown unless more or fewer are asked for, and at most.
DEFAULT_NODES, MOST_NODES = 500, 5_000
DEFAULT_DEPTH, MOST_DEPTH = 1_000, 100_000
#: Characters of a run's first text.
TEXT_LENGTH = 100

router = APIRouter(tags=["system"])


@router.get("/cache/tree")
async def cache_tree(request: HttpRequest) -> Response:
    """The tree's nodes, a parent before its children. `max_nodes` and `max_depth` bound it; what was cut is said."""
    server = server_of(request)
    engine = server.require_engine()
    max_nodes = _number(request, "max_nodes", DEFAULT_NODES, 1, MOST_NODES)
    max_depth = _number(request, "max_depth", DEFAULT_DEPTH, 0, MOST_DEPTH)
    tree = await engine.cache_tree(max_nodes, max_depth)
    # Decoding thousands of texts is not for the event loop.
    return await asyncio.to_thread(lambda: answer(tree_object(tree, engine.model.tokenizer)))


def _number(request: HttpRequest, name: str, default: int, least: int, most: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and least <= int(text) <= most):
        raise invalid(f"expected a whole number from {least} to {most}, found {text[:40]!r}", name)
    return int(text)


def tree_object(tree: TreeView, tokenizer: Tokenizer) -> dict[str, Any]:
    """Texts are shown of what was sent without a salt only: tenants share the API key, not their prompts."""
    salted: set[int] = set()
    for node in tree.nodes:
        if node.tenant or node.parent in salted:
            salted.add(node.number)
    return {
        "object": "cache.tree",
        "total_nodes": tree.total_nodes,
        "total_tokens": tree.total_tokens,
        "shown_nodes": len(tree.nodes),
        "truncated": len(tree.nodes) < tree.total_nodes,
        "nodes": [_node_object(node, None if node.number in salted else tokenizer) for node in tree.nodes],
    }


def _node_object(node: NodeView, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What every node has, and what its kind has; no text without a tokenizer."""
    own: dict[str, Any] = {}
    if node.kind == "root":
        own = {"tenant": node.tenant or None}
    elif node.kind == "tokens":
        text = None if tokenizer is None else tokenizer.decode(node.first.tolist())[:TEXT_LENGTH]
        own = {
            "tokens": node.length,
            "text": text,
            "resident": node.resident,
            "tombstones": node.tombstones,
            "leased": node.leased,
            "versions": {str(shift): pages for shift, pages in node.versions.items()},
        }
    elif node.kind == "drop":
        shown = sum(stop - start for start, stop in node.ranges)
        own = {"dropped": node.length, "ranges": node.ranges, "ranges_truncated": shown < node.length}
    return {
        "id": node.number,
        "parent": None if node.parent < 0 else node.parent,
        "depth": node.depth,
        "kind": node.kind,
        "start": node.start,
        **own,
        "last_used": node.last_used,
        "children": node.children,
        "hidden_children": node.hidden,
    }
