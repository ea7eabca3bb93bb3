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

from akv_jax.chat.cache_field import CacheField, parse_cache_field
from akv_jax.chat.lowering import PreparedChat, prepare_chat
from akv_jax.chat.messages import Message, Tool, parse_messages, parse_tools
from akv_jax.chat.reply import ReplyStream
from akv_jax.chat.tool_choice import parse_tool_choice
from akv_jax.request import Request
from serving.bodies import read_object
from serving.chat_objects import ChatAnswer
from serving.constraints import compile_grammar, needs_grammar
from serving.generation import collect, generate, unless_disconnected
from serving.request_log import Notes, notes_of
from serving.responses import answer
from serving.schemas import ChatBody, PromptBody, validate
from serving.sse import event_stream
from serving.state import Server, server_of

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions")
async def chat_completions(http: HttpRequest) -> Response:
    """OpenAI's chat completions, with the `cache` field and its synonyms. Streams if `stream` is true."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    arrived, notes = server.clock(), notes_of(http)
    # Long conversations take a while to tokenise, and grammars to compile; others must not wait for that.
    reading = asyncio.to_thread(_read, server, notes, data)
    body, request, reply = await unless_disconnected(http, reading)
    if body.stream:
        return await event_stream(server, http, _chunks(server, notes, request, arrived, reply))
    completion = await unless_disconnected(http, collect(server, notes, request, arrived))
    return answer(reply.completion(completion))


def _read(server: Server, notes: Notes, data: dict[str, Any]) -> tuple[ChatBody, Request, ChatAnswer]:
    """Body, request and the answer to be. Raises RequestError for everything that is wrong with the body."""
    model = server.require_engine().model
    # Of several things that are wrong, the cache field's are told first: an agent can mend those.
    cache = parse_cache_field(data)
    body = validate(ChatBody, data)
    sampling = body.sampling(model.config.vocab_size)
    messages, tools = read_prompt(server, body)
    choice = parse_tool_choice(body.tool_choice, tools)
    server.note_unknown(notes, body)
    prepared = prepare(server, body, messages, tools, cache)
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


def prepare(
    server: Server, body: PromptBody, messages: Sequence[Message], tools: Sequence[Tool], cache: CacheField
) -> PreparedChat:
    """Messages, tools and `cache` field to tokens and operations. Raises RequestError."""
    _refuse_hopeless(server, messages, tools, cache)
    return prepare_chat(
        server.require_chat(),
        messages,
        cache,
        tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )


def _refuse_hopeless(server: Server, messages: Sequence[Message], tools: Sequence[Tool], cache: CacheField) -> None:
    """Whatever is appended between two repositions needs positions of its own, dropped or not (DESIGN A7)."""
    characters, tokens = sum(len(tool.declaration) for tool in tools), 0
    server.refuse_hopeless("tools", characters)
    repositions = set(cache.reposition)
    for k, message in enumerate(messages):
        if message.token_ids is None:
            calls = sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
            characters += len(message.reasoning) + len(message.content) + calls
        else:
            tokens += len(message.token_ids)
        server.refuse_hopeless("messages", characters, tokens)
        if k in repositions:
            characters = tokens = 0


async def _chunks(
    server: Server, notes: Notes, request: Request, arrived: float, reply: ChatAnswer
) -> AsyncGenerator[dict[str, Any], None]:
    """The role with the first output, the reply as it comes, the finish reason, then (if asked for) the usage."""
    begun = False
    async with aclosing(generate(server, notes, request, arrived)) as outputs:
        async for output in outputs:
            if not begun:
                yield reply.first_chunk()
                begun = True
            for chunk in reply.chunks(output):
                yield chunk
