"""`python -m akv_jax.serve`: a model behind an OpenAI-compatible server, from one command.

The composition root: the one place in `akv_jax` that knows `serving`. HTTP listens first (so that probes get an answer,
and a port in use is noticed before minutes of loading), then the model is loaded and warmed up in a thread beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from akv_jax.flags import FlagError, Nodes, argument_parser, nodes_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from akv_jax.async_engine import AsyncEngine
    from akv_jax.engine import ServingEngine
    from serving.settings import Environment, Settings

#: Exit codes: a failure of ours, and the usual one for a bad command line, port or model.
EXIT_FAILURE, EXIT_USAGE = 1, 2

#: Seconds that a stream has to send its error event once it is cut off.
CUT_SECONDS = 5

#: Positions below which long agent runs do not fit without dropping and repositioning.
SHORT_FOR_AGENTS = 32_768


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit code."""
    from serving.logging import configure_process
    from serving.settings import Environment

    parser = argument_parser()
    arguments = parser.parse_args(argv)
    if arguments.tp > 1 and arguments.disaggregation is not None:
        parser.error("--disaggregation says how many devices each side has: leave out --tp")
    if arguments.model is not None and not os.path.exists(arguments.model):
        parser.error(f"--model: no such file or directory: {arguments.model}")
    nodes = nodes_of(parser, arguments)
    folder = _cache_folder(parser, arguments)
    configure_process(arguments.log_level)
    environment, console = Environment.read(), Console(stderr=True)
    if nodes is not None and nodes.rank > 0:
        return _follow(nodes, arguments, environment.cache_dir, console)
    settings = settings_of(arguments, environment)
    listener = _listen_or_exit(parser, arguments.host, arguments.port)
    if nodes is not None:
        meeting = _listen_or_exit(parser, nodes.host, nodes.port)
        return _lead(nodes, meeting, arguments, environment.cache_dir, settings, listener, console)
    if arguments.replicas is not None:
        from akv_jax.replicas import serve_replicas

        return serve_replicas(arguments, settings, environment, listener, console)
    return _serve(background_engine(arguments, environment.cache_dir, folder, console), settings, listener, console)


