"""`python -m akv_jax.serve --replicas N`: a Ray of our own or a cluster's, N replicas, and their front in this process.

HTTP listens first, as without replicas; Ray and the replicas start beside it, in a thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from akv_jax.serve import EXIT_FAILURE, EXIT_USAGE, QuietServer, server_config, url_of

if TYPE_CHECKING:
    from akv_jax.ray_app import RayReplicas
    from serving.settings import Environment, Settings

APPLICATION = "akv-jax"
#: Seconds between looks at how the replicas' start goes on.
POLL_SECONDS = 0.5


class StartError(Exception):
    """The replicas cannot start. The message is for the person at the command line."""


def serve_replicas(
    arguments: argparse.Namespace,
    settings: Settings,
    environment: Environment,
    listener: socket.socket,
    console: Console,
) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code."""
    if importlib.util.find_spec("ray") is None:
        console.print("[red]error:[/red] --replicas: Ray is not installed: pip install '.\\[ray]' in its folder")
        return EXIT_USAGE
    # Ray reads them when it is imported or started, and hands them on to its processes.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if arguments.ray_address == "local":
        # A secret of this run alone; Ray would write one into the home directory.
        os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", secrets.token_hex(32)
    from akv_jax.ray_app import RayReplicas
    from serving.replicas.front import create_front

    cluster = Cluster(arguments, settings, environment, RayReplicas())
    server = FrontServer(server_config(create_front(cluster.replicas, settings), settings), cluster.drain)

    started, ended = threading.Event(), threading.Event()

    def start() -> None:
        try:
            cluster.start(server.take_signals_back)
            if not server.should_exit:
                greet(console, arguments, url_of(listener))
        except BaseException as error:
            if not server.should_exit:
                cluster.failure = error
            server.should_exit = True
        started.set()
        # Ray's processes end with the thread that has started them (Linux' parent death signal).
        ended.wait()

    threading.Thread(target=start, daemon=True).start()
    server.run(sockets=[listener])
    # A second Ctrl-C does not wait for what is being stored.
    with contextlib.suppress(KeyboardInterrupt):
        cluster.end()
    ended.set()
    if cluster.failure is not None:
        return _explain(cluster.failure, console)
    if not started.is_set():
        # Stopped while loading: the thread waits for what does not come any more.
        sys.stderr.flush()
        os._exit(0)
    return 0


class FrontServer(QuietServer):
    """A server whose signals are its own."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def take_signals_back(self) -> None:
        """Ray sets handlers for its own crash reports, with which SIGTERM would end the process at once."""

        def take() -> None:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self.handle_exit)

        self._loop.call_soon_threadsafe(take)


class Cluster:
    """Ray, and the replicas on it."""

    def __init__(
        self, arguments: argparse.Namespace, settings: Settings, environment: Environment, replicas: RayReplicas
    ) -> None:
        self._arguments, self._settings, self._environment = arguments, settings, environment
        self.replicas = replicas
        self.failure: BaseException | None = None
        self._own = arguments.ray_address == "local"
        #: Ray Serve did not run on the cluster before: it is not left there without proxies, for others to find.
        self._started_serve = False
        self._drained = threading.Event()
        self._drained.set()

    def start(self, ray_started: Callable[[], None]) -> None:
        """Start all and wait until every replica is ready; the first may serve long before.

        Raises:
            StartError: it cannot be.
        """
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]
        from ray.serve.api import RunTarget, run_many  # pyright: ignore[reportMissingImports]

        from akv_jax.ray_app import replica_application

        try:
            ray.init(
                address=self._arguments.ray_address,
                namespace=APPLICATION,
                include_dashboard=False if self._own else None,
                logging_level=logging.WARNING,
                log_to_driver=True,
            )
        except ConnectionError as error:
            raise StartError(f"--ray-address {self._arguments.ray_address}: {error}") from error
        ray_started()
        gpus = self._gpus(ray.cluster_resources())
        quiet = {"enable_access_log": False, "log_level": "WARNING"}
        self._started_serve = not _serve_runs()
        serve.start(proxy_location="Disabled", logging_config=quiet)
        application = replica_application(self._arguments, self._settings, self._environment, gpus)
        target = RunTarget(application, name=APPLICATION, route_prefix=None, logging_config=quiet)
        (handle,) = run_many([target], wait_for_applications_running=False)
        self.replicas.attach(handle)
        self._wait(serve)

    def _gpus(self, resources: Mapping[str, float]) -> float:
        """GPUs of a replica. Replicas that can never be placed would be waited for in vain: StartError."""
        arguments = self._arguments
        gpus = arguments.gpus_per_replica
        if gpus is None:
            split = arguments.disaggregation
            devices = arguments.tp if split is None else split.devices
            gpus = devices if resources.get("GPU") else 0
        for name, each in (("cpus", arguments.cpus_per_replica), ("gpus", gpus)):
            wanted, there = each * arguments.replicas, resources.get(name[:-1].upper(), 0)
            if self._own and wanted > there:
                message = f"{wanted:g} {name} are wanted, Ray has {there:g}; see --{name}-per-replica"
                raise StartError(f"--replicas {arguments.replicas}: {message}")
        return gpus

    def _wait(self, serve: Any) -> None:
        while True:
            status = serve.status().applications[APPLICATION]
            if status.status == "RUNNING":
                return
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                reasons = "\n".join(each.message for each in status.deployments.values()) or status.message
                # A person's mistake is the last line of Ray's traceback.
                last = reasons.rstrip().rpartition("\n")[2]
                raise StartError(re.sub(r"^[\w.]*(FlagError|ModelError): ", "", last) if "Error: " in last else reasons)
            time.sleep(POLL_SECONDS)

    def drain(self) -> None:
        """Let all replicas refuse what is new, finish or cut off what runs, and store their caches."""
        self._drained.clear()
        try:
            handle = self.replicas.handle()
            if handle is not None:
                handle.broadcast("drain").results(return_exceptions=True)
        finally:
            self._drained.set()

    def end(self) -> None:
        """Wait for the drain, then end the replicas, and Ray where it is our own."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray import serve  # pyright: ignore[reportMissingImports]

        self._drained.wait()
        if not ray.is_initialized():
            return
        if not self._own:
            serve.delete(APPLICATION)
            if self._started_serve and not serve.status().applications:
                serve.shutdown()
        ray.shutdown()


def _serve_runs() -> bool:
    """Whether the cluster that Ray is connected to has Ray Serve's controller."""
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        return False
    return True


def greet(console: Console, arguments: argparse.Namespace, url: str) -> None:
    console.print(
        f"{arguments.replicas} replicas are ready behind {url}; a conversation stays with one of them.", highlight=False
    )


def _explain(error: BaseException, console: Console) -> int:
    """A person's mistake gets a sentence, ours a traceback. Returns the exit code."""
    if isinstance(error, StartError):
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return EXIT_USAGE
    console.print_exception()
    return EXIT_FAILURE
