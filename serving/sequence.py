"""`POST /v1/sequence`: the language itself over HTTP (DESIGN A9)."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from akv_jax.request import Request
from serving.bodies import read_object, wants_msgpack
from serving.generation import Completion, collect, unless_disconnected
from serving.request_log import Notes, notes_of
from serving.responses import answer, cache_object, logprobs_object, usage_object
from serving.schemas import SequenceBody, parse_operations, validate
from serving.state import Server, server_of

router = APIRouter(tags=["generation"])


@router.post("/v1/sequence")
async def sequence(http: HttpRequest) -> Response:
    """Compute a history of operations and continue it. JSON or msgpack, by Content-Type and Accept."""
    server = server_of(http)
    data = await read_object(http, server.settings.max_body_size)
    arrived, notes = server.clock(), notes_of(http)
    request = await unless_disconnected(http, asyncio.to_thread(_read, server, notes, data))
    completion = await unless_disconnected(http, collect(server, notes, request, arrived))
    return answer(_sequence_object(server, request, completion), as_msgpack=wants_msgpack(http))


def _read(server: Server, notes: Notes, data: dict[str, Any]) -> Request:
    """Raises RequestError."""
    vocab_size = server.require_engine().model.config.vocab_size
    body = validate(SequenceBody, data)
    server.note_unknown(notes, body)
    return Request(
        request_id=f"seq-{uuid.uuid4().hex}",
        operations=parse_operations(body.operations, vocab_size),
        sampling=body.sampling(vocab_size),
        cache_salt=body.cache_salt,
        return_logits=body.return_logits,
    )


def _sequence_object(server: Server, request: Request, completion: Completion) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": completion.token_ids,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "logprobs": None,
    }
    if request.sampling.logprobs:
        tokenizer = server.require_engine().model.tokenizer
        choice["logprobs"] = logprobs_object(completion.logprobs, tokenizer.token_bytes)
    if request.return_logits:
        choice["next_logits"] = completion.next_logits
    return {
        "id": request.request_id,
        "object": "sequence",
        "created": int(time.time()),
        "model": server.model_name,
        "choices": [choice],
        "usage": usage_object(completion.usage),
        "cache": cache_object(completion.usage),
    }
