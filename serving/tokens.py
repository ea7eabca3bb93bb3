"""`POST /tokenize` and `POST /detokenize` (DESIGN A8)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.chat.cache_field import parse_cache_field
from akv_jax.errors import invalid
from serving.bodies import read_object
from serving.chat import prepare, read_prompt
from serving.generation import unless_disconnected
from serving.request_log import Notes, notes_of
from serving.responses import answer
from serving.schemas import DetokenizeBody, TokenizeBody, check_token_ids, refuse_cache, validate
from serving.state import Server, server_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
async def tokenize(http: HttpRequest) -> Response:
    """`prompt`, or `messages` as a chat request would render them, to `tokens` and their `count`."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    tokens = await unless_disconnected(http, asyncio.to_thread(_tokenise, server, notes_of(http), data))
    longest = server.require_engine().config.context_length
    return answer({"tokens": tokens, "count": len(tokens), "max_model_len": longest})


def _tokenise(server: Server, notes: Notes, data: dict[str, Any]) -> Sequence[int]:
    """Raises RequestError, also for text that no request could have, as a request with it would."""
    engine = server.require_engine()
    body = validate(TokenizeBody, data)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("expected either prompt or messages", "prompt")
    if body.prompt is None:
        cache = parse_cache_field(data)
        messages, tools = read_prompt(server, body)
        server.note_unknown(notes, body)
        return prepare(server, body, messages, tools, cache).token_ids
    refuse_cache(body)
    server.note_unknown(notes, body)
    server.refuse_hopeless("prompt", len(body.prompt))
    return engine.model.tokenizer.encode(body.prompt)


@router.post("/detokenize")
async def detokenize(http: HttpRequest) -> Response:
    """`tokens` to `prompt`: all of them, special tokens spelled out."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    text = await unless_disconnected(http, asyncio.to_thread(_detokenise, server, notes_of(http), data))
    return answer({"prompt": text})


def _detokenise(server: Server, notes: Notes, data: dict[str, Any]) -> str:
    """Raises RequestError."""
    model = server.require_engine().model
    body = validate(DetokenizeBody, data)
    server.note_unknown(notes, body)
    return model.tokenizer.decode(check_token_ids(body.tokens, model.config.vocab_size, "tokens"))
