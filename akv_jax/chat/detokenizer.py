"""From sampled tokens to text, piece by piece: whole characters only, and nothing of a stop string.

What a stream shows, joined, is what it would show if all tokens came at once, however characters and stop strings fall
across tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class TokenBytes(Protocol):
    """What a stream needs of a tokenizer."""

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


class TextStream:
    """The text of one reply as its tokens come.

    Text ends at the stop string that is complete first (of several complete at the same character, the longest), and
    the stop string is no part of it. Text that may still turn out to be the start of one is held back.
    """

    def __init__(self, tokenizer: TokenBytes, stop: Sequence[str] = (), *, skip_special: bool = True) -> None:
        """Raises ValueError for an empty stop string."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._matchers = [_Matcher(pattern) for pattern in stop]
        # Invalid bytes become U+FFFD just as in bytes.decode: one for each longest broken character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take one token; returns the text that is safe to show now. After a stop string there is none."""
        if self.stopped or (self._skip_special and self._tokenizer.is_special(token_id)):
            return ""
        return self._extend(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The rest of the text, once no token will follow. A character that was never completed is U+FFFD."""
        if self.stopped:
            return ""
        shown = self._extend(self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return shown + rest

    def _extend(self, text: str) -> str:
        before, self._held = self._held, ""
        for i, character in enumerate(text):
            ended = [len(m.pattern) for m in self._matchers if m.advance(character)]
            if ended:
                self.stopped = True
                found = before + text[: i + 1]
                return found[: len(found) - max(ended)]
        found = before + text
        held = max((matcher.matched for matcher in self._matchers), default=0)
        safe = len(found) - held
        self._held = found[safe:]
        return found[:safe]


class _Matcher:
    """Looks for one string in a text that comes character by character (Knuth, Morris and Pratt)."""

    def __init__(self, pattern: str) -> None:
        if not pattern:
            raise ValueError("a stop string must not be empty")
        self.pattern = pattern
        #: Length of the longest end of the text so far that is a start of the pattern.
        self.matched = 0
        #: For each length: the longest shorter start of the pattern that is also an end of that much of it.
        self._fallback = [0, 0]
        for character in pattern[1:]:
            self._fallback.append(self._next(self._fallback[-1], character))

    def _next(self, matched: int, character: str) -> int:
        while matched and self.pattern[matched] != character:
            matched = self._fallback[matched]
        return matched + 1 if self.pattern[matched] == character else 0

    def advance(self, character: str) -> bool:
        """Take one more character; whether the pattern is complete."""
        self.matched = self._next(self.matched, character)
        return self.matched == len(self.pattern)
