"""The front of several replicas: the API of one server, each request sent to the replica it belongs to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

import anyio
import msgpack
import orjson
from fastapi import APIRouter, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from akv_jax.stats import Clock
from serving.bodies import is_msgpack, read_bytes
from serving.errors import ClientDisconnected, error_object, error_response, install_error_handlers
from serving.generation import unless_disconnected
from serving.logging import create_logger
from serving.replicas.affinity import conversation_key
from serving.replicas.merge import label_metrics
from serving.request_log import Notes, log_request
from serving.responses import answer
from serving.security import require_api_key
from serving.settings import Settings
from serving.sse import event

#: Replicas that a request is offered to, one after the other, while nothing of its answer has been sent.
ATTEMPTS = 3
#: Seconds for a replica to say that it has the request. Generating may take as long as it likes after that.
ACCEPT_SECONDS = 10.0
#: Seconds that a question to all replicas may take.
ASK_ALL_SECONDS = 10.0
#: What a replica sends first: `{"type": ACCEPTED, "replica": its name}`.
ACCEPTED = "akv.accepted"
#: Names the replica in every answer of one.
REPLICA_HEADER = b"x-akv-replica"
#: Routes whose body says which conversation they belong to.
CONVERSATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/sequence", "/tokenize", "/detokenize")

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")


class ReplicaLost(Exception):
    """The replica died, or cannot be reached, before its answer was complete."""


class NoReplica(Exception):
    """No replica is ready."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of one replica."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Refused(Exception):
    """All replicas have refused a question to all, in the words of `answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


class Replicas(Protocol):
    """Whoever runs the replicas."""

    def send(self, scope: dict[str, Any], body: bytes, key: str) -> AsyncGenerator[Message, None]:
        """The ASGI messages of the replica that `key` belongs to ("": any), after an ACCEPTED one. Closing the
        iterator tells the replica that the client has gone. Raises ReplicaLost; NoReplica if there is none at all."""
        ...

    async def send_all(self, scope: dict[str, Any], seconds: float) -> list[Answer]:
        """What the replicas that answer within `seconds` say to a request without a body, by name; maybe none."""
        ...


@dataclass
class Front:
    """What the routes share. Has what the error handlers and the key's check look for in a server's state."""

    replicas: Replicas
    settings: Settings
    log: FilteringBoundLogger
    clock: Clock = time.monotonic

    def ended(self, method: str, path: str, status: int, seconds: float, notes: Notes) -> None:
        """As `Server.ended`. What a replica has answered is in the replica's own log."""
        log_request(self.log, method, path, status, seconds, notes, quiet="code" not in notes)


def create_front(replicas: Replicas, settings: Settings, log: FilteringBoundLogger | None = None) -> FastAPI:
    """The application. Replicas check keys and bodies themselves; the front only does it before it reads a body."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.server = Front(replicas, settings, log or create_logger(settings.log_level))
    install_error_handlers(app)
    app.include_router(router)
    app.add_exception_handler(Refused, _refused)
    app.add_api_route("/{path:path}", _forward_without_body, methods=list(METHODS))
    return app


def front_of(request: HttpRequest) -> Front:
    return request.app.state.server


router = APIRouter()


@router.get("/health")
async def health() -> dict:
    """200 as long as the front listens: a replica that fails is restarted without anybody's doing."""
    return {"status": "alive"}


@router.get("/ready")
async def ready(http: HttpRequest) -> Response:
    """200 when at least one replica is ready."""
    answers = await _ask_all(http)
    return answer({"status": "ready", "replicas": len(answers)})


@router.get("/metrics")
async def metrics(http: HttpRequest) -> Response:
    """Those of all replicas, each sample with a `replica` label."""
    answers = await front_of(http).replicas.send_all(plain_scope(http), ASK_ALL_SECONDS)
    count = f"# HELP akv:replicas Replicas that answered.\n# TYPE akv:replicas gauge\nakv:replicas {len(answers)}\n"
    text = count + label_metrics({each.replica: each.body.decode() for each in answers})
    return Response(text, media_type=CONTENT_TYPE_LATEST)


@router.post("/flush_cache", dependencies=[Depends(require_api_key)])
async def flush_cache(http: HttpRequest) -> Response:
    """Of all replicas: the pages that were freed, together and by replica."""
    answers = await _ask_all(http)
    freed = {each.replica: orjson.loads(each.body)["freed_pages"] for each in answers}
    return answer({"freed_pages": sum(freed.values()), "replicas": freed})


