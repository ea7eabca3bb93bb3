"""Request bodies: raw bytes to a dict of plain values, or a refusal that says what is wrong with them (DESIGN A10)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import msgpack
import orjson
from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from akv_jax.errors import Reason, RequestError, invalid
from serving.errors import ClientDisconnected
from serving.schemas import CACHE_FIELDS

#: Containers within containers. No client comes near it; a validator that recurses stays safe.
MAX_DEPTH = 100
MSGPACK_TYPES = frozenset({"application/msgpack", "application/x-msgpack", "application/vnd.msgpack"})


def media_type(header: str) -> str:
    """`application/json` of `application/json; charset=utf-8`."""
    return header.split(";", 1)[0].strip().lower()


def is_msgpack(request: HttpRequest) -> bool:
    return media_type(request.headers.get("content-type", "")) in MSGPACK_TYPES


def wants_msgpack(request: HttpRequest) -> bool:
    """By `Accept` where it names one of the two formats, else the answer has the format of the request."""
    accepted = [media_type(part) for part in request.headers.get("accept", "").split(",")]
    for kind in accepted:
        if kind in MSGPACK_TYPES:
            return True
        if kind == "application/json":
            return False
    return is_msgpack(request)


async def read_object(request: HttpRequest, limit: int | None) -> dict[str, Any]:
    """The body as a dict with string keys.

    Raises:
        RequestError: it is not that (400).
        HTTPException: it is larger than `limit` bytes (413).
        ClientDisconnected: the client hung up while sending.
    """
    raw = await read_bytes(request, limit)
    # A body may have millions of elements: others must not wait for that.
    return await asyncio.to_thread(_parse, raw, is_msgpack(request))


def _parse(raw: bytes, packed: bool) -> dict[str, Any]:
    value = _parse_msgpack(raw) if packed else _parse_json(raw)
    if not isinstance(value, dict):
        raise invalid(f"The body must be an object, got {type(value).__name__}.")
    _check_depth(value)
    if not value.keys().isdisjoint(CACHE_FIELDS):
        # The fast parsers keep the last of two values for one key and say nothing.
        _refuse_repeated_keys(raw, packed)
    return value


async def read_bytes(request: HttpRequest, limit: int | None) -> bytes:
    """The body as it came. Reads on past `limit` and throws away: a client that is still sending would not see the
    answer. Raises what `read_object` raises, but the first."""
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if limit is None or size <= limit:
                chunks.append(chunk)
            else:
                chunks.clear()
    except ClientDisconnect as error:
        raise ClientDisconnected from error
    if limit is not None and size > limit:
        raise HTTPException(413, f"The body has {size} bytes; this server takes at most {limit}.")
    return b"".join(chunks)


def _parse_json(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"The body is not valid JSON: {error}") from None


def _parse_msgpack(raw: bytes) -> Any:
    try:
        return msgpack.unpackb(raw, raw=False, strict_map_key=True, ext_hook=_refuse_extension)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise invalid(f"The body is not valid msgpack: {str(error) or type(error).__name__}") from None


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


class _Object(dict[str, Any]):
    """An object that knows one key that it was given twice."""

    repeated: str | None = None

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, Any]]) -> _Object:
        value = cls()
        for key, inner in pairs:
            if key in value:
                value.repeated = key
            value[key] = inner
        return value


def _refuse_repeated_keys(raw: bytes, packed: bool) -> None:
    """A drop schedule of which a part would be lost is a 400: nothing of it is silently ignored (DESIGN A3).

    The body has been found to be well-formed before.
    """
    if packed:
        body = msgpack.unpackb(raw, raw=False, object_pairs_hook=_Object.of)
    else:
        body = json.loads(raw, object_pairs_hook=_Object.of, parse_int=float)
    if body.repeated in CACHE_FIELDS:
        raise _repeated(body.repeated)
    level = [(name, body[name]) for name in CACHE_FIELDS if name in body]
    while level:
        for path, value in level:
            if isinstance(value, _Object) and value.repeated is not None:
                raise _repeated(f"{path}.{value.repeated[:40]}")
        level = [
            inner
            for path, value in level
            for inner in (
                [(f"{path}.{key}", v) for key, v in value.items()]
                if isinstance(value, dict)
                else [(f"{path}[{i}]", v) for i, v in enumerate(value) if isinstance(v, dict | list)]
                if isinstance(value, list)
                else []
            )
        ]


def _repeated(param: str) -> RequestError:
    return RequestError(Reason.INVALID_CACHE, "expected every key once, found it twice", param)


def _check_depth(value: Any) -> None:
    """Level by level, so that depth costs no recursion."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return
    raise invalid(f"The body nests deeper than {MAX_DEPTH} levels.")
