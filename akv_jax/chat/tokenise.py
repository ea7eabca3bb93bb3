"""From the pieces of a prompt to tokens, each owned by one message (DESIGN A4, A5).

A token belongs to the piece in which its first character stands. Prompts grow turn by turn and come back whole, so
the tokens of a message are remembered, which changes nothing but the time. This is done only where every message opens
with a special token: tokenisers cut there before anything else, so that messages tokenised one by one give what the
whole prompt gives (`choose_template.py` tries that out).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np

from akv_jax.chat.cache_field import Part
from akv_jax.chat.messages import Message
from akv_jax.chat.template import EndTokens, Piece

Span = tuple[int, int]
"""Half-open [start, end) over the tokens of a prompt."""


class Tokenizer(Protocol):
    """What this package needs of a tokenizer (`tokenizer.py` is the real one)."""

    def encode_with_offsets(self, text: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


@dataclass(frozen=True, slots=True)
class TokenisedChat:
    """A prompt in tokens. The message spans and, last, the generation span tile it."""

    token_ids: tuple[int, ...]
    message_spans: tuple[Span, ...]
    generation_span: Span
    #: For each message, the spans of its parts, delimiters included (A2). An absent part has none.
    part_spans: tuple[Mapping[Part, tuple[Span, ...]], ...]


class Encoder:
    """Tokenises text, and remembers what it did, up to a number of tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, *, memory_tokens: int = 1 << 20) -> None:
        self._tokenizer = tokenizer
        self._memory_tokens = memory_tokens
        self._memory: OrderedDict[str, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """(ids, first characters), both int32 [tokens]."""
        with self._lock:
            found = self._memory.get(text)
            if found is not None:
                self._memory.move_to_end(text)
                return found
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        starts = np.fromiter((start for start, _ in offsets), np.int32, len(offsets))
        encoded = np.asarray(ids, np.int32), starts
        with self._lock:
            if text not in self._memory:
                self._memory[text] = encoded
                self._held += len(starts)
            while self._held > self._memory_tokens and self._memory:
                _, (_, oldest) = self._memory.popitem(last=False)
                self._held -= len(oldest)
        return encoded


@dataclass(frozen=True, slots=True)
class _Run:
    """Pieces with the tokens at which they start (from the start of the run), and the run's ids."""

    pieces: Sequence[Piece]
    bounds: Sequence[int]
    ids: Sequence[int]


def tokenise(
    pieces: Iterable[Piece],
    messages: Sequence[Message],
    encoder: Encoder,
    tokenizer: Tokenizer,
    end_tokens: EndTokens,
    *,
    by_message: bool,
) -> TokenisedChat:
    """Tokenise a prompt once. `by_message`: every message opens with a special token, see above."""
    ids: list[int] = []
    starts: list[int | None] = [None] * len(messages)
    parts: list[dict[Part, tuple[Span, ...]]] = [{} for _ in messages]
    generation_start: int | None = None
    for run in _runs(pieces, messages, encoder, tokenizer, end_tokens, by_message):
        for piece, (start, end) in zip(run.pieces, pairwise(run.bounds), strict=True):
            first, last = len(ids) + start, len(ids) + end
            if piece.message is None:
                generation_start = first if generation_start is None else generation_start
                continue
            if starts[piece.message] is None:
                starts[piece.message] = first
            if piece.part is not None and last > first:
                spans = parts[piece.message]
                spans[piece.part] = (*spans.get(piece.part, ()), (first, last))
        ids.extend(run.ids)
    ends = [len(ids) if generation_start is None else generation_start]
    bounds = [start if start is not None else ends[0] for start in starts] + ends
    return TokenisedChat(tuple(ids), tuple(pairwise(bounds)), (ends[0], len(ids)), tuple(parts))


def _runs(
    pieces: Iterable[Piece],
    messages: Sequence[Message],
    encoder: Encoder,
    tokenizer: Tokenizer,
    end_tokens: EndTokens,
    by_message: bool,
) -> Iterator[_Run]:
    """Cut where sampled ids stand and, `by_message`, between messages; tokenise what is text."""
    filled = (piece for piece in pieces if piece.text or piece.ids is not None)
    for (_, is_text), group in groupby(filled, key=lambda p: (p.message if by_message else 0, p.ids is None)):
        run = list(group)
        if is_text:
            ids, firsts = encoder("".join(piece.text for piece in run))
            edges = np.cumsum([len(piece.text) for piece in run[:-1]], dtype=np.int64)
            inner = np.searchsorted(firsts, edges, side="left").tolist()
            yield _Run(run, [0, *inner, len(ids)], ids.tolist())
        else:
            for piece in run:
                assert piece.message is not None and piece.ids is not None
                split = list(_split_sampled(piece.message, piece.ids, messages[piece.message], tokenizer, end_tokens))
                bounds = np.cumsum([0] + [len(p.ids or ()) for p in split]).tolist()
                yield _Run(split, bounds, piece.ids)


def _split_sampled(
    k: int, ids: tuple[int, ...], message: Message, tokenizer: Tokenizer, end_tokens: EndTokens
) -> Iterator[Piece]:
    """The parts of a body sent as ids, at the marks that the model wrote. As for text, a message has a reasoning part
    if it has reasoning, and a tool_calls part if it has tool calls; the rest is content, the end token is no part's."""
    body = ids[:-1] if end_tokens.end_sampled(ids) else ids
    sizes = [len(tokenizer.token_bytes(token)) for token in body]
    starts = np.cumsum([0, *sizes])
    text = b"".join(tokenizer.token_bytes(token) for token in body)
    reasoning_end, calls_start = 0, len(text)
    if message.reasoning and (close := text.find(b"</think>")) >= 0:
        reasoning_end = close + len(b"</think>")
        while reasoning_end < min(len(text), close + len(b"</think>\n\n")) and text[reasoning_end] == ord("\n"):
            reasoning_end += 1
    if message.tool_calls and (opened := text.find(b"<tool_call>", reasoning_end)) >= 0:
        calls_start = opened - 1 if opened > reasoning_end and text[opened - 1] == ord("\n") else opened
    a, b = np.searchsorted(starts[:-1], [reasoning_end, calls_start], side="left").tolist()
    yield Piece(k, "reasoning", ids=body[:a])
    yield Piece(k, "content", ids=body[a:b])
    yield Piece(k, "tool_calls", ids=body[b:])
    yield Piece(k, None, ids=ids[len(body) :])
