"""Request fields that nobody looks at, so that a client that misspells one can be found out (DESIGN A10)."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.schemas import Body

_CALL = frozenset({"name", "arguments"})
_PART = frozenset({"type", "text", "refusal"})
_TOOL_CALL = frozenset({"id", "type", "index", "function"})
_MESSAGE = frozenset(
    {
        "role", "content", "reasoning_content", "reasoning", "tool_calls", "function_call", "token_ids", "name",
        "tool_call_id",
    }
)  # fmt: skip
_TOOL = frozenset({"type", "function"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})


@dataclass
class UnknownFields:
    """Each is logged once, and a client that invents names cannot fill the memory. For any thread."""

    limit: int = 1000
    seen: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new(self, names: Iterable[str]) -> list[str]:
        """Those of `names` that were not seen before, shortened, in order."""
        with self._lock:
            fresh = sorted({name[:80] for name in names} - self.seen)[: self.limit - len(self.seen)]
            self.seen.update(fresh)
        return fresh


def unknown_fields(body: Body) -> Iterator[str]:
    """The paths of unknown fields of a body that has been found sound, without indices: `messages.content.colour`."""
    yield from _extras(body, "")
    for name in ("stream_options", "response_format"):
        inner = getattr(body, name, None)
        if inner is not None:
            yield from _extras(inner, f"{name}.")
    schema = getattr(getattr(body, "response_format", None), "json_schema", None)
    if schema is not None:
        yield from _extras(schema, "response_format.json_schema.")
    for message in _objects(getattr(body, "messages", None)):
        yield from _others(message, _MESSAGE, "messages.")
        for part in _objects(message.get("content")):
            yield from _others(part, _PART, "messages.content.")
        for call in _objects(message.get("tool_calls")):
            yield from _others(call, _TOOL_CALL, "messages.tool_calls.")
            yield from _others(call["function"], _CALL, "messages.tool_calls.function.")
        yield from _others(message.get("function_call") or {}, _CALL, "messages.function_call.")
    for tool in _objects(getattr(body, "tools", None)):
        yield from _others(tool, _TOOL, "tools.")
        yield from _others(tool["function"], _FUNCTION, "tools.function.")


def _extras(body: Body, prefix: str) -> Iterator[str]:
    yield from (prefix + name for name in body.model_extra or ())


def _others(value: Mapping[Any, Any], known: frozenset[str], prefix: str) -> Iterator[str]:
    """Msgpack has keys that are bytes."""
    yield from (f"{prefix}{name}" for name in value if name not in known)


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        yield from (item for item in value if isinstance(item, Mapping))
