"""`POST /v1/completions` (DESIGN A8): a prompt of text or token ids, continued."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.chat.messages import describe
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.errors import invalid
from akv_jax.request import Output, Request, TokenLogprob
from serving.bodies import read_object
from serving.generation import collect, generate, unless_disconnected
from serving.request_log import Notes, notes_of
from serving.responses import LOWEST_LOGPROB, answer, cache_object, usage_object
from serving.schemas import CompletionBody, check_token_ids, validate
from serving.sse import event_stream
from serving.state import Server, server_of
from spec.operations import Append

router = APIRouter(tags=["generation"])


@router.post("/v1/completions")
async def completions(http: HttpRequest) -> Response:
    """OpenAI's older text completion. Streams if `stream` is true."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    arrived, notes = server.clock(), notes_of(http)
    reading = asyncio.to_thread(_read, server, notes, data)
    body, request, reply = await unless_disconnected(http, reading)
    if body.stream:
        return await event_stream(server, http, _chunks(server, notes, request, arrived, reply))
    completion = await unless_disconnected(http, collect(server, notes, request, arrived))
    return answer(
        reply.object(
            completion.text,
            completion.token_ids,
            completion.logprobs,
            completion.finish_reason,
        )
        | {"usage": usage_object(completion.usage), "cache": cache_object(completion.usage)}
    )


def _read(server: Server, notes: Notes, data: dict[str, Any]) -> tuple[CompletionBody, Request, CompletionAnswer]:
    model = server.require_engine().model
    body = validate(CompletionBody, data)
    server.note_unknown(notes, body)
    sampling = body.sampling(model.config.vocab_size)
    prompt = parse_prompt(server, body.prompt)
    request = Request(f"cmpl-{uuid.uuid4().hex}", (Append(prompt),), sampling, body.cache_salt)
    return body, request, CompletionAnswer(request.request_id, server.model_name, model.tokenizer, body, prompt)


def parse_prompt(server: Server, value: Any) -> tuple[int, ...]:
    """A text, a list of token ids, or a list with one of these, as token ids. Nothing is added to a text.

    Raises RequestError.
    """
    param = "prompt"
    if isinstance(value, list) and value and isinstance(value[0], list | str):
        if len(value) > 1:
            raise invalid(f"expected one prompt a request, found {len(value)}", param)
        value, param = value[0], "prompt[0]"
    model = server.require_engine().model
    if isinstance(value, list):
        ids = check_token_ids(value, model.config.vocab_size, param)
    elif isinstance(value, str):
        server.refuse_hopeless(param, len(value))
        ids = tuple(model.tokenizer.encode(value))
    else:
        raise invalid(
            f"expected a text, a list of token ids or a list with one of these, found {describe(value)}", param
        )
    if not ids:
        raise invalid("expected at least one token to continue, found none", param)
    return ids


@dataclass(slots=True)
class CompletionAnswer:
    """The answer to one request, whole or in chunks."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    body: CompletionBody
    prompt: Sequence[int]
    created: int = field(default_factory=lambda: int(time.time()))
    #: Characters of all tokens so far, for `text_offset`.
    _offset: int = 0
    _first: bool = True

    def object(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """The answer, or a chunk of it, without usage."""
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        envelope: dict[str, Any] = {
            "id": self.request_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(token_ids)
            if self._first:
                envelope["prompt_token_ids"] = list(self.prompt)
        self._first = False
        return envelope

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        """What the client sees of one output; see `ChatAnswer.chunks`."""
        chunks = []
        silent = not (self.body.wants_logprobs() or self.body.return_token_ids)
        if output.text or output.usage is not None or (output.token_ids and not silent):
            chunks.append(self.object(output.text, output.token_ids, output.logprobs, output.finish_reason))
        if self.body.stream_options.include_usage:
            for chunk in chunks:
                chunk["usage"] = None
        if output.usage is not None:
            if self.body.stream_options.include_usage:
                chunks.append(self.object("") | {"choices": [], "usage": usage_object(output.usage)})
            chunks[-1]["cache"] = cache_object(output.usage)
        return chunks

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's four lists, one entry a token. `text_offset` counts characters from the start of the output."""
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self.tokenizer.token_bytes(entry.token_id).decode("utf-8", "replace"))
        wanted = self.body.logprobs
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [max(entry.logprob, LOWEST_LOGPROB) for entry in entries],
            "top_logprobs": [
                {self._name(token_id): max(logprob, LOWEST_LOGPROB) for token_id, logprob in entry.top}
                for entry in entries
            ]
            if wanted
            else None,
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        """The token's text, or, where it is no text of its own, its bytes as OpenAI spells them."""
        raw = self.tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


async def _chunks(
    server: Server, notes: Notes, request: Request, arrived: float, reply: CompletionAnswer
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(generate(server, notes, request, arrived)) as outputs:
        async for output in outputs:
            for chunk in reply.chunks(output):
                yield chunk
