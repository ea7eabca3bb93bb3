"""A reply taken apart as its text comes in: reasoning, content, tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from akv_jax.chat.messages import ToolCall
from akv_jax.chat.reasoning import ReasoningStream
from akv_jax.chat.tool_calls import Event, ToolCallStream


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """What a piece of a reply brought."""

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __add__(self, other: ReplyPart) -> ReplyPart:
        return ReplyPart(
            self.reasoning + other.reasoning, self.content + other.content, self.tool_calls + other.tool_calls
        )


class ReplyStream:
    """Takes one reply apart. Joined, what comes out does not depend on how the text was cut."""

    def __init__(self, *, reasoning: bool, tools: bool, begun: str = "") -> None:
        """Whether to look for reasoning and for calls. `begun`: the message's text so far, which the client has: marks
        that it opened may be closed by what comes, and none of it comes out."""
        self._reasoning = ReasoningStream() if reasoning else None
        self._calls = ToolCallStream() if tools else None
        self._known = ""
        if begun:
            self.push(begun)
            # Text held back there, as it may open a mark, is no news if it turns out to be just text.
            self._known = "".join(stream.held for stream in (self._reasoning, self._calls) if stream is not None)

    def push(self, text: str) -> ReplyPart:
        """Take more text; returns what is certain now."""
        if self._reasoning is None:
            return self._take("", text, last=False)
        split = self._reasoning.push(text)
        return self._take(split.reasoning, split.content, last=False)

    def finish(self) -> ReplyPart:
        """What is left, once no text will follow."""
        if self._reasoning is None:
            return self._take("", "", last=True)
        split = self._reasoning.finish()
        return self._take(split.reasoning, split.content, last=True)

    def _take(self, reasoning: str, content: str, last: bool) -> ReplyPart:
        events: list[Event] = [content]
        if self._calls is not None:
            events = [*self._calls.push(content), *(self._calls.finish() if last else ())]
        calls = tuple(event for event in events if isinstance(event, ToolCall))
        content = "".join(event for event in events if isinstance(event, str))
        if self._known and (reasoning or content or calls):
            known, self._known = self._known, ""
            reasoning, content = reasoning.removeprefix(known), content.removeprefix(known)
        return ReplyPart(reasoning, content, calls)
