"""`POST /v1/chat/completions` (DESIGN A1-A7): from a body to a request, and from outputs to an answer or a stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.chat.cache_field import parse_cache_field
from akv_jax.chat.lowering import PreparedChat, prepare_chat
from akv_jax.chat.messages import parse_messages, parse_tools
from akv_jax.request import Request
from serving.bodies import read_object
from serving.chat_objects import ChatAnswer
from serving.generation import collect, generate, unless_disconnected
from serving.responses import answer
from serving.schemas import ChatBody, TokenizeBody, validate
from serving.sse import event_stream
from serving.state import Server, server_of

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest) -> Response:
    """OpenAI's chat completions, with the `cache` field and its synonyms. Streams if `stream` is true."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    # Long conversations take a while to tokenise; others must not wait for that.
    body, prepared, request = await asyncio.to_thread(_read, server, data)
    server.log_unknown(body.model_extra or ())
    reply = ChatAnswer(request.request_id, server.model_name, server.require_engine().model.tokenizer, body, prepared)
    if body.stream:
        return await event_stream(server, http, _chunks(server, request, reply))
    completion = await unless_disconnected(http, collect(server, request))
    return answer(reply.completion(completion))


def _read(server: Server, data: dict[str, Any]) -> tuple[ChatBody, PreparedChat, Request]:
    """Body, prompt and request. Raises RequestError for everything that is wrong with the body."""
    body = validate(ChatBody, data)
    sampling = body.sampling(server.require_engine().model.config.vocab_size)
    prepared = prepare(server, body)
    request = Request(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        operations=prepared.operations,
        sampling=sampling,
        cache_salt=body.cache_salt,
    )
    return body, prepared, request


def prepare(server: Server, body: ChatBody | TokenizeBody) -> PreparedChat:
    """Messages, tools and `cache` field to tokens and operations. Raises RequestError."""
    vocab_size = server.require_engine().model.config.vocab_size
    messages = parse_messages(body.messages, vocab_size=vocab_size)
    return prepare_chat(
        server.require_chat(),
        messages,
        parse_cache_field(body.cache_fields(), messages),
        parse_tools(body.tools),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


async def _chunks(server: Server, request: Request, reply: ChatAnswer) -> AsyncGenerator[dict[str, Any], None]:
    """The role with the first output, text as it comes, the finish reason, then (if asked for) the usage."""
    begun = False
    async with aclosing(generate(server, request)) as outputs:
        async for output in outputs:
            if not begun:
                yield reply.first_chunk()
                begun = True
            if reply.has_content(output):
                yield reply.content_chunk(output)
            if output.usage is not None:
                for chunk in reply.last_chunks(output):
                    yield chunk
