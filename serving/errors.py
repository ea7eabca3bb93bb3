"""Every answer that is not a success: OpenAI's error object with the right status (DESIGN A3, A7, A10)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus

import orjson
from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from akv_jax.chat.messages import describe
from akv_jax.errors import Reason, RequestError, invalid
from serving.request_log import RequestLog, notes_of

#: Seconds after which a refused client may try again.
RETRY_AFTER = {Reason.QUEUE_FULL: 1, Reason.SHUTTING_DOWN: 5, Reason.TRANSFER_FAILED: 1}

#: OpenAI-style codes of the statuses that routes raise as an HTTPException.
HTTP_CODES = {401: "invalid_api_key", 413: "request_too_large", 503: "not_ready"}

#: nginx's status for a client that hung up. Nobody reads the answer; the access log does.
CLIENT_CLOSED_REQUEST = 499


class ClientDisconnected(Exception):
    """The client hung up before the answer was complete."""


def error_object(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict:
    """`{"error": {...}}` as OpenAI's clients parse it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _note_refusal(request: HttpRequest, body: dict, **more: str | None) -> None:
    """The request's line says why, and it is counted by its code."""
    error = body["error"]
    notes_of(request).update({"code": error["code"] or error["type"], **more, "message": error["message"][:300]})


def error_response(status: int, body: dict, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, dict(headers or {}), media_type="application/json")


def request_error_object(error: RequestError) -> dict:
    """The object alone, also for an event stream that has begun."""
    kind = "invalid_request_error" if error.status < 500 else "service_unavailable_error"
    code = None if error.reason is Reason.INVALID_REQUEST else error.reason.value
    message = error.message
    if error.reason in (Reason.INVALID_REQUEST, Reason.INVALID_CACHE) and error.param:
        # Many clients show the message alone.
        message = f"{error.param}: {message}"
    return error_object(message, kind, error.param, code)


def unexpected_error_object() -> dict:
    return error_object("The server failed on this request. Its log has the details.", "server_error")


def request_error_response(error: RequestError) -> Response:
    """400, or 503 with `Retry-After` where waiting helps and `x-should-retry: false` where it does not."""
    headers = {}
    if error.reason in RETRY_AFTER:
        headers["Retry-After"] = str(RETRY_AFTER[error.reason])
    elif error.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["x-should-retry"] = "false"
    return error_response(error.status, request_error_object(error), headers)


def validation_error(error: ValidationError) -> RequestError:
    """Pydantic's first complaint as a refusal that names the field."""
    first = error.errors(include_url=False)[0]
    param = ""
    for part in (part for part in first["loc"] if part != "[key]"):
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else str(part)
    if first["type"] == "missing":
        return invalid("this field is required", param)
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return invalid(f"expected {message}, found {describe(first['input'])}", param)


def _http_error(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        body = error_object(
            f"No such route: {request.method} {request.url.path}", "invalid_request_error", None, "not_found"
        )
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.url.path} does not answer {request.method}; use {allowed}"
        body = error_object(message, "invalid_request_error", None, "method_not_allowed")
    else:
        kind = "invalid_request_error" if error.status_code < 500 else "service_unavailable_error"
        body = error_object(str(error.detail), kind, None, HTTP_CODES.get(error.status_code))
    _note_refusal(request, body)
    return error_response(error.status_code, body, error.headers)


def _refused(request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    _note_refusal(request, request_error_object(error), param=error.param)
    return request_error_response(error)


def _disconnected(request: HttpRequest, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


class CatchUnexpected:
    """The last guard against bugs: the traceback goes to the log, never to the client.

    Starlette's own handler would raise the exception again after the answer, and the server then cuts the connection
    under the client's next request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            notes, body = scope["state"]["notes"], unexpected_error_object()
            notes.update(code=body["error"]["type"], exc_info=error)
            await error_response(HTTPStatus.INTERNAL_SERVER_ERROR, body)(scope, receive, send)


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnected, _disconnected)
    app.add_middleware(CatchUnexpected)
    # The last one added is the outermost.
    app.add_middleware(RequestLog)
