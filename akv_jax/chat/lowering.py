"""From a chat request to the operations of the language (DESIGN A1-A3, A5).

A conversation is appended message by message. After message k comes boundary k: what the `cache` field drops there,
then its reposition. The generation prompt comes after the last boundary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from akv_jax.chat.cache_field import CacheField, DropEntry
from akv_jax.chat.choose_template import ChatFormat
from akv_jax.chat.messages import Message, Tool
from akv_jax.chat.tokenise import Span, TokenisedChat
from akv_jax.errors import Reason, RequestError, invalid
from spec.operations import Append, Drop, Operation, Reposition


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat request in the engine's language."""

    #: Drops hold only what they newly deactivate, and are left out where that is nothing (L5).
    operations: tuple[Operation, ...]
    #: Every token of the prompt, dropped or not; a token's place here is its logical index.
    token_ids: tuple[int, ...]
    #: [start, end) of each message; with the generation span they tile the prompt (A5).
    message_spans: tuple[Span, ...]
    #: Empty if the last message is continued.
    generation_span: Span
    report_active: bool
    #: Tokens of the continued message's parts (reasoning, content, tool calls): how the reply has begun.
    begun: tuple[int, ...] = ()


def prepare_chat(
    chat: ChatFormat,
    messages: Sequence[Message],
    cache: CacheField,
    tools: Sequence[Tool] = (),
    *,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
) -> PreparedChat:
    """Render, tokenise and lower one request.

    `add_generation_prompt` None means: unless the last message is continued. The boundary of a continued message is
    inert, as is every boundary of a message that is still to come (A3).

    Raises INVALID_CACHE for token ranges outside their messages, INVALID_REQUEST for what the template cannot show.
    """
    if continue_final_message:
        if add_generation_prompt:
            message = "expected false with continue_final_message: the last message goes on, no new one begins"
            raise invalid(message, "add_generation_prompt")
        if messages[-1].role != "assistant":
            message = f"expected a last message of role assistant to continue, found {messages[-1].role}"
            raise invalid(message, "continue_final_message")
    tokenised = chat.tokenise(
        messages,
        tools,
        generation_prompt=not continue_final_message if add_generation_prompt is None else add_generation_prompt,
        continue_final=continue_final_message,
    )
    boundaries = len(messages) - 1 if continue_final_message else len(messages)
    return PreparedChat(
        operations=lower(tokenised, cache.for_messages(messages), boundaries),
        token_ids=tokenised.token_ids,
        message_spans=tokenised.message_spans,
        generation_span=tokenised.generation_span,
        report_active=cache.report_active,
        begun=_begun(tokenised) if continue_final_message else (),
    )


def _begun(tokenised: TokenisedChat) -> tuple[int, ...]:
    """The last message without its header."""
    spans = sorted(chain.from_iterable(tokenised.part_spans[-1].values()))
    return tuple(chain.from_iterable(tokenised.token_ids[start:end] for start, end in spans))


def lower(tokenised: TokenisedChat, cache: CacheField, boundaries: int) -> tuple[Operation, ...]:
    """The operations of a tokenised conversation, of whose messages the first `boundaries` have ended.

    Raises INVALID_CACHE for a token range outside its message.
    """
    operations: list[Operation] = []
    ids = tokenised.token_ids
    active = np.ones(len(ids), np.bool_)
    appended = 0
    repositions = set(cache.reposition)
    for k in sorted(k for k in repositions.union(cache.drop) if k < boundaries):
        end = tokenised.message_spans[k][1]
        dropped = _deactivate(active, _union(resolve(entry, tokenised) for entry in _unique(cache.drop.get(k, ()))))
        if not dropped and k not in repositions:
            continue
        if end > appended:
            operations.append(Append(ids[appended:end]))
            appended = end
        if dropped:
            operations.append(Drop(dropped))
        if k in repositions:
            operations.append(Reposition())
    if appended < len(ids):
        operations.append(Append(ids[appended:]))
    return tuple(operations)


def resolve(entry: DropEntry, tokenised: TokenisedChat) -> tuple[Span, ...]:
    """The logical indices that an entry names, as spans. Raises INVALID_CACHE."""
    if entry.part is not None:
        return tokenised.part_spans[entry.message].get(entry.part, ())
    first, last = tokenised.message_spans[entry.message]
    if entry.tokens is None:
        return ((first, last),)
    length = last - first
    start, end = entry.tokens
    start = _from_start(start, length, entry, 0)
    end = length if end is None else _from_start(end, length, entry, 1)
    if start > end:
        found = f"[{entry.tokens[0]}, {entry.tokens[1]}) of {length} tokens"
        raise _out_of_bounds(f"expected start at or before end, found {found}", f"{entry.param}.tokens")
    return ((first + start, first + end),)


def _from_start(index: int, length: int, entry: DropEntry, side: int) -> int:
    if not -length <= index <= length:
        message = f"expected from {-length} to {length}, as message {entry.message} has {length} tokens, found {index}"
        raise _out_of_bounds(message, f"{entry.param}.tokens[{side}]")
    return index + length if index < 0 else index


def _out_of_bounds(message: str, param: str) -> RequestError:
    return RequestError(Reason.INVALID_CACHE, message, param)


def _unique(entries: Sequence[DropEntry]) -> list[DropEntry]:
    """Entries that name something new: an index twice is once (A10)."""
    return list({(e.message, e.part, e.tokens): e for e in reversed(entries)}.values())[::-1]


def _union(spans: Iterable[tuple[Span, ...]]) -> list[Span]:
    """Overlapping and touching spans united, in order (A3)."""
    united: list[Span] = []
    for start, end in sorted(chain.from_iterable(spans)):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def _deactivate(active: np.ndarray, spans: Sequence[Span]) -> frozenset[int]:
    """Clear the spans in `active` (bool [tokens], changed in place); returns the indices that were still set."""
    dropped: list[int] = []
    for start, end in spans:
        dropped += (np.flatnonzero(active[start:end]) + start).tolist()
        active[start:end] = False
    return frozenset(dropped)
