"""`POST /v1/chat/completions` (DESIGN A1-A7): from a body to a request, and from outputs to an answer or a stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.chat.cache_field import parse_cache_field
from akv_jax.chat.lowering import PreparedChat, prepare_chat
from akv_jax.chat.messages import Message, Tool, parse_messages, parse_tools
from akv_jax.chat.reply import ReplyStream
from akv_jax.chat.tool_choice import parse_tool_choice
from akv_jax.request import Request
from serving.bodies import read_object
from serving.chat_objects import ChatAnswer
from serving.constraints import compile_grammar, needs_grammar
from serving.generation import collect, generate, unless_disconnected
from serving.responses import answer
from serving.schemas import CACHE_FIELDS, ChatBody, PromptBody, validate
from serving.sse import event_stream
from serving.state import Server, server_of

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest) -> Response:
    """OpenAI's chat completions, with the `cache` field and its synonyms. Streams if `stream` is true."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    arrived = server.clock()
    # Long conversations take a while to tokenise, and grammars to compile; others must not wait for that.
    body, request, reply = await asyncio.to_thread(_read, server, data)
    server.log_unknown(body.model_extra or ())
    if body.stream:
        return await event_stream(server, http, _chunks(server, request, arrived, reply))
    completion = await unless_disconnected(http, collect(server, request, arrived))
    return answer(reply.completion(completion))


def _read(server: Server, data: dict[str, Any]) -> tuple[ChatBody, Request, ChatAnswer]:
    """Body, request and the answer to be. Raises RequestError for everything that is wrong with the body."""
    model = server.require_engine().model
    # Of several things that are wrong, the cache field's are told first: an agent can mend those.
    parse_cache_field({name: data.get(name) for name in CACHE_FIELDS}, ())
    body = validate(ChatBody, data)
    sampling = body.sampling(model.config.vocab_size)
    messages, tools = read_prompt(server, body)
    choice = parse_tool_choice(body.tool_choice, tools)
    prepared = prepare(server, body, messages, tools)
    begun = model.tokenizer.decode(prepared.begun)
    if needs_grammar(body, tools, choice):
        grammar = compile_grammar(server.require_vocabulary(), body, tools, choice, begun)
        sampling = replace(sampling, grammar=grammar)
    request = Request(
        request_id=f"chatcmpl-{uuid.uuid4().hex}",
        operations=prepared.operations,
        sampling=sampling,
        cache_salt=body.cache_salt,
    )
    # What a template cannot show when it is sent back stays text.
    reading = not server.require_chat().template.plain
    reply = ReplyStream(reasoning=reading, tools=reading and choice.mode != "none", begun=begun)
    return body, request, ChatAnswer(request.request_id, server.model_name, model.tokenizer, body, prepared, reply)


def read_prompt(server: Server, body: PromptBody) -> tuple[Sequence[Message], Sequence[Tool]]:
    """Messages and tools. Raises RequestError."""
    vocab_size = server.require_engine().model.config.vocab_size
    return parse_messages(body.messages, vocab_size=vocab_size), parse_tools(body.tools)


def prepare(server: Server, body: PromptBody, messages: Sequence[Message], tools: Sequence[Tool]) -> PreparedChat:
    """Messages, tools and `cache` field to tokens and operations. Raises RequestError."""
    server.refuse_hopeless((message.content for message in messages), "messages")
    return prepare_chat(
        server.require_chat(),
        messages,
        parse_cache_field(body.cache_fields(), messages),
        tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


async def _chunks(
    server: Server, request: Request, arrived: float, reply: ChatAnswer
) -> AsyncGenerator[dict[str, Any], None]:
    """The role with the first output, the reply as it comes, the finish reason, then (if asked for) the usage."""
    begun = False
    async with aclosing(generate(server, request, arrived)) as outputs:
        async for output in outputs:
            if not begun:
                yield reply.first_chunk()
                begun = True
            for chunk in reply.chunks(output):
                yield chunk
