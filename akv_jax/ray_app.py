"""Replicas of the server on Ray Serve: the actor, the router inside its handles, and the applications.

The only file that imports Ray at its top. What needs no Ray is in `serving/replicas/`; docs/replicas.md explains all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from fastapi.responses import Response
from ray import serve  # pyright: ignore[reportMissingImports]
from ray.exceptions import RayActorError, TaskCancelledError  # pyright: ignore[reportMissingImports]
from ray.serve.exceptions import DeploymentUnavailableError  # pyright: ignore[reportMissingImports]
from ray.serve.handle import DeploymentHandle  # pyright: ignore[reportMissingImports]
from ray.serve.request_router import (  # pyright: ignore[reportMissingImports]
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from rich.console import Console
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send
from structlog.typing import FilteringBoundLogger

from serving.app import create_app
from serving.logging import configure_process, create_logger
from serving.replicas.affinity import rank, spill
from serving.replicas.front import ACCEPTED, Answer, NoReplica, ReplicaLost, create_front
from serving.replicas.in_process import messages_of
from serving.settings import Environment, Settings

#: Seconds between Ray's questions whether a replica is well.
HEALTH_SECONDS = 2.0
#: Requests that a front takes at a time, far more than engines do: refusing is for engines, which say why.
FRONT_REQUESTS = 10_000
#: What a replica may have beyond what its engine runs and queues: refusals and small questions.
SPARE_REQUESTS = 256
#: Seconds for a clean end beyond the drain, such as for storing the cache.
END_SECONDS = 60.0


class Replica:
    """One engine with the whole HTTP API, in an actor of its own. Ready for requests when the constructor returns."""

    def __init__(self, arguments: argparse.Namespace, settings: Settings, environment: Environment) -> None:
        # Imports JAX: not in the processes that only route.
        from akv_jax.cache.persistence import prepare
        from akv_jax.serve import background_engine

        configure_process(settings.log_level)
        context = serve.get_replica_context()
        #: Replicas are told apart by their seat, 0 to N-1, which a replacement inherits (and with it its conversations
        #: and its cache's folder).
        self._seat = str(context.rank.rank)
        self._settings = settings
        self._log: FilteringBoundLogger = create_logger(settings.log_level)
        self._log.info("replica starts", seat=self._seat, pid=os.getpid(), code=__file__)
        folder = None
        if arguments.cache_dir is not None:
            folder = Path(arguments.cache_dir).expanduser() / f"replica-{self._seat}"
            prepare(folder)
        self._engine = background_engine(arguments, environment.cache_dir, folder, Console(stderr=True))
        self._app = create_app(self._engine, settings, self._log)
        self._engine.start()
        self._engine.wait_ready()

    def record_replica_metadata(self) -> dict[str, Any]:
        """For the routers, once, when the replica is ready."""
        return {"seat": self._seat}

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message, None]:
        """One request, as ASGI messages after an ACCEPTED one."""
        self._leave_if_dead()
        yield {"type": ACCEPTED, "replica": self._seat}
        async for message in messages_of(self._app, scope, body):
            yield message

    async def answer_whole(self, scope: dict[str, Any]) -> Answer:
        """The same for a request without a body, at once."""
        messages = [message async for message in messages_of(self._app, scope, b"")]
        body = b"".join(message.get("body", b"") for message in messages[1:])
        return Answer(self._seat, messages[0]["status"], list(messages[0]["headers"]), body)

    async def drain(self) -> None:
        """Refuse what is new, let the rest go on for a while, end the engine, store its cache."""
        await asyncio.to_thread(self._stop, self._settings.drain_seconds)

    def _stop(self, seconds: float) -> None:
        if self._engine.ready:
            self._engine.stop(seconds)
        self._engine.wait_finished()

    def check_health(self) -> None:
        self._leave_if_dead()

    def _leave_if_dead(self) -> None:
        """An engine that has failed is of no use any more: end the process. Whoever waits for it learns that at once,
        and Ray starts another one."""
        if self._engine.failure is not None:
            self._log.error("the engine has failed: this replica ends, and another one takes its seat")
            os._exit(1)

    async def __del__(self) -> None:
        """Ray's last call, when it takes the replica down on its own account: requests are over by then."""
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._stop, 0.0)


