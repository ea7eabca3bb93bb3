"""The `cache` field of a chat request and its synonyms (DESIGN A1-A3, A10): from decoded JSON to a `CacheField`.

Checked here is all that needs no tokens: form, names, and that no entry is above its trigger. It is checked for every
entry, whether its trigger is a message of this request or one still to come (A3). That a token range fits its message
is seen only after tokenisation, in `lowering.py`; a `DropEntry` carries its path for that.

The time taken is linear in the number of entries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from akv_jax.chat.messages import Message, describe
from akv_jax.errors import Reason, RequestError

Part = Literal["reasoning", "content", "tool_calls"]
PARTS: tuple[Part, ...] = get_args(Part)

#: How a message index is written as a JSON key: no sign, no leading zero. (A thousand digits are enough.)
_INDEX_KEY = re.compile(r"0|[1-9][0-9]{0,999}")


@dataclass(frozen=True, slots=True)
class DropEntry:
    """What one entry of a drop list names: a whole message, one part of it, or a range of its tokens (A2)."""

    message: int
    part: Part | None = None
    #: Half-open [start, end) over the message's own tokens, as sent: negative from the end, None to the end.
    tokens: tuple[int, int | None] | None = None
    #: Where in the request it stands, for errors.
    param: str = ""


@dataclass(frozen=True, slots=True)
class CacheField:
    """Which entries are dropped after which message, and after which messages survivors are repositioned (A1)."""

    drop: Mapping[int, tuple[DropEntry, ...]] = field(default_factory=dict)
    #: Strictly increasing.
    reposition: tuple[int, ...] = ()
    #: `usage.prompt_tokens` is to be the active count (A6).
    report_active: bool = False
    #: `{"type": "thinking_drop"}`: every reasoning is dropped right after its message.
    drop_reasoning: bool = False

    def for_messages(self, messages: Sequence[Message]) -> CacheField:
        """The same with `drop_reasoning` spelled out as entries."""
        if not self.drop_reasoning:
            return self
        drop = {
            k: (DropEntry(k, part="reasoning", param="drop_rule"),)
            for k, message in enumerate(messages)
            if message.role == "assistant"
        }
        return replace(self, drop=drop, drop_reasoning=False)


def parse_cache_field(body: Mapping[str, Any]) -> CacheField:
    """Read `cache`, or its synonyms `drop_message`, `reposition` and `drop_rule`, from a request body, of which nothing
    else is looked at. Raises INVALID_CACHE."""
    synonyms = [name for name in ("drop_message", "reposition", "drop_rule") if body.get(name) is not None]
    cache = body.get("cache")
    if cache is None:
        return _parse_synonyms(body)
    if not isinstance(cache, Mapping):
        raise _invalid("cache", "an object with drop and reposition, or null", cache)
    if cache and synonyms:
        raise _refuse(synonyms[0], f"expected either cache or {synonyms[0]}, found both")
    return _parse_cache(cache) if cache else _parse_synonyms(body)


def _parse_cache(cache: Mapping[str, Any]) -> CacheField:
    _only_keys(cache, ("drop", "reposition", "report"), "cache")
    report = cache.get("report")
    if report is not None and report != "active":
        raise _invalid("cache.report", '"active" or null', report)
    return CacheField(
        drop=_parse_drop(cache.get("drop"), "cache.drop"),
        reposition=_parse_reposition(cache.get("reposition"), "cache.reposition"),
        report_active=report == "active",
    )


def _parse_synonyms(body: Mapping[str, Any]) -> CacheField:
    rule = body.get("drop_rule")
    if rule is not None and body.get("drop_message") is not None:
        raise _refuse("drop_rule", "expected either drop_message or drop_rule, found both")
    field = CacheField(_parse_drop(body.get("drop_message"), "drop_message")) if rule is None else _parse_rule(rule)
    return replace(field, reposition=_parse_reposition(body.get("reposition"), "reposition"))


def _parse_rule(rule: Any) -> CacheField:
    """`drop_rule` (A2): a drop schedule under another name, or "each reasoning right after its message"."""
    if not isinstance(rule, Mapping):
        raise _invalid("drop_rule", "an object with a type, or null", rule)
    kind = rule.get("type")
    if kind == "message_drop":
        _only_keys(rule, ("type", "drop_messages"), "drop_rule")
        if rule.get("drop_messages") is None:
            raise _invalid("drop_rule.drop_messages", 'an object such as {"5": [2, 3]}', None)
        return CacheField(_parse_drop(rule["drop_messages"], "drop_rule.drop_messages"))
    if kind == "thinking_drop":
        _only_keys(rule, ("type",), "drop_rule")
        return CacheField(drop_reasoning=True)
    raise _invalid("drop_rule.type", '"message_drop" or "thinking_drop"', kind)


def _parse_drop(value: Any, path: str) -> dict[int, tuple[DropEntry, ...]]:
    """A drop schedule: {"trigger": [entries]}; null is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _invalid(path, 'an object from message index to a list, such as {"5": [2, 3]}', value)
    drop = {}
    for key, entries in value.items():
        if not isinstance(key, str) or not _INDEX_KEY.fullmatch(key):
            shown = str(key)[:40]
            raise _invalid(f"{path}.{shown}", 'a key that is a message index, such as "0" or "12"', key)
        if not isinstance(entries, list | tuple):
            raise _invalid(f"{path}.{key}", "a list of messages to drop, such as [2, 3]", entries)
        trigger = int(key)
        drop[trigger] = tuple(_parse_entry(e, trigger, f"{path}.{key}[{i}]") for i, e in _without_repeats(entries))
    return drop


