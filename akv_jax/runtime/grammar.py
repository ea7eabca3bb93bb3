"""Constrained generation: which tokens may come next so that the text fits a grammar (llguidance does the parsing).

A `Vocabulary` is made once for a model, a `Grammar` for a request, before it reaches the engine (compiling may take a
while), and a `GrammarState` follows one generation token by token. Grammars speak of bytes: how a text is cut into
tokens is the model's choice. The end tokens are allowed exactly where the text may end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

#: Bounds on what one hostile grammar may cost. A lexer state takes about 2 kB.
MAX_LEXER_STATES = 20_000
#: Steps of compiling, half a second of them. `^(a{1000}){1000}$` would go on for ten times as long; an enum of 20,000
#: short texts takes half.
MAX_COMPILE_STEPS = 500_000
#: Characters of a schema. A long one is refused by the other bounds too, but only after seconds.
MAX_SCHEMA_LENGTH = 2_000_000

#: How JSON may be written. White space: enough to indent by, but a model that only writes blanks comes to an end.
#: Lenient: keywords that llguidance lacks are left unchecked.
JSON_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"[ \n\r\t]{1,64}", "lenient": True}

#: How a matcher says that it stopped because the text is complete; all others are limits that it ran into.
_COMPLETE = ("NoExtension", "NoExtensionBias", "EndOfSentence")


class GrammarError(ValueError):
    """A grammar or schema that does not compile, or a text that does not fit it. The message is llguidance's reason."""


class Tokens(Protocol):
    """What a grammar needs of a tokenizer."""

    def encode(self, text: str, allow_special: bool = True) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


class _Wrapped:
    """The tokenizer as llguidance asks for it."""

    def __init__(self, tokenizer: Tokens, size: int, eos: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos, None
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = [token for token in range(size) if tokenizer.is_special(token)]
        if eos == size:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(eos)

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, allow_special=False)


class Vocabulary:
    """Compiles grammars for one model. Making one takes about ten seconds a million tokens; safe to share."""

    def __init__(self, tokenizer: Tokens, size: int, eos_token_ids: Sequence[int]) -> None:
        """`size`: length of the model's logits, which may be more than the tokenizer has tokens."""
        self.size = size
        # llguidance wants an end token; a model without any gets one that is cut off its masks again.
        ends = list(eos_token_ids) or [size]
        wrapped = TokenizerWrapper(_Wrapped(tokenizer, size, ends[0]))
        self._tokenizer = LLTokenizer(wrapped, n_vocab=max(size, ends[0] + 1), eos_token=ends)
        self._limits = LLParserLimits(
            max_lexer_states=MAX_LEXER_STATES, initial_lexer_fuel=MAX_COMPILE_STEPS, verbose_errors=False
        )

    def json_schema(self, schema: Mapping[str, Any], *, strict: bool = False) -> Grammar:
        """JSON texts that fit `schema`. Keywords that llguidance lacks are refused if `strict`, else ignored.

        Raises GrammarError.
        """
        options: Any = {**JSON_OPTIONS, "lenient": not strict}
        try:
            text = json.dumps(schema)
            if len(text) > MAX_SCHEMA_LENGTH:
                raise GrammarError(f"expected at most {MAX_SCHEMA_LENGTH} characters, found {len(text)}")
            return self._compile(LLMatcher.grammar_from_json_schema(text, overrides=options))
        except (TypeError, ValueError) as error:
            raise GrammarError(str(error)) from None

    def lark(self, text: str) -> Grammar:
        """Texts that fit a grammar in llguidance's Lark syntax. Raises GrammarError."""
        return self._compile(LLMatcher.grammar_from_lark(text))

    def _compile(self, grammar: str) -> Grammar:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        # Some grammars only prove hopeless with the first mask (a schema that refers to nothing but itself).
        trial = matcher.deep_copy()
        trial.compute_bitmask()
        for tried in (matcher, trial):
            if tried.is_error():
                raise GrammarError(_reason(tried))
        return Grammar(self, matcher)

    def cut(self, text: str) -> list[int]:
        """The text in tokens, somehow."""
        return self._tokenizer.tokenize_str(text)


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar, immutable: every generation starts from a copy."""

    _vocabulary: Vocabulary
    _matcher: LLMatcher

    def start(self) -> GrammarState:
        """At the beginning of a reply."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary.size)

    def after(self, text: str) -> Grammar:
        """What may follow `text`, which is written already. GrammarError if no fitting text begins with it."""
        matcher = self._matcher.deep_copy()
        if text and not matcher.consume_tokens(self._vocabulary.cut(text)):
            raise GrammarError(_reason(matcher))
        return Grammar(self._vocabulary, matcher)


class GrammarState:
    """Where one generation stands."""

    def __init__(self, matcher: LLMatcher, size: int) -> None:
        self._matcher, self._size = matcher, size

    def allowed(self) -> np.ndarray:
        """Bool [vocabulary]: the tokens that may come next."""
        bits = np.frombuffer(cast(bytes, self._matcher.compute_bitmask()), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._size].astype(bool)

    def push(self, token: int) -> None:
        """Take the token that was sampled."""
        self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """The text is whole and nothing can follow it."""
        return self._matcher.is_stopped() and not self.failed

    @property
    def failed(self) -> bool:
        """The grammar proved too complex to follow further: the text ends here, half done."""
        return self._matcher.is_stopped() and self._matcher.stop_reason() not in _COMPLETE


def _reason(matcher: LLMatcher) -> str:
    """llguidance's words in one line."""
    words = matcher.get_error().partition("\n<state>")[0].replace("<non-verbose/>", "").split()
    return " ".join(words)[:500]
