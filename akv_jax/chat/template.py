"""Chat templates: from messages to text, piece by piece, each piece with its owner (DESIGN A2, A5).

Every piece of a prompt belongs to one message, the generation prompt at the end to none. A template is used only if it
is *append-only*: what a message looks like depends on nothing that comes after it. Two kinds are:

- `FamilyTemplate`: one that we ship (`templates/`), with tools, reasoning and tool calls, a macro for each part;
- `PlainTemplate`: a model's own, for text alone. A stock template has no marks where parts begin and mostly drops or
  rewrites reasoning of earlier turns, so it is not trusted with more.

`choose_template.py` tries them out and picks.

An assistant message with `token_ids` (A4) is rendered as header, the ids to the letter, and what is left of the footer:
all of it, or, where the last id is one of the model's end tokens, only what follows the end marker (ChatML: "\\n").
Prompt k ends with that same header, as its generation prompt, so prompt k and the sampled ids are a prefix of prompt
k+1, token for token.

Text of messages is data: a user who writes "<|im_end|>" gets the token of that name, as from any tokenizer that reads
the rendered prompt (retokenisation is canonical, A4). Owners are found by characters, so spans stay right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Protocol

import jinja2

from akv_jax.chat.cache_field import Part
from akv_jax.chat.environment import compile_template
from akv_jax.chat.messages import Message, Tool
from akv_jax.errors import RequestError, invalid


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of one prompt: text, or token ids taken as they are. `message` None is the generation prompt."""

    message: int | None
    part: Part | None
    text: str = ""
    ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class EndTokens:
    """The tokens that end a generation, with the text of each."""

    texts: Mapping[int, str]

    def end_sampled(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self.texts

    def after_end_marker(self, footer: str) -> str:
        """What follows the end marker in a footer; the whole footer if it has none."""
        markers = [text for text in self.texts.values() if text and footer.startswith(text)]
        return footer[len(max(markers, key=len)) :] if markers else footer


class ChatTemplate(Protocol):
    """What `lowering.py` needs of a template."""

    name: str
    #: For text alone: it takes no tools, tool calls and reasoning.
    plain: bool

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool, continue_final: bool
    ) -> Iterator[Piece]:
        """The prompt in order, message by message; empty pieces may occur. Raises INVALID_REQUEST."""
        ...


def render(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    generation_prompt: bool = False,
    continue_final: bool = False,
) -> str:
    """The prompt as one string (sampled ids left out)."""
    pieces = template.pieces(messages, tools, generation_prompt=generation_prompt, continue_final=continue_final)
    return "".join(piece.text for piece in pieces)


class FamilyTemplate:
    """A template of ours, its parts rendered one macro each: linear in the conversation."""

    plain = False

    def __init__(
        self,
        family: str,
        end_tokens: EndTokens,
        *,
        bos: str = "",
        default_system: str | None = None,
        tool_response_as_user: bool = False,
    ) -> None:
        """`family` names a file of `templates/`; the rest is what one model of the family does its own way."""
        self.name = family
        self._end_tokens = end_tokens
        self._template = compile_template(
            files("akv_jax.chat").joinpath(f"templates/{family}.jinja").read_text("utf-8")
        )
        self._settings: dict[str, Any] = {
            "bos": bos,
            "default_system": default_system,
            "tool_response_as_user": tool_response_as_user,
        }
        self._macros: Any = self._template.make_module({**self._settings, "messages": (), "tools": ()})

    def render_whole(self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool) -> str:
        """The template run as any chat template is; the pieces joined are the same text."""
        declarations = [tool.declaration for tool in tools]
        variables = {"messages": messages, "tools": declarations, "add_generation_prompt": generation_prompt}
        return self._template.render(**self._settings, **variables)

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool, continue_final: bool
    ) -> Iterator[Piece]:
        """See `ChatTemplate.pieces`."""
        macros, declarations = self._macros, [tool.declaration for tool in tools]
        yield Piece(0, None, macros.opening(messages[0], declarations))
        for k, message in enumerate(messages):
            is_open = continue_final and k == len(messages) - 1
            yield Piece(k, None, macros.header(message))
            if message.token_ids is not None:
                yield from sampled_pieces(k, message.token_ids, macros.footer(message), is_open, self._end_tokens)
                continue
            yield Piece(k, "reasoning", macros.reasoning(message))
            yield Piece(k, "content", macros.content(message))
            if k == 0 and message.role == "system":
                yield Piece(k, None, macros.declarations(declarations, message.content))
            yield Piece(k, "tool_calls", macros.tool_calls(message))
            if not is_open:
                yield Piece(k, None, macros.footer(message))
        if generation_prompt:
            yield Piece(None, None, macros.generation_prompt())