class AffinityRouter(RequestRouter):
    """Sends a conversation (the handle's `session_id`) home, see `serving.replicas.affinity`; what has none, to the
    emptiest replica. Counts only the requests of its own process."""

    def initialize_state(self, full: int = 1) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`full`: requests that a replica computes at a time."""
        self._full = full
        self._ongoing: defaultdict[ReplicaID, set[str]] = defaultdict(set)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates in the order in which they should be tried."""
        ongoing = [len(self._ongoing[replica.replica_id]) for replica in candidate_replicas]
        key = ""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            key = pending_request.metadata.session_id
        if key:
            order = spill(rank(key, seats(candidate_replicas)), ongoing, self._full)
        else:
            order = sorted(range(len(ongoing)), key=lambda index: ongoing[index])
        return [[candidate_replicas[index]] for index in order]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._ongoing[replica_id].add(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._ongoing[replica_id].discard(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._ongoing.pop(replica_id, None)


def seats(replicas: list[RunningReplica]) -> list[str]:
    """Names for ranking: seats, and where two have the same (Ray may renumber when it scales down), with their ids."""
    plain = [str(replica.replica_metadata.get("seat", "")) for replica in replicas]
    return [
        seat if plain.count(seat) == 1 else f"{seat}/{replica.replica_id.unique_id}"
        for seat, replica in zip(plain, replicas, strict=True)
    ]


class RayReplicas:
    """`serving.replicas.front.Replicas` by a deployment handle of `Replica`."""

    def __init__(self) -> None:
        """There is no replica before `attach`."""
        self._handle: DeploymentHandle | None = None

    def attach(self, handle: DeploymentHandle) -> None:
        # Asking for options starts the handle's router, which then hears of replicas.
        handle.options(stream=True)
        self._handle = handle

    def handle(self) -> DeploymentHandle | None:
        """None as long as no replica has ever been ready."""
        return self._handle if self._handle is not None and self._handle.running_replicas_populated() else None

    async def send(self, scope: dict[str, Any], body: bytes, key: str) -> AsyncGenerator[Message, None]:
        handle = self.handle()
        if handle is None:
            raise NoReplica
        response: Any = handle.options(method_name="answer", stream=True, session_id=key).remote(scope, body)
        try:
            async for message in response:
                yield message
        except (RayActorError, DeploymentUnavailableError, TaskCancelledError) as error:
            raise ReplicaLost(str(error)) from error
        finally:
            response.cancel()

    async def send_all(self, scope: dict[str, Any], seconds: float) -> list[Answer]:
        handle = self.handle()
        if handle is None:
            return []
        try:
            response = handle.broadcast("answer_whole", scope)
            answers = await response.results_async(timeout_s=seconds, return_exceptions=True)
        except (TimeoutError, RayActorError, DeploymentUnavailableError):
            return []
        return sorted((each for each in answers if isinstance(each, Answer)), key=lambda each: each.replica)


class Ingress:
    """The front inside Ray Serve, behind its HTTP proxies: for clusters and `serve deploy`."""

    def __init__(self, handle: DeploymentHandle, settings: Settings) -> None:
        replicas = RayReplicas()
        replicas.attach(handle)
        self._front = create_front(replicas, settings)

    async def __call__(self, request: HttpRequest) -> Response:
        return _ByFront(self._front)


class _ByFront(Response):
    def __init__(self, front: Any) -> None:
        super().__init__()
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front(scope, receive, send)


def replica_application(
    arguments: argparse.Namespace, settings: Settings, environment: Environment, gpus: float
) -> serve.Application:
    """The replicas alone, to be called by a handle."""
    capacity = arguments.max_running_requests + arguments.max_queued_requests + SPARE_REQUESTS
    deployment = serve.deployment(
        Replica,
        name="replica",
        num_replicas=arguments.replicas or 1,
        max_ongoing_requests=capacity,
        ray_actor_options={"num_cpus": arguments.cpus_per_replica, "num_gpus": gpus},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds + END_SECONDS,
        # A model that cannot be loaded cannot be loaded the second time.
        max_constructor_retry_count=1,
        request_router_config={
            "request_router_class": "akv_jax.ray_app:AffinityRouter",
            "request_router_kwargs": {"full": arguments.max_running_requests},
        },
    )
    return deployment.bind(arguments, settings, environment)


def build(options: Mapping[str, Any]) -> serve.Application:
    """For `serve deploy` and `serve run`: the replicas and their front. `options` are the flags of
    `python -m akv_jax.serve` without dashes (`max_total_tokens: 65536`), true for flags that take no value.

    Addresses and ports are Ray's business here, and numbers of replicas may be the configuration file's.
    """
    from akv_jax.flags import argument_parser
    from akv_jax.serve import settings_of

    flags: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    arguments = argument_parser().parse_args(flags)
    environment = Environment.read()
    settings = settings_of(arguments, environment)
    gpus = arguments.gpus_per_replica or 0
    front = serve.deployment(
        Ingress,
        name="front",
        max_ongoing_requests=FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain_seconds + END_SECONDS,
    )
    return front.bind(replica_application(arguments, settings, environment, gpus), settings)
