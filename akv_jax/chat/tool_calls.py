"""Finds Hermes-style tool calls in a reply as its text comes in.

A call is `<tool_call>`, a JSON object with `name` and `arguments`, `</tool_call>`; white space around the JSON does not
matter, and a newline before the mark is not content, so that a call rendered by `templates/` is read back as it was.
What looks like a call and is not one stays content, to the letter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NoReturn

from akv_jax.chat.messages import ToolCall
from akv_jax.chat.reasoning import held_back

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Event = str | ToolCall
"""A piece of content, or a whole call (its id is for the server to give)."""


def parse_tool_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The content of a whole reply and the calls in it."""
    stream = ToolCallStream()
    events = [*stream.push(text), *stream.finish()]
    calls = tuple(event for event in events if isinstance(event, ToolCall))
    return "".join(event for event in events if isinstance(event, str)), calls


class ToolCallStream:
    """Takes one reply apart. Joined content and calls do not depend on how the text was cut."""

    def __init__(self) -> None:
        self._held = ""
        self._called = False

    @property
    def held(self) -> str:
        """Text that was taken and not yet returned."""
        return self._held

    def push(self, text: str) -> list[Event]:
        """Take more text; returns the content and the calls that are certain now, in order."""
        return [event for event in self._scan(self._held + text, final=False) if event]

    def finish(self) -> list[Event]:
        """What is left, once no text will follow."""
        return [event for event in self._scan(self._held, final=True) if event]

    def _scan(self, text: str, final: bool) -> Iterator[Event]:
        self._held = ""
        while OPEN in text:
            before, _, after = text.partition(OPEN)
            call, end = _read_call(after)
            if call is not None:
                yield self._content(before.removesuffix("\n"))
                yield call
                self._called, text = True, after[end:]
            elif end is None and not final:
                certain = before.removesuffix("\n")
                yield self._content(certain)
                self._held = text[len(certain) :]
                return
            else:
                # Not a call: the mark is content. Look on behind it.
                yield self._content(before + OPEN)
                text = after
        held = 0 if final else max(held_back(text, OPEN), held_back(text, "\n" + OPEN))
        yield self._content(text[: len(text) - held])
        self._held = text[len(text) - held :]

    def _content(self, text: str) -> str:
        """White space right behind a call separates, it is not content."""
        text = text.lstrip() if self._called else text
        self._called = self._called and not text
        return text


def _read_call(text: str) -> tuple[ToolCall | None, int | None]:
    """Read the call that `text` begins with, its opening mark already taken: the call and where it ends.

    (None, None) if its end has not come yet, (None, 0) if it is none. A closing mark inside a JSON string does not
    close.
    """
    close = text.find(CLOSE)
    while close >= 0:
        try:
            value = json.loads(text[:close], strict=False, parse_constant=_refuse_constant)
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Unterminated string"):
                return None, 0
            close = text.find(CLOSE, close + 1)
        except (ValueError, RecursionError):
            return None, 0
        else:
            call = _as_call(value)
            return (call, close + len(CLOSE)) if call else (None, 0)
    return None, None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _as_call(value: object) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        return None
    arguments = value.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif arguments is None:
        arguments = "{}"
    if not isinstance(arguments, str):
        return None
    try:
        (name + arguments).encode()
    except UnicodeEncodeError:  # an escaped lone surrogate, which no response could carry
        return None
    return ToolCall(name, arguments)