def sampled_pieces(k: int, ids: tuple[int, ...], footer: str, is_open: bool, end_tokens: EndTokens) -> Iterator[Piece]:
    """The body and footer of a message that was sent as token ids. Its parts are found after tokenisation."""
    ended = end_tokens.end_sampled(ids)
    if is_open and ended:
        raise invalid(
            "expected token_ids without the end token in a message to continue, found it at the end",
            f"messages[{k}].token_ids[{len(ids) - 1}]",
        )
    yield Piece(k, None, ids=ids)
    if not is_open:
        yield Piece(k, None, end_tokens.after_end_marker(footer) if ended else footer)


class PlainTemplate:
    """A model's own template, for conversations of plain text.

    Where a message ends is found by rendering it behind the one before it alone, which is linear in the conversation.
    If the pieces do not add up to the whole, every prefix of the conversation is rendered instead, which is quadratic
    and either proves that the template is append-only on this conversation or refuses it.
    """

    name = "stock"
    plain = True

    def __init__(self, source: str, end_tokens: EndTokens, *, bos_token: str = "", eos_token: str = "") -> None:
        """Raises jinja2.TemplateSyntaxError."""
        self._template = compile_template(source)
        self._end_tokens = end_tokens
        self._variables = {"bos_token": bos_token, "eos_token": eos_token, "tools": None}

    def render(self, messages: Sequence[Message], *, generation_prompt: bool) -> str:
        """The whole prompt, as the model's makers have it. Raises INVALID_REQUEST if the template refuses."""
        plain = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(messages=plain, add_generation_prompt=generation_prompt, **self._variables)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise invalid(f"the model's chat template refuses these messages: {error}", "messages") from error

    def pieces(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, generation_prompt: bool, continue_final: bool
    ) -> Iterator[Piece]:
        """See `ChatTemplate.pieces`. Also refuses tools, tool calls and reasoning."""
        self._refuse_parts(messages, tools)
        whole = self.render(messages, generation_prompt=False)
        texts = self._texts_by_pairs(messages, whole) or self._texts_by_prefixes(messages)
        footers: dict[str, int] = {}
        for k, (message, text) in enumerate(zip(messages, texts, strict=True)):
            if message.role not in footers:
                footers[message.role] = self._footer_size(k, message, messages)
            header, content, footer = _split(k, message, text, footers[message.role])
            is_open = continue_final and k == len(messages) - 1
            yield Piece(k, None, header)
            if message.token_ids is not None:
                yield from sampled_pieces(k, message.token_ids, footer, is_open, self._end_tokens)
                continue
            yield Piece(k, "content", content)
            if not is_open:
                yield Piece(k, None, footer)
        if generation_prompt:
            prompt = self.render(messages, generation_prompt=True)
            if not prompt.startswith(whole):
                raise invalid("the model's chat template rewrites these messages for a reply", "messages")
            yield Piece(None, None, prompt[len(whole) :])

    def _refuse_parts(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        if tools:
            raise invalid("this model's chat template is for text only: expected no tools", "tools")
        for k, message in enumerate(messages):
            for key, value in (("tool_calls", message.tool_calls), ("reasoning_content", message.reasoning)):
                if value:
                    path = f"messages[{k}].{key}"
                    raise invalid(f"this model's chat template is for text only: expected no {key}", path)

    def _texts_by_pairs(self, messages: Sequence[Message], whole: str) -> list[str] | None:
        """The text of each message, if it depends on no more than the message before it (on all, for the first two)."""
        texts, at = [], 0
        try:
            for k in range(len(messages)):
                first = k - 1 if k >= 2 else 0
                before = self.render(messages[first:k], generation_prompt=False) if k else ""
                pair = self.render(messages[first : k + 1], generation_prompt=False)
                text = pair[len(before) :]
                if not pair.startswith(before) or not whole.startswith(text, at):
                    return None
                texts.append(text)
                at += len(text)
        except RequestError:  # a template may insist on how conversations begin
            return None
        return texts if at == len(whole) else None

    def _texts_by_prefixes(self, messages: Sequence[Message]) -> list[str]:
        texts, before = [], ""
        for k in range(len(messages)):
            longer = self.render(messages[: k + 1], generation_prompt=False)
            if not longer.startswith(before):
                message = "the model's chat template rewrites earlier messages once this one follows"
                raise invalid(message, f"messages[{k}]")
            texts.append(longer[len(before) :])
            before = longer
        return texts

    def _footer_size(self, k: int, message: Message, messages: Sequence[Message]) -> int:
        """How many characters follow the content of message k, seen by rendering it with other content."""
        marker = "\ue000marker\ue000"
        marked = self.render((*messages[:k], Message(message.role, marker)), generation_prompt=False)
        if marker not in marked:
            raise invalid(f"the model's chat template does not show messages of role {message.role}", f"messages[{k}]")
        return len(marked) - marked.rindex(marker) - len(marker)


def _split(k: int, message: Message, text: str, footer_size: int) -> tuple[str, str, str]:
    """The text of one message as header, content (templates may trim it) and footer."""
    end = len(text) - footer_size
    for content in (message.content, message.content.strip()):
        start = end - len(content)
        if start >= 0 and text[start:end] == content:
            return text[:start], content, text[end:]
    raise invalid("the model's chat template rewrites the content of this message", f"messages[{k}].content")
