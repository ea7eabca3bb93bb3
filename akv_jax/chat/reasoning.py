"""Takes `<think>…</think>` at the start of a reply apart from what follows, as text comes in.

This is the inverse of how `templates/` write reasoning, to the newline: "<think>\\n", text, "\\n</think>\\n\\n".
"""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Split:
    """Text of a reply, or of a piece of it."""

    reasoning: str = ""
    content: str = ""


class ReasoningStream:
    """Splits one reply. The pieces that it returns, joined, do not depend on how the text was cut."""

    def __init__(self, *, opened: bool = False) -> None:
        """`opened`: the generation prompt has already written "<think>"."""
        self._state = "reasoning" if opened else "start"
        self._held = ""

    @property
    def held(self) -> str:
        """Text that was taken and not yet returned."""
        return self._held

    def push(self, text: str) -> Split:
        """Take more text; returns what is certain now."""
        return self._advance(self._held + text, final=False)

    def finish(self) -> Split:
        """What is left, once no text will follow. Reasoning that was never closed is reasoning."""
        return self._advance(self._held, final=True)

    def _advance(self, text: str, final: bool) -> Split:
        self._held, reasoning = "", ""
        if self._state == "start":
            if text.startswith(OPEN):
                self._state, text = "newline", text[len(OPEN) :]
            elif OPEN.startswith(text) and not final:
                return self._hold(text)
            else:
                self._state = "content"
        if self._state == "newline" and (text or final):
            self._state, text = "reasoning", text.removeprefix("\n")
        if self._state == "reasoning":
            reasoning, closed, after = text.partition(CLOSE)
            if closed:
                self._state, text, reasoning = "after", after, reasoning.removesuffix("\n")
            elif final:
                return Split(reasoning=reasoning)
            else:
                held = max(held_back(text, "\n" + CLOSE), held_back(text, CLOSE))
                self._held = text[len(text) - held :]
                return Split(reasoning=text[: len(text) - held])
        if self._state == "after":
            if text in ("", "\n") and not final:
                return self._hold(text, reasoning)
            self._state, text = "content", text.removeprefix("\n").removeprefix("\n")
        return Split(reasoning, text if self._state == "content" else "")

    def _hold(self, text: str, reasoning: str = "") -> Split:
        self._held = text
        return Split(reasoning)


def held_back(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the start of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