def _without_repeats(entries: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Entries and their places. An index twice is once (A10), and a million times costs next to nothing."""
    seen: set[int] = set()
    for i, entry in enumerate(entries):
        if type(entry) is int:
            if entry in seen:
                continue
            seen.add(entry)
        yield i, entry


def _parse_entry(value: Any, trigger: int, path: str) -> DropEntry:
    if not isinstance(value, Mapping):
        return DropEntry(_parse_dropped(value, trigger, path), param=path)
    _only_keys(value, ("message", "part", "tokens"), path)
    if "message" not in value:
        raise _refuse(f"{path}.message", "expected the index of a message, found none")
    message = _parse_dropped(value["message"], trigger, f"{path}.message")
    part, tokens = value.get("part"), value.get("tokens")
    if part is not None and tokens is not None:
        raise _refuse(path, "expected either part or tokens, found both")
    if part is not None and part not in PARTS:
        raise _invalid(f"{path}.part", 'one of "reasoning", "content" and "tool_calls"', part)
    bounds = None if tokens is None else _parse_range(tokens, f"{path}.tokens")
    return DropEntry(message, part, bounds, path)


def _parse_dropped(value: Any, trigger: int, path: str) -> int:
    """The index of a message to drop: at most its trigger, for what is not there yet cannot be dropped."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _invalid(path, "the index of a message (a whole number from 0)", value)
    if value > trigger:
        found = describe(value)
        raise _refuse(path, f"expected a message at or before the trigger {describe(trigger)}, found {found}")
    return value


def _parse_range(value: Any, path: str) -> tuple[int, int | None]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise _invalid(path, "two numbers [start, end)", value)
    start, end = value
    if isinstance(start, bool) or not isinstance(start, int):
        raise _invalid(f"{path}[0]", "a whole number (negative counts from the end)", start)
    if isinstance(end, bool) or not isinstance(end, int | None):
        raise _invalid(f"{path}[1]", "a whole number (negative counts from the end) or null", end)
    if end is not None and (start < 0) == (end < 0) and start > end:
        raise _refuse(path, f"expected start at or before end, found [{describe(start)}, {describe(end)}]")
    return start, end


def _parse_reposition(value: Any, path: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _invalid(path, "a list of message indices, such as [5]", value)
    previous = -1
    for i, boundary in enumerate(value):
        if isinstance(boundary, bool) or not isinstance(boundary, int) or boundary < 0:
            raise _invalid(f"{path}[{i}]", "the index of a message (a whole number from 0)", boundary)
        if boundary <= previous:
            found = f"{describe(boundary)} after {describe(previous)}"
            raise _refuse(f"{path}[{i}]", f"expected indices in increasing order, each once, found {found}")
        previous = boundary
    return tuple(value)


def _only_keys(value: Mapping[str, Any], known: tuple[str, ...], path: str) -> None:
    for key in value:
        if key not in known:
            raise _refuse(f"{path}.{str(key)[:40]}", f"unknown key: expected {', '.join(known)}")


def _invalid(param: str, expected: str, found: object) -> RequestError:
    return _refuse(param, f"expected {expected}, found {describe(found)}")


def _refuse(param: str, message: str) -> RequestError:
    return RequestError(Reason.INVALID_CACHE, message, param)
