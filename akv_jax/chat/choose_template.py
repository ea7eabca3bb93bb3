"""Which chat template a model is served with: tried out on sample conversations at start-up (DESIGN A5).

A template of ours for the model's family comes first, for it has tools and keeps reasoning, if it says the same as the
model's stock template wherever both apply: plain text of every role. Else the stock template itself, for plain text,
if it is append-only. Else there is no serving chats with this model, and the error says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from akv_jax.chat.messages import Message, Tool
from akv_jax.chat.template import ChatTemplate, EndTokens, FamilyTemplate, PlainTemplate, render
from akv_jax.chat.tokenise import Encoder, TokenisedChat, Tokenizer, tokenise
from akv_jax.errors import RequestError

_SYSTEM = Message("system", "You mend clocks.\nBe brief.")
_USER = Message("user", "Why does it  stop at 12:30?")
_REPLY = Message("assistant", "The mainspring slips — see §3 🕰️.")
_RESULT = Message("tool", '{"parts": [1, 2],\n "ok": true}')

#: Conversations of plain text that any template must take, and some that templates may refuse.
USUAL: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER, _REPLY, _USER),
    (_USER, _REPLY, _USER, _REPLY),
)
UNUSUAL: tuple[tuple[Message, ...], ...] = (
    (_SYSTEM, _USER, _REPLY, _RESULT, _REPLY, _USER),
    (_SYSTEM, _USER, _USER, _REPLY, _REPLY),
    (_SYSTEM,),
    (_REPLY, _USER),
    (_USER, _SYSTEM, _USER),
)


class TemplateError(ValueError):
    """No chat template that this model can be served with; the message is for the person who started the server."""


@dataclass(frozen=True)
class ChatFormat:
    """How one model's conversations become tokens; immutable but for what its encoder remembers."""

    template: ChatTemplate
    tokenizer: Tokenizer
    end_tokens: EndTokens
    encoder: Encoder
    #: Every message opens with a special token (see `tokenise.py`).
    by_message: bool

    def tokenise(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        generation_prompt: bool = True,
        continue_final: bool = False,
    ) -> TokenisedChat:
        """Render and tokenise a conversation. Raises INVALID_REQUEST where the template refuses it."""
        pieces = self.template.pieces(
            messages, tools, generation_prompt=generation_prompt, continue_final=continue_final
        )
        return tokenise(pieces, messages, self.encoder, self.tokenizer, self.end_tokens, by_message=self.by_message)


def chat_format(
    tokenizer: Tokenizer,
    chat_template: str | None,
    *,
    bos_token: str = "",
    eos_token: str = "",
    eos_token_ids: Sequence[int] = (),
) -> ChatFormat:
    """Choose and try out the template of a model. `chat_template` is its own jinja source, if it has one.

    Raises TemplateError if no append-only template is to be had.
    """
    ends = EndTokens({token: tokenizer.token_bytes(token).decode("utf-8", "replace") for token in eos_token_ids})
    stock = _compile_stock(chat_template, ends, bos_token, eos_token)
    problems: list[str] = []
    for candidate in (_chatml(tokenizer, stock, ends, problems), stock):
        if candidate is None:
            continue
        whole = ChatFormat(candidate, tokenizer, ends, Encoder(tokenizer, memory_tokens=0), by_message=False)
        problem = find_problem(whole)
        if problem is None:
            by_message = ChatFormat(candidate, tokenizer, ends, Encoder(tokenizer), by_message=True)
            return by_message if _same_tokens(whole, by_message) else whole
        problems.append(f"the {candidate.name} template {problem}")
    raise TemplateError("this model cannot serve chats: " + "; ".join(problems or ["it has no chat template"]))


def _compile_stock(source: str | None, ends: EndTokens, bos_token: str, eos_token: str) -> PlainTemplate | None:
    if source is None:
        return None
    try:
        return PlainTemplate(source, ends, bos_token=bos_token, eos_token=eos_token)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the model's chat template is not valid jinja: {error} (line {error.lineno})") from error


