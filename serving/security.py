"""The API key, checked before a body is read."""

from __future__ import annotations

import hmac

from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException

from serving.state import server_of


async def require_api_key(request: HttpRequest) -> None:
    """Let in who sends `Authorization: Bearer <key>`, or everybody where no key is set; else 401."""
    key = server_of(request).settings.api_key
    if key is None:
        return
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(sent.strip().encode(), key.encode()):
        what = "Wrong API key." if sent else "This server wants an API key: send Authorization: Bearer <key>."
        raise HTTPException(401, what, {"WWW-Authenticate": "Bearer"})
