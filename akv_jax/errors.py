"""Errors that are the client's to see. Everything else that goes wrong is a bug."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why a request is refused; tests compare reasons, people read messages."""

    INVALID_REQUEST = "invalid_request_error"
    INVALID_CACHE = "invalid_cache"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    POOL_TOO_SMALL = "pool_too_small"
    QUEUE_FULL = "queue_full"
    SHUTTING_DOWN = "shutting_down"
    TRANSFER_FAILED = "transfer_failed"


#: Reasons that are answered with 503 (DESIGN A7); every other one is a 400 (A10).
UNAVAILABLE = frozenset({Reason.POOL_TOO_SMALL, Reason.QUEUE_FULL, Reason.SHUTTING_DOWN, Reason.TRANSFER_FAILED})


class RequestError(Exception):
    """A request that is refused, with the path of the field at fault (`cache.drop.5[1]`) where there is one."""

    def __init__(self, reason: Reason, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.param = param

    @property
    def status(self) -> int:
        return 503 if self.reason in UNAVAILABLE else 400


def invalid(message: str, param: str | None = None) -> RequestError:
    """The usual refusal: what was expected, and where."""
    return RequestError(Reason.INVALID_REQUEST, message, param)
