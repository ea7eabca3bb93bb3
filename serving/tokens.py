"""`POST /tokenize` and `POST /detokenize` (DESIGN A8)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.errors import invalid
from serving.bodies import read_object
from serving.chat import prepare, read_prompt
from serving.responses import answer
from serving.schemas import DetokenizeBody, TokenizeBody, check_token_ids, validate
from serving.state import Server, server_of

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
async def tokenize(http: HttpRequest) -> Response:
    """`prompt`, or `messages` as a chat request would render them, to `tokens` and their `count`."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    engine = server.require_engine()
    body = validate(TokenizeBody, data)
    server.log_unknown(body.model_extra or ())
    if (body.prompt is None) == (body.messages is None):
        raise invalid("expected either prompt or messages", "prompt")
    if body.prompt is not None:
        tokens = await asyncio.to_thread(engine.model.tokenizer.encode, body.prompt)
    else:
        tokens = await asyncio.to_thread(_tokenise_messages, server, body)
    return answer({"tokens": tokens, "count": len(tokens), "max_model_len": engine.config.context_length})


def _tokenise_messages(server: Server, body: TokenizeBody) -> Sequence[int]:
    return prepare(server, body, *read_prompt(server, body)).token_ids


@router.post("/detokenize")
async def detokenize(http: HttpRequest) -> Response:
    """`tokens` to `prompt`: all of them, special tokens spelled out."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    model = server.require_engine().model
    body = validate(DetokenizeBody, data)
    server.log_unknown(body.model_extra or ())
    return answer({"prompt": model.tokenizer.decode(check_token_ids(body.tokens, model.config.vocab_size, "tokens"))})
