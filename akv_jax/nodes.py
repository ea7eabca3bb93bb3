"""`--nnodes`: one server out of several processes, on one machine or many. How they find each other, and how they end.

Node 0 is the leader: it answers HTTP, schedules and samples. The others start with the same flags and another
`--node-rank`, and run its steps (`runtime/multi_process.py`). They meet at `--dist-init-addr`, a port of the leader's;
JAX's own coordinator has another port, which the leader tells them. None of it is for a network with strangers in it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import structlog

from akv_jax.cache.persistence import Identity
from akv_jax.config import EngineConfig
from akv_jax.flags import Nodes
from akv_jax.models.load import LoadedModel
from akv_jax.models.weights.digest import weights_digest
from akv_jax.runtime.multi_process import Followers, Leader, NodeError, follow, hear, join
from akv_jax.runtime.placement import model_mesh
from akv_jax.runtime.runner import Runner
from akv_jax.runtime.wire import Connection

if TYPE_CHECKING:
    from jax.sharding import Mesh

#: Seconds that nodes wait for each other at the end.
_SHUTDOWN_SECONDS = 10
_log = structlog.get_logger(__name__)


def mesh_of(nodes: Nodes) -> Mesh:
    """The devices of all nodes, as many from each. NodeError if some node has too few."""
    each = nodes.tp // nodes.count
    by_rank = [[d for d in jax.devices() if d.process_index == rank] for rank in range(nodes.count)]
    for rank, devices in enumerate(by_rank):
        if len(devices) < each:
            raise NodeError(f"--tp {nodes.tp}: {each} devices of node {rank} are needed, and it has {len(devices)}")
    return model_mesh([device for devices in by_rank for device in devices[:each]])


# -- the leader ------------------------------------------------------------------------------------------------------


def meet(nodes: Nodes, listener: socket.socket, lost: Callable[[NodeError], None]) -> Followers:
    """Wait for all followers and let JAX know about them. Before anything looks at devices."""
    followers = Followers(listener, nodes.count, nodes.terms, lost)
    followers.gather(nodes.seconds)
    with socket.create_server((nodes.host, 0), family=listener.family) as free:
        port = free.getsockname()[1]
    followers.send("start", port=port)
    _initialize(nodes, port)
    return followers


def lead(followers: Followers, model: LoadedModel, config: EngineConfig, runner: Runner) -> Leader:
    """Once the model is there: make sure that everybody has the same, and the sizes that memory allows here."""
    mine = _identity(model, config)
    for rank, message in followers.expect("loaded").items():
        if reason := _difference(mine, message["identity"]):
            raise followers.refuse(rank, reason)
    followers.send("engine", config=asdict(config))
    return Leader(runner, followers)


def leave(followers: Followers) -> None:
    """A clean end, of all nodes."""
    followers.close()
    jax.distributed.shutdown()


def _identity(model: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    return Identity(model.config, weights_digest(model.params), config.dtype).plain()


def _difference(mine: dict[str, Any], other: dict[str, Any]) -> str | None:
    """What another node's model has different, None if it is the same."""
    if mine["dtype"] != other["dtype"]:
        return f"it computes in {other['dtype']}, and the leader in {mine['dtype']}: set --dtype"
    if different := [name for name in mine["model"] if mine["model"][name] != other["model"].get(name)]:
        return f"its model {other['name']} differs from the leader's {mine['name']} in {', '.join(different)}"
    if mine["weights"] != other["weights"]:
        return (
            f"the weights of its {other['name']} are not the leader's ({other['weights'][:12]}, {mine['weights'][:12]})"
        )
    return None


# -- a follower ------------------------------------------------------------------------------------------------------


def run_follower(nodes: Nodes, load: Callable[[], tuple[LoadedModel, EngineConfig]]) -> None:
    """Take part until the leader ends. NodeError if it refuses this node; if it disappears, the process ends.

    `load` loads the model, and says how this node by itself would configure an engine.
    """
    connection = join(nodes.host, nodes.port, nodes.rank, nodes.terms, nodes.seconds)
    _initialize(nodes, hear(connection, "start")["port"])
    mesh = mesh_of(nodes)
    model, config = load()
    connection.send("loaded", identity=_identity(model, config))
    runner = Runner(model.config, model.params, _agreed(connection), mesh)
    _log.info("following", leader=connection.peer, devices=str(runner.placement))
    follow(connection, runner, _end)
    jax.distributed.shutdown()


def _agreed(connection: Connection) -> EngineConfig:
    fields = hear(connection, "engine")["config"]
    return EngineConfig(**{**fields, "token_buckets": tuple(fields["token_buckets"])})


def _end(error: NodeError) -> None:
    """From beside a step that may never end."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    os._exit(1)


# -- both ------------------------------------------------------------------------------------------------------------


def _initialize(nodes: Nodes, port: int) -> None:
    # Neither has an effect on GPUs.
    jax.config.update("jax_num_cpu_devices", nodes.tp // nodes.count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take over SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    address = f"{f'[{nodes.host}]' if ':' in nodes.host else nodes.host}:{port}"
    jax.distributed.initialize(
        address,
        nodes.count,
        nodes.rank,
        initialization_timeout=round(nodes.seconds),
        coordinator_bind_address=address,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
    )