def _chatml(
    tokenizer: Tokenizer, stock: PlainTemplate | None, ends: EndTokens, problems: list[str]
) -> FamilyTemplate | None:
    """ChatML the model's own way, if its vocabulary has the tokens and its stock template agrees."""
    if not all(_is_one_special(tokenizer, token) for token in ("<|im_start|>", "<|im_end|>")):
        return None
    if stock is None:
        return FamilyTemplate("chatml", ends)
    opening = _try_render(stock, (_USER,)) or ""
    bos = opening.partition("<|im_start|>")[0]
    default = re.match(r"<\|im_start\|>system\n(.*?)<\|im_end\|>\n", opening.removeprefix(bos), re.DOTALL)
    with_result = _try_render(stock, UNUSUAL[0]) or ""
    template = FamilyTemplate(
        "chatml",
        ends,
        bos=bos,
        default_system=default[1] if default else None,
        tool_response_as_user="<tool_response>" in with_result,
    )
    difference = find_difference(template, stock)
    if difference is not None:
        problems.append(difference)
        return None
    return template


def _is_one_special(tokenizer: Tokenizer, text: str) -> bool:
    ids, _ = tokenizer.encode_with_offsets(text)
    return len(ids) == 1 and tokenizer.is_special(ids[0])


def _try_render(stock: PlainTemplate, messages: Sequence[Message], generation_prompt: bool = False) -> str | None:
    try:
        return stock.render(messages, generation_prompt=generation_prompt)
    except RequestError:
        return None


def find_difference(template: ChatTemplate, stock: PlainTemplate) -> str | None:
    """Where a template of ours and the stock one disagree on a prompt that the stock one takes; None if nowhere.

    Only prompts for a reply are compared: what a stock template makes of a final assistant message (Qwen3 puts empty
    reasoning into it) is its own affair. A stock template that takes no usual prompt at all agrees with nothing.
    """
    agreed = 0
    for messages in USUAL + UNUSUAL:
        theirs = _try_render(stock, messages, generation_prompt=True)
        if theirs is None or messages[-1].role == "assistant":
            continue
        ours = render(template, messages, generation_prompt=True)
        if ours != theirs:
            return f"the model's own template has {theirs[:200]!r} where {template.name} has {ours[:200]!r}"
        agreed += messages in USUAL
    return None if agreed else f"the model's own template takes nothing to compare {template.name} with"


def find_problem(chat: ChatFormat) -> str | None:
    """Why a template is of no use, or None: it must take usual conversations, show every text, and be append-only, in
    characters and in tokens, generation prompt and sampled ids included."""
    for messages in USUAL + UNUSUAL:
        try:
            steps = [chat.tokenise(messages[:k], generation_prompt=False) for k in range(1, len(messages) + 1)]
            asked = [chat.tokenise(messages[:k]) for k in range(1, len(messages) + 1)]
        except RequestError as error:
            if messages in USUAL:
                return f"refuses an ordinary conversation: {error.message}"
            continue
        for k, step in enumerate(steps):
            following = steps[min(k + 1, len(steps) - 1)].token_ids
            if following[: len(step.token_ids)] != step.token_ids:
                return f"is not append-only: message {k + 1} changes the tokens before it"
            if asked[k].token_ids[: len(step.token_ids)] != step.token_ids:
                return "is not append-only: the generation prompt changes the tokens before it"
            if not step.part_spans[k].get("content"):
                return f"does not show the text of a message of role {messages[k].role}"
        problem = _sampled_problem(chat, messages)
        if problem is not None:
            return problem
    return None


def _sampled_problem(chat: ChatFormat, messages: Sequence[Message]) -> str | None:
    """Whether a prompt and the sampled ids are a prefix of the prompt that has them as a message (A4)."""
    ends = chat.end_tokens.texts
    ids, _ = chat.tokenizer.encode_with_offsets(" A reply")
    sampled = (*ids, *list(ends)[:1])
    prompt = chat.tokenise(messages).token_ids
    try:
        longer = chat.tokenise((*messages, Message("assistant", token_ids=sampled))).token_ids
    except RequestError:
        return None
    if longer[: len(prompt) + len(sampled)] != prompt + sampled:
        return "has a generation prompt that is not the header of an assistant message"
    return None


def _same_tokens(whole: ChatFormat, by_message: ChatFormat) -> bool:
    """Whether messages tokenised one by one give what the whole prompt gives, white space at their ends included."""
    spaced = tuple(Message(role, f" \n{role} \n\n ") for role in ("system", "user", "assistant", "user", "assistant"))
    for messages in (*USUAL, *UNUSUAL, spaced):
        try:
            if whole.tokenise(messages) != by_message.tokenise(messages):
                return False
        except RequestError:
            continue
    return True
