"""Which replica a request belongs to: the one that has its conversation's beginning in its cache.

All pure, and without state: any number of fronts agree on it without a word between them. docs/replicas.md has the
rules in prose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import orjson

#: What a completion's key is made of: characters, or token ids. Prompts have no messages that would say where a
#: beginning ends, and a key must not change as the prompt grows.
PROMPT_BEGINNING = 512

#: How much emptier a replica must be for a conversation to leave a full one: at most this share of its requests.
SPILL_SHARE = 0.5


def conversation_key(body: Mapping[str, Any]) -> str:
    """32 hexadecimal digits that all turns of a conversation share, or "" for what may run anywhere.

    An agent's history only grows, so its beginning names it: every message before the first reply, a completion's
    first PROMPT_BEGINNING characters or tokens, a sequence's first append. `prompt_cache_key`, where it is sent, stands
    for all that. `cache_salt` and `user` are part of the key: another salt is another cache. The body may be invalid.
    """
    beginning = _beginning(body)
    if beginning is None:
        return ""
    who = [_text(body.get("cache_salt")), _text(body.get("user"))]
    return blake2b(orjson.dumps([*who, beginning]), digest_size=16).hexdigest()


def _beginning(body: Mapping[str, Any]) -> Any:
    """What names the conversation, as plain values; None where nothing does."""
    chosen = _text(body.get("prompt_cache_key"))
    if chosen:
        return ["key", chosen]
    match body:
        case {"messages": [*messages]} if messages:
            return ["chat", [_message(message) for message in takewhile(_before_reply, messages)]]
        case {"prompt": str() as text} if text:
            return ["text", text[:PROMPT_BEGINNING].encode(errors="replace").decode()]
        case {"prompt": [*ids]} | {"operations": [["append", [*ids]], *_]} if _are_ids(ids):
            return ["ids", ids if "operations" in body else ids[:PROMPT_BEGINNING]]
    return None


def _before_reply(message: Any) -> bool:
    return not (isinstance(message, dict) and message.get("role") in ("assistant", "tool"))


def _message(message: Any) -> list[str]:
    """Role and text. What clients change from turn to turn is left out: marks for caching, whether text is in parts."""
    if not isinstance(message, dict):
        return []
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [_text(part.get("text")) if isinstance(part, dict) else _text(part) for part in parts]
    return [_text(message.get("role")), "".join(texts)]


def _text(value: Any) -> str:
    """Surrogates cannot be encoded."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def _are_ids(ids: Sequence[Any]) -> bool:
    return bool(ids) and all(type(token) is int and 0 <= token < 2**63 for token in ids)


def rank(key: str, seats: Sequence[str]) -> list[int]:
    """Indices of `seats`, the key's home first, by rendezvous hashing: of N seats, one that goes or comes moves only
    the keys whose home it is, one in N, and those of a seat that goes spread evenly over the others."""

    def weight(index: int) -> tuple[bytes, str]:
        return blake2b(f"{key}\0{seats[index]}".encode(), digest_size=8).digest(), seats[index]

    return sorted(range(len(seats)), key=weight, reverse=True)


def spill(ranked: Sequence[int], ongoing: Sequence[int], full: int) -> list[int]:
    """`ranked` as it should be tried, by how many requests each replica has `ongoing`, which `ranked` indexes.

    Home comes first unless it has more than `full` requests, so that some of them wait, and the emptier of the next two
    (the power of two choices) has at most SPILL_SHARE as many. The same conversation spills to the same two, and comes
    home when nobody waits there any more.
    """
    order = list(ranked)
    if len(order) < 2 or ongoing[order[0]] <= full:
        return order
    other = min(order[1:3], key=lambda index: ongoing[index])
    if ongoing[other] > SPILL_SHARE * ongoing[order[0]]:
        return order
    order.remove(other)
    return [other, *order]