@router.get("/cache/tree", dependencies=[Depends(require_api_key)])
async def cache_tree(http: HttpRequest) -> Response:
    """Every replica's tree; with `replica=NAME` that one's alone, as a single server gives it."""
    answers = await _ask_all(http)
    name = http.query_params.get("replica")
    if name is None:
        return answer(
            {
                "object": "list",
                "data": [{"replica": each.replica, **orjson.loads(each.body)} for each in answers],
            }
        )
    for each in answers:
        if each.replica == name:
            return Response(each.body, media_type="application/json")
    message = f"replica: expected one of {', '.join(each.replica for each in answers)}, found {name[:40]!r}"
    return error_response(400, error_object(message, "invalid_request_error", "replica"))


async def conversation(http: HttpRequest) -> Response:
    """Whatever belongs to a conversation goes where that was before."""
    front = front_of(http)
    body = await read_bytes(http, front.settings.max_body_size)
    return await _forward(http, body, conversation_key(_parsed(http, body)))


for _path in CONVERSATIONS:
    router.add_api_route(_path, conversation, methods=["POST"], dependencies=[Depends(require_api_key)])


async def _forward_without_body(http: HttpRequest) -> Response:
    """/v1/models, the documentation, routes and methods that there are not: any replica knows."""
    return await _forward(http, b"", "")


def _parsed(http: HttpRequest, body: bytes) -> dict[str, Any]:
    """The body as far as it can be read. What is wrong with it is for the replica to say."""
    try:
        value = msgpack.unpackb(body) if is_msgpack(http) else orjson.loads(body)
    except Exception:
        return {}
    return value if isinstance(value, dict) else {}


def plain_scope(http: HttpRequest) -> dict[str, Any]:
    """What can travel of the request's ASGI scope."""
    names = ("method", "path", "raw_path", "query_string", "root_path", "http_version", "scheme", "headers")
    kept = {name: http.scope[name] for name in names if name in http.scope}
    kept["headers"] = [(bytes(name), bytes(value)) for name, value in kept["headers"]]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "client": http.scope.get("client"),
        "server": http.scope.get("server"),
        **kept,
    }


async def _ask_all(http: HttpRequest) -> list[Answer]:
    """The answers of all replicas that are ready.

    Raises:
        HTTPException: there is none (503).
        Refused: all say no.
    """
    answers = await front_of(http).replicas.send_all(plain_scope(http), ASK_ALL_SECONDS)
    if not answers:
        raise not_ready()
    good = [each for each in answers if each.status == 200]
    if not good:
        raise Refused(answers[0])
    return good


def _refused(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return Response(error.answer.body, error.answer.status, {}, media_type="application/json")


def not_ready() -> HTTPException:
    return HTTPException(503, "No replica is ready: all are still loading, or restarting.", {"Retry-After": "5"})


async def _forward(http: HttpRequest, body: bytes, key: str) -> Response:
    """The answer of the replica that `key` belongs to, or of the next one as long as it has not begun."""
    front = front_of(http)
    for _ in range(ATTEMPTS):
        relay = Relay(http, front.replicas.send(plain_scope(http), body, key))
        try:
            await unless_disconnected(http, relay.begin())
            return relay
        except (NoReplica, TimeoutError):
            break
        except ReplicaLost as error:
            front.log.warning("a replica was lost, another one is asked", path=http.url.path, why=str(error)[:200])
    raise not_ready()


class Relay(Response):
    """An answer of a replica, message by message: nothing is held back, and a client that goes takes it with it."""

    def __init__(self, http: HttpRequest, messages: AsyncGenerator[Message, None]) -> None:
        super().__init__()
        self._http = http
        self._messages = messages
        self._replica = ""
        self._start: Message = {}

    async def begin(self) -> None:
        """Wait until the answer begins.

        Raises:
            TimeoutError: no replica took it.
            ReplicaLost, NoReplica: as `Replicas.send`.
        """
        try:
            async with asyncio.timeout(ACCEPT_SECONDS):
                accepted = await anext(self._messages)
            self._replica = accepted["replica"]
            self._start = await anext(self._messages)
        except StopAsyncIteration:
            raise ReplicaLost("its answer ended before it began") from None
        except BaseException:
            await self._close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(self._http, self._pass_on(send))
        except ClientDisconnected:
            pass
        finally:
            await self._close()

    async def _pass_on(self, send: Send) -> None:
        headers = [*self._start["headers"], (REPLICA_HEADER, self._replica.encode())]
        await send({**self._start, "headers": headers})
        try:
            async for message in self._messages:
                await send(message)
        except ReplicaLost:
            if not any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
                # The connection is cut: an answer with a length, or in chunks, is seen to be incomplete.
                raise
            lost = error_object("The replica that was answering is gone.", "server_error", None, "replica_lost")
            await send({"type": "http.response.body", "body": event(lost), "more_body": False})

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._messages.aclose()
