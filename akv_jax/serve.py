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
from typing import TYPE_CHECKING, Any, Literal, NoReturn, cast

import uvicorn
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from akv_jax.async_engine import AsyncEngine
    from akv_jax.config import Disaggregation, EngineConfig, ModelConfig
    from akv_jax.engine import ServingEngine
    from akv_jax.models.load import LoadedModel
    from akv_jax.models.sharding import Layout
    from akv_jax.nodes import Nodes
    from akv_jax.runtime.multi_process import Followers
    from serving.settings import Environment, Settings

#: Exit codes: a failure of ours, and the usual one for a bad command line, port or model.
EXIT_FAILURE, EXIT_USAGE = 1, 2

#: Seconds that a stream has to send its error event once it is cut off.
CUT_SECONDS = 5

#: Positions below which long agent runs do not fit without dropping and repositioning.
SHORT_FOR_AGENTS = 32_768

#: Defaults of --mem-fraction-static.
GPU_MEM_FRACTION, CPU_MEM_FRACTION = 0.85, 0.15

#: Tokens, and what the default pool is a multiple of. A smaller one means that memory is short.
MIN_POOL = 1024


Dtype = Literal["float32", "bfloat16"]


class FlagError(Exception):
    """Flags that do not fit this model or machine. The message is for the person at the command line."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65_535:
        raise argparse.ArgumentTypeError(f"expected 0 to 65535, found {value}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, found {value}")
    return value


def _split(text: str) -> Disaggregation:
    from akv_jax.config import Disaggregation

    try:
        return Disaggregation.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"expected 0 or more, found {value}")
    return value


def argument_parser() -> argparse.ArgumentParser:
    """Flags are called what vLLM and SGLang call them."""
    parser = argparse.ArgumentParser(
        prog="python -m akv_jax.serve",
        usage="%(prog)s [FLAG ...]",
        description="Serve a model over OpenAI's API, with a cache field that edits attention.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
    )
    add = parser.add_argument
    add("--model", metavar="PATH", help="GGUF file or Hugging Face directory (default: SmolLM2-135M-Instruct, fetched)")
    add("--served-model-name", metavar="NAME", help="name in answers and in /v1/models (default: the model's own)")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on, 0 for any free one (%(default)s)")
    add("--api-key", metavar="KEY", help="key that clients must send (AKV_API_KEY)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights and KV (%(default)s)")
    add("--tp", type=_positive, default=1, metavar="N", help="devices to lay the model over (%(default)s)")
    add(
        "--disaggregation", type=_split, metavar="prefill=N,decode=M", help="prefill and decode on devices of their own"
    )
    add("--nnodes", type=_positive, default=1, metavar="N", help="processes that share the devices (%(default)s)")
    add("--node-rank", type=int, default=0, metavar="R", help="which of them this is; 0 answers HTTP (%(default)s)")
    add("--dist-init-addr", metavar="HOST:PORT", help="where they meet: a free port of node 0's machine")
    add("--dist-timeout", type=float, default=300, metavar="S", help="seconds they wait for each other (%(default)s)")
    add("--attention-backend", default="xla", metavar="NAME", help="attention by name (%(default)s)")
    add("--context-length", type=_positive, metavar="N", help="positions a request may use (default: the model's)")
    add("--max-total-tokens", type=_positive, metavar="N", help="KV pool size, tokens (default: by memory)")
    add("--mem-fraction-static", type=_fraction, metavar="F",
        help="GPU: share of memory for weights and KV (0.85); CPU: share of memory for KV (0.15)")  # fmt: skip
    add("--max-running-requests", type=_positive, default=16, metavar="N", help="batch size (%(default)s)")
    add("--max-queued-requests", type=_positive, default=256, metavar="N", help="queue size, then 503 (%(default)s)")
    add("--chunked-prefill-size", type=_positive, default=256, metavar="N", help="prompt tokens a step (%(default)s)")
    add(
        "--reposition",
        choices=("on_read", "copy"),
        default="on_read",
        help="turn keys as read, or copies (%(default)s)",
    )
    add("--disable-radix-cache", action="store_true", help="keep no KV between requests")
    add(
        "--eviction",
        choices=("drop_aware", "lru"),
        default="drop_aware",
        help="what is given up first: dropped KV, or the least recently used (%(default)s)",
    )
    add("--cache-dir", metavar="DIR", help="keep cached KV here from a stop to the next start")
    add("--max-body-size", type=_positive, metavar="BYTES", help="largest request body, then 413 (default: no limit)")
    add("--seed", type=int, metavar="N", help="seed of requests that send none (default: random)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    add("--replicas", type=_positive, metavar="N", help="N servers behind one address, on Ray (docs/replicas.md)")
    add(
        "--cpus-per-replica",
        type=_share,
        default=1,
        metavar="N",
        help="that Ray sets aside, or 0 (%(default)s)",
    )
    add("--gpus-per-replica", type=_share, metavar="N", help="that Ray gives each (default: one a device, if any)")
    add("--ray-address", default="local", metavar="ADDR", help="a running Ray cluster's (default: start one here)")
    return parser


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
    folder = _cache_folder(parser, arguments)
    nodes = _nodes(parser, arguments)
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


def _nodes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Nodes | None:
    """The flags of a server out of several processes."""
    if arguments.nnodes == 1 and arguments.dist_init_addr is None and arguments.node_rank == 0:
        return None
    from akv_jax.nodes import nodes_of

    return nodes_of(parser, arguments)


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

    try:
        run_follower(nodes, lambda: _load(arguments, cache_dir))
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
    )


def background_engine(
    arguments: argparse.Namespace, cache_dir: Path, kv_folder: Path | None, console: Console
) -> AsyncEngine:
    """The engine that the flags ask for, not started. Its cache is kept in `kv_folder`, where that is given."""
    # Imports JAX, which takes a while: not before the command line has proved right.
    from akv_jax import warm_start
    from akv_jax.async_engine import AsyncEngine

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

    def handle_exit(self, sig: int, frame: object) -> None:
        if not self.should_exit:
            threading.Thread(target=self._drain, name="drain", daemon=True).start()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


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
    server.run(sockets=[listener])
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


def load_engine(
    arguments: argparse.Namespace, cache_dir: Path, nodes: Nodes | None = None, followers: Followers | None = None
) -> ServingEngine:
    """Load the model and build the engine, not warmed up yet.

    Raises:
        ModelError: the model cannot be had.
        FlagError: flags that do not fit this model or machine.
        NodeError: another node that cannot take part.
    """
    from akv_jax.disaggregated import over_devices
    from akv_jax.engine import Engine
    from akv_jax.runtime.placement import model_mesh
    from akv_jax.runtime.runner import Runner

    if nodes is not None and followers is not None:
        from akv_jax.nodes import lead, mesh_of

        mesh = mesh_of(nodes)
        model, config = _load(arguments, cache_dir)
        runner = Runner(model.config, model.params, config, mesh)
        return Engine(model, config, runner=runner, device=lead(followers, model, config, runner))
    split: Disaggregation | None = arguments.disaggregation
    devices = _devices(arguments.tp if split is None else split.devices)
    model, config = _load(arguments, cache_dir)
    if split is not None:
        return over_devices(model, config, split, devices)
    mesh = model_mesh(devices) if len(devices) > 1 else None
    return Engine(model, config, runner=Runner(model.config, model.params, config, mesh))


def _load(arguments: argparse.Namespace, cache_dir: Path) -> tuple[LoadedModel, EngineConfig]:
    """The model, and an engine's sizes as they fit this machine."""
    import jax

    from akv_jax.models.load import load_model
    from akv_jax.runtime.runner import default_dtype
    from pallas_kernels.segment_attention.api import backend

    try:
        backend(arguments.attention_backend)
    except ValueError as error:
        raise FlagError(f"--attention-backend: {error}") from None
    # The second start finds its programs compiled.
    jax.config.update("jax_compilation_cache_dir", str(cache_dir / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    wanted = default_dtype(jax.local_devices()[0].platform) if arguments.dtype == "auto" else arguments.dtype
    dtype = cast(Dtype, wanted)
    model = load_model(Path(arguments.model) if arguments.model else None, dtype, cache_dir / "models")
    return model, engine_config(arguments, model, dtype)


def _devices(count: int) -> Sequence[Any]:
    """So many devices. On a machine without GPUs they are virtual, and share its cores."""
    import jax

    if count > 1:
        # Has no effect on GPUs; must come before the first look at devices.
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()
    if len(devices) < count:
        raise FlagError(
            f"--tp or --disaggregation: {count} devices wanted, and there are only {len(devices)} here "
            f"({devices[0].device_kind})"
        )
    return devices[:count]


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


def engine_config(
    arguments: argparse.Namespace, model: LoadedModel, dtype: Literal["float32", "bfloat16"]
) -> EngineConfig:
    """Flags and memory to the engine's sizes.

    The default pool is what memory allows, but never more than all running requests at full length could use.
    """
    from akv_jax.config import EngineConfig
    from akv_jax.models.sharding import layout_of

    split: Disaggregation | None = arguments.disaggregation
    # The side with fewer devices has more on each.
    layout = layout_of(model.config, arguments.tp if split is None else min(split.prefill, split.decode))
    longest = model.config.max_positions
    context_length = arguments.context_length or longest
    if context_length > longest:
        raise FlagError(f"--context-length {context_length}: {model.name} was trained for at most {longest} positions")
    num_pages = arguments.max_total_tokens
    if num_pages is None:
        devices = arguments.tp // arguments.nnodes if split is None else split.devices
        fitting = _pool_bytes(arguments.mem_fraction_static, layout, dtype, devices) // page_bytes(layout.local, dtype)
        if fitting < MIN_POOL:
            raise FlagError(
                f"memory is left for a pool of {max(fitting, 0)} tokens only: "
                "raise --mem-fraction-static, or set --max-total-tokens to go on regardless"
            )
        num_pages = min(fitting // MIN_POOL * MIN_POOL, arguments.max_running_requests * context_length)
    return EngineConfig(
        context_length=context_length,
        num_pages=num_pages,
        max_running_requests=arguments.max_running_requests,
        max_queued_requests=arguments.max_queued_requests,
        chunked_prefill_size=arguments.chunked_prefill_size,
        attention_backend=arguments.attention_backend,
        dtype=dtype,
        seed=arguments.seed,
        reposition=arguments.reposition,
        disable_radix_cache=arguments.disable_radix_cache,
        eviction=arguments.eviction,
    )


def page_bytes(config: ModelConfig, dtype: Dtype) -> int:
    """K and V of one token in all layers, bytes."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * _item_bytes(dtype)


def _item_bytes(dtype: Dtype) -> int:
    return 4 if dtype == "float32" else 2


def _pool_bytes(fraction: float | None, layout: Layout, dtype: Dtype, devices: int) -> int:
    """What `--mem-fraction-static` leaves for the pool on each of so many devices, bytes. On a GPU the weights come out
    of the fraction.

    Of all memory, not of what is free: the pool's size is part of every compiled program, and the next start is only
    quick if it is the same again.
    """
    import jax

    memory = jax.local_devices()[0].memory_stats()
    if memory is None or "bytes_limit" not in memory:
        return int((fraction or CPU_MEM_FRACTION) * _host_memory()) // devices
    return int((fraction or GPU_MEM_FRACTION) * memory["bytes_limit"]) - layout.local_weights * _item_bytes(dtype)


def _host_memory() -> int:
    """Memory of the machine or, where it is less, of the container, bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):
        return total


def print_summary(console: Console, engine: AsyncEngine, url: str, settings: Settings) -> None:
    """What was started, and how to talk to it."""
    from akv_jax.runtime.runner import token_buckets

    config, model = engine.config, engine.model
    names = ("prefill on", "decode on") if len(engine.placements) == 2 else ("device",)
    layout = engine.placements[0].layout
    pool_bytes = config.num_pages * page_bytes(layout.local, config.dtype) * layout.size
    name = settings.served_model_name or model.name
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in (
        ("model", name),
        ("source", model.source),
        *zip(names, engine.placements, strict=True),
        ("dtype", config.dtype),
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
