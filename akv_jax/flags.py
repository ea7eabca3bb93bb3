"""The command line of `akv_jax.serve`: names, defaults, and what is wrong with a value."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from akv_jax.config import Disaggregation

#: Flags that are each node's own business. All others have to be the same everywhere.
OWN_FLAGS = {
    *("model", "host", "port", "api_key", "log_level", "node_rank", "dist_timeout", "served_model_name"),
    *("max_body_size", "drain_seconds"),
}


class FlagError(Exception):
    """Flags that do not fit this model or machine. The message is for the person at the command line."""


def _positive(text: str) -> int:
    return _integer(text, 1, None)


def _port(text: str) -> int:
    return _integer(text, 0, 65_535)


def _integer(text: str, least: int, most: int | None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least or (most is not None and value > most):
        expected = f"{least} or more" if most is None else f"{least} to {most}"
        raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text}") from None


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected more than 0 and at most 1, found {value}")
    return value


def _split(text: str) -> Disaggregation:
    try:
        return Disaggregation.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _not_negative(text: str) -> float:
    value = _number(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"expected 0 or more, below a million, found {value:g}")
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
    add("--attention-backend", default="xla", metavar="NAME", help="kernels by name, or a module (%(default)s)")
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
    add("--drain-seconds", type=_not_negative, default=10, metavar="S",
        help="how long requests may go on after SIGTERM (%(default)s)")  # fmt: skip
    add("--max-body-size", type=_positive, metavar="BYTES", help="largest request body, then 413 (default: no limit)")
    add("--seed", type=int, metavar="N", help="seed of requests that send none (default: random)")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(%(default)s)")
    _add_devices(parser)
    return parser


def _add_devices(parser: argparse.ArgumentParser) -> None:
    """Where the model runs: devices, processes, replicas."""
    add = parser.add_argument
    add("--tp", type=_positive, default=1, metavar="N", help="devices to lay the model over (%(default)s)")
    add("--disaggregation", type=_split, metavar="prefill=N,decode=M",
        help="prefill and decode on devices of their own")  # fmt: skip
    add("--nnodes", type=_positive, default=1, metavar="N", help="processes that share the devices (%(default)s)")
    add("--node-rank", type=int, default=0, metavar="R", help="which of them this is; 0 answers HTTP (%(default)s)")
    add("--dist-init-addr", metavar="HOST:PORT", help="where they meet: a free port of node 0's machine")
    add("--dist-timeout", type=_not_negative, default=300, metavar="S",
        help="seconds they wait for each other (%(default)s)")  # fmt: skip
    add("--replicas", type=_positive, metavar="N", help="N servers behind one address, on Ray (docs/replicas.md)")
    add("--cpus-per-replica", type=_not_negative, default=1, metavar="N",
        help="that Ray sets aside, or 0 (%(default)s)")  # fmt: skip
    add("--gpus-per-replica", type=_not_negative, metavar="N",
        help="that Ray gives each (default: one a device, if any)")  # fmt: skip
    add("--ray-address", default="local", metavar="ADDR", help="a running Ray cluster's (default: start one here)")


@dataclass(frozen=True, slots=True)
class Nodes:
    """The flags that say which process of which server this is."""

    count: int
    rank: int
    #: Where the leader is met.
    host: str
    port: int
    #: Most seconds that nodes wait for each other at the start.
    seconds: float
    #: Devices over all of them.
    tp: int
    #: What all of them must have in common.
    terms: dict[str, Any]


def nodes_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Nodes | None:
    """None for a server of one process. Ends the program if the flags do not fit together."""
    count, rank = arguments.nnodes, arguments.node_rank
    if count == 1:
        if arguments.dist_init_addr is not None or rank:
            parser.error("--dist-init-addr and --node-rank: only with --nnodes")
        return None
    if not 0 <= rank < count:
        parser.error(f"--node-rank {rank}: expected 0 to {count - 1}")
    host, _, port = (arguments.dist_init_addr or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        parser.error("--dist-init-addr: expected HOST:PORT of node 0, the same for every node")
    if arguments.tp % count:
        parser.error(f"--tp {arguments.tp}: expected a multiple of --nnodes {count}, as many devices on every node")
    if arguments.disaggregation is not None or arguments.replicas is not None:
        parser.error("--nnodes: not with --disaggregation or --replicas")
    if arguments.cache_dir is not None:
        parser.error("--cache-dir: not with --nnodes; every node has only its own part of the cached pages")
    terms: dict[str, Any] = {name: version(name) for name in ("akv-jax", "jax")}
    terms |= {f"--{name.replace('_', '-')}": value for name, value in vars(arguments).items() if name not in OWN_FLAGS}
    return Nodes(count, rank, host.strip("[]"), int(port), arguments.dist_timeout, arguments.tp, terms)