def _listen_or_exit(parser: argparse.ArgumentParser, host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        parser.error(f"cannot listen on {host}:{port}: {error.strerror or error}")


def _lead(
    nodes: Nodes,
    meeting: socket.socket,
    arguments: argparse.Namespace,
    cache_dir: Path,
    settings: Settings,
    listener: socket.socket,
    console: Console,
) -> int:
    """Serve with other processes, which come to `meeting`. Returns the exit code 0, or ends the process."""
    from akv_jax.async_engine import AsyncEngine
    from akv_jax.nodes import leave, meet
    from akv_jax.startup import load_engine

    leaving = contextlib.ExitStack()

    def make_engine() -> ServingEngine:
        followers = meet(nodes, meeting, lost)
        leaving.callback(leave, followers)
        return load_engine(arguments, cache_dir, nodes, followers)

    def lost(error: BaseException) -> None:
        # The engine may be in a step that never ends: it is not asked, and nobody waits for it.
        engine.fail(error)
        threading.Timer(CUT_SECONDS, lambda: _exit(_explain(error, console))).start()

    engine = AsyncEngine(make_engine, WarmUpBar(console), lambda _: leaving.close())
    code = _serve(engine, settings, listener, console, ends_with_engine=True)
    # JAX would wait for the other processes.
    return 0 if code == 0 else _exit(code)


def _follow(nodes: Nodes, arguments: argparse.Namespace, cache_dir: Path, console: Console) -> int:
    """Another process's part of a server, until the leader ends. Returns the exit code 0, or ends the process."""
    from akv_jax.nodes import run_follower
    from akv_jax.startup import load_sized

    try:
        run_follower(nodes, lambda: load_sized(arguments, cache_dir))
    except KeyboardInterrupt:
        _exit(EXIT_FAILURE)
    except Exception as error:
        _exit(_explain(error, console))
    return 0


def _exit(code: int) -> NoReturn:
    """At once, whatever other threads are in."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def settings_of(arguments: argparse.Namespace, environment: Environment) -> Settings:
    """The HTTP side's choices among the flags."""
    from serving.settings import Settings

    return Settings(
        served_model_name=arguments.served_model_name,
        api_key=arguments.api_key or environment.api_key,
        max_body_size=arguments.max_body_size,
        log_level=arguments.log_level,
        drain_seconds=arguments.drain_seconds,
    )


def background_engine(
    arguments: argparse.Namespace, cache_dir: Path, kv_folder: Path | None, console: Console
) -> AsyncEngine:
    """The engine that the flags ask for, not started. Its cache is kept in `kv_folder`, where that is given."""
    # Imports JAX, which takes a while: not before the command line has proved right.
    from akv_jax import warm_start
    from akv_jax.async_engine import AsyncEngine
    from akv_jax.startup import load_engine

    def make_engine() -> ServingEngine:
        engine = load_engine(arguments, cache_dir)
        if kv_folder is not None:
            warm_start.load(engine, kv_folder)
        return engine

    def finish(engine: ServingEngine) -> None:
        if kv_folder is not None:
            warm_start.save(engine, kv_folder)

    return AsyncEngine(make_engine, WarmUpBar(console), finish)


def _cache_folder(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Path | None:
    """`--cache-dir`, there and writable: at the stop it would be too late to say that it is not."""
    from akv_jax.cache.persistence import prepare

    if arguments.cache_dir is None:
        return None
    if arguments.disable_radix_cache:
        parser.error("--cache-dir: with --disable-radix-cache there is nothing to keep")
    folder = Path(arguments.cache_dir).expanduser()
    try:
        prepare(folder)
    except OSError as error:
        parser.error(f"--cache-dir: {folder}: {error.strerror}")
    return folder


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Its connections send at once: without TCP_NODELAY, which asyncio only sets on sockets that
    it has made itself, answers and events of a stream may wait 40 ms for an acknowledgement."""
    listener = socket.create_server((host, port), family=_family(host), backlog=2048)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class QuietServer(uvicorn.Server):
    """Uvicorn that has done its work when it has drained. The original would raise the signal again, for an exit code
    of 143. A second Ctrl-C does not wait."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], None]) -> None:
        """`drain` is called once, in a thread of its own, when the server is told to end."""
        super().__init__(config)
        self._drain = drain
        self._draining = False

    def handle_exit(self, sig: int, frame: object) -> None:
        if self._draining and sig == signal.SIGINT:
            # Cutting every request off in good order would take time, and fill the log with tracebacks.
            _exit(0)
        first = not self._draining
        # Before anything else: the next signal may come at any moment.
        self.should_exit = self._draining = True
        if first:
            threading.Thread(target=self._drain, name="drain", daemon=True).start()


def server_config(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """How `app` is served."""
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=60,
        # The engine gives every stream its end before that.
        timeout_graceful_shutdown=round(settings.drain_seconds) + CUT_SECONDS,
    )


def _serve(
    engine: AsyncEngine,
    settings: Settings,
    listener: socket.socket,
    console: Console,
    ends_with_engine: bool = False,
) -> int:
    """Listen at once, load beside it, serve until a signal comes or the engine cannot start. Returns the exit code.

    A server whose engine fails later says so to everybody who asks, or ends too (`ends_with_engine`).
    """
    from serving.app import create_app

    def drain() -> None:
        if engine.ready:
            console.print(f"Stopping: requests may go on for {settings.drain_seconds:g} s. Ctrl-C again ends at once.")
            engine.stop(settings.drain_seconds)

    server = QuietServer(server_config(create_app(engine, settings), settings), drain)

    def greet() -> None:
        try:
            engine.wait_ready()
        except BaseException:
            server.should_exit = True
        else:
            print_summary(console, engine, url_of(listener), settings)

    def watch() -> None:
        engine.wait_failed()
        server.should_exit = True

    engine.start()
    if ends_with_engine:
        threading.Thread(target=watch, daemon=True).start()
    greeter = threading.Thread(target=greet, daemon=True)
    greeter.start()
    # Uvicorn gives signals back to whom it has them from. By then nothing is left but to store the cache, and another
    # SIGTERM does not cut that off; nor Python's own end, which takes back handlers that are functions.
    signal.signal(signal.SIGTERM, lambda *_: None if server.should_exit else _exit(0))
    server.run(sockets=[listener])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if greeter.is_alive():
        # Stopped while loading. A thread inside the compiler can neither be told to end nor be waited for.
        sys.stderr.flush()
        os._exit(0)
    # A second Ctrl-C does not wait for what is being stored.
    with contextlib.suppress(KeyboardInterrupt):
        if engine.failure is None:
            engine.wait_finished()
    if engine.failure is not None:
        return _explain(engine.failure, console)
    return 0


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class WarmUpBar:
    """A progress bar that is told (what comes now, how many are done, how many there are); lines off terminals."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._console = console
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("Warming up")

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self._console.is_terminal:
            self._console.print(f"Warming up {done}/{total} ({what})", highlight=False)
            return
        self._bar.start()
        self._bar.update(self._task, description=f"Warming up ({what})", completed=done, total=total)
        if done == total:
            self._bar.stop()


def print_summary(console: Console, engine: AsyncEngine, url: str, settings: Settings) -> None:
    """What was started, and how to talk to it."""
    from akv_jax.models.decoder import backends_of
    from akv_jax.runtime.runner import token_buckets
    from akv_jax.startup import page_bytes

    config, model = engine.config, engine.model
    names = ("prefill on", "decode on") if len(engine.placements) == 2 else ("device",)
    layout = engine.placements[0].layout
    pool_bytes = config.num_pages * page_bytes(layout.local, config.dtype) * layout.size
    name = settings.served_model_name or model.name
    missing = [
        operation for operation, of in backends_of(config.attention_backend).items() if of != config.attention_backend
    ]
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in (
        ("model", name),
        ("source", model.source),
        *zip(names, engine.placements, strict=True),
        ("dtype", config.dtype),
        ("kernels", config.attention_backend + (f"; xla for {', '.join(missing)}" if missing else "")),
        ("context", f"{config.context_length:,} positions a request"),
        ("KV pool", f"{config.num_pages:,} tokens, {pool_bytes / 2**20:,.0f} MiB" + ", each" * (len(names) - 1)),
        ("buckets", ", ".join(map(str, config.token_buckets or token_buckets(config))) + " tokens a step"),
        ("batch", f"{config.max_running_requests} requests, {config.max_queued_requests} more in the queue"),
        ("API key", "wanted" if settings.api_key else "none"),
        ("URL", url),
    ):
        table.add_row(f"[bold]{key}[/bold]", str(value))
    console.print(table)
    if config.context_length < SHORT_FOR_AGENTS:
        console.print(
            f"[yellow]Note:[/yellow] {config.context_length:,} positions are short for agents. Recorded runs need "
            "29K-93K logical tokens; with drop and reposition a run needs only as many positions as it keeps active."
        )
    authorization = "-H 'Authorization: Bearer ...' " if settings.api_key else ""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32})
    console.print(
        f"\nTry:\n  curl {url}/v1/chat/completions {authorization}-d '{body}'\n", highlight=False, soft_wrap=True
    )


def _explain(error: BaseException, console: Console) -> int:
    """Say why there is no server. A person's mistake gets a sentence, ours a traceback. Returns the exit code."""
    from akv_jax.models.weights.errors import ModelError
    from akv_jax.runtime.multi_process import NodeError

    if isinstance(error, ModelError | FlagError | NodeError):
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return EXIT_FAILURE if isinstance(error, NodeError) else EXIT_USAGE
    console.print("".join(traceback.format_exception(error)), markup=False, highlight=False, soft_wrap=True)
    return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
