"""One line in the log for each request, whatever becomes of it: the routes note what they know, the line comes last."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

#: What a request's line says, besides method, path, status and time. `code` is why it was refused; `exc_info` is the
#: exception that it failed with.
Notes = dict[str, Any]


def notes_of(request: HttpRequest) -> Notes:
    """For whoever learns something about the request."""
    return request.scope["state"]["notes"]


def log_request(
    log: FilteringBoundLogger, method: str, path: str, status: int, seconds: float, notes: Notes, *, quiet: bool
) -> None:
    """Write the line: a failure of ours as an error with its traceback, unknown fields as a warning, all else at level
    info, or debug where it is `quiet`."""
    if "exc_info" in notes:
        write = log.error
    elif "unknown_fields" in notes:
        write = log.warning
    else:
        write = log.debug if quiet else log.info
    # Whoever asks for a path of a thousand characters does not fill the log.
    line: Notes = {"method": method[:20], "path": path[:200], "status": status, **notes, "total": round(seconds, 3)}
    write("request", **line)


class RequestLog:
    """Gives every request its notes, and tells `app.state.server.ended(...)` when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        notes: Notes = {}
        scope.setdefault("state", {})["notes"] = notes
        status, server = 0, scope["app"].state.server
        begun = server.clock()

        async def watched(message: Message) -> None:
            nonlocal status
            status = int(message.get("status", status))
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            server.ended(scope["method"], scope["path"], status, server.clock() - begun, notes)
