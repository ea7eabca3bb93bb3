"""One model over the devices of several processes (DESIGN R5): a leader that plans, and followers that run its plans.

JAX runs a program over several processes if each of them calls it with its part of the arguments. So the leader sends
every plan to the followers over a connection of its own, and all of them make their batch of it and run the step; the
leader alone samples, for it is told all logits. The end of a connection is how a death is noticed: the system closes it
at once, whatever the process was doing.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import structlog

from akv_jax.planning.plan import StepPlan
from akv_jax.runtime.runner import Progress, Runner, SamplingPlan, StepResult
from akv_jax.runtime.wire import MOST_BYTES, MOST_FROM_STRANGERS, Closed, Connection, pack_plan, unpack_plan

#: Raised with every change of the messages.
PROTOCOL = 1
#: Seconds that a new connection has to say who it is.
HELLO_SECONDS = 10.0
#: Seconds that a step's failure may be ahead of the news that a node has gone, which explains it.
_NEWS_SECONDS = 3.0
#: Seconds between two attempts to reach the leader.
_RETRY_SECONDS = 0.5
_log = structlog.get_logger(__name__)


class NodeError(Exception):
    """The processes do not come together, or one has gone. The message is for whoever started them."""


# -- the leader ------------------------------------------------------------------------------------------------------


class Followers:
    """The leader's connections to the other processes. Rank 0 is the leader's own."""

    def __init__(
        self, listener: socket.socket, nodes: int, terms: dict[str, Any], lost: Callable[[NodeError], None]
    ) -> None:
        """Take in whoever comes with these terms, and refuse others, for as long as the server runs.

        `lost` is called, in a thread of its own, when one has gone that should not have.
        """
        self._listener, self._nodes, self._terms, self._on_loss = listener, nodes, terms, lost
        self._joined: dict[int, Connection] = {}
        self._inbox: queue.SimpleQueue[tuple[int, dict[str, Any]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._loss: NodeError | None = None
        self._closing = False
        threading.Thread(target=self._accept, name="nodes", daemon=True).start()

    def gather(self, seconds: float) -> None:
        """Block until all are here. NodeError after that many seconds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while len(self._joined) < self._nodes - 1:
                missing = ", ".join(str(rank) for rank in range(1, self._nodes) if rank not in self._joined)
                _log.info("waiting for other nodes", missing=missing, address=_address(self._listener.getsockname()))
                if not self._changed.wait(deadline - time.monotonic()):
                    raise NodeError(f"no sign of node {missing} within {seconds:g} s (--dist-timeout)")
                self._raise_loss()

    def send(self, kind: str, **fields: Any) -> None:
        """To all. Whoever cannot be reached is found lost by whoever listens to it."""
        for connection in self._joined.values():
            with contextlib.suppress(Closed):
                connection.send(kind, **fields)

    def expect(self, kind: str) -> dict[int, dict[str, Any]]:
        """One message of that kind from each, by rank. NodeError if one is lost meanwhile."""
        got: dict[int, dict[str, Any]] = {}
        while len(got) < self._nodes - 1:
            self._raise_loss()
            item = self._inbox.get()
            if item is not None:
                rank, message = item
                if message["kind"] != kind:
                    raise NodeError(f"{self._name(rank)} said {message['kind']!r}, {kind!r} was expected")
                got[rank] = message
        return got

    def refuse(self, rank: int, reason: str) -> NodeError:
        """Tell one why it cannot take part, and what to raise for it."""
        self._closing = True
        with contextlib.suppress(Closed):
            self._joined[rank].send("refused", reason=reason)
        return NodeError(f"{self._name(rank)} cannot take part: {reason}")

    def explain(self, error: Exception) -> Exception:
        """The loss of a follower if that is what made a step fail, else the error itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, _NEWS_SECONDS)
        return self._loss or error

    def close(self) -> None:
        """A clean end: the others end too."""
        self._closing = True
        self.send("stop")
        with contextlib.suppress(OSError):
            # Closing alone would not wake who waits in it.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _name(self, rank: int) -> str:
        return f"node {rank} ({self._joined[rank].peer})"

    def _raise_loss(self) -> None:
        if self._loss is not None:
            raise self._loss

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if self._closing or self._listener.fileno() < 0:
                    return
                _log.warning("the nodes' port could not accept a connection", reason=str(error))
                time.sleep(_RETRY_SECONDS)
                continue
            threading.Thread(target=self._greet, args=(connected,), name="node", daemon=True).start()

    def _greet(self, connected: socket.socket) -> None:
        """Hear who it is; then listen to it until it goes."""
        try:
            connection = Connection(connected, MOST_FROM_STRANGERS)
            hello = connection.receive(HELLO_SECONDS)
            with self._changed:
                rank: Any = hello.get("rank")
                reason = self._objection(hello)
                if reason is None:
                    connection.most = MOST_BYTES
                    self._joined[rank] = connection
                    _log.info("node joined", rank=rank, address=connection.peer)
                    self._changed.notify_all()
            if reason is not None:
                _log.warning("node refused", rank=rank, address=connection.peer, reason=reason)
                connection.send("refused", reason=reason)
                connection.close()
                return
        except (Closed, OSError) as error:
            _log.warning("a connection to the nodes' port came to nothing", reason=str(error))
            connected.close()
            return
        self._listen(rank, connection)

    def _objection(self, hello: dict[str, Any]) -> str | None:
        """Why somebody cannot take part, None if it can."""
        if hello["kind"] != "hello" or hello.get("protocol") != PROTOCOL or not isinstance(hello.get("terms"), dict):
            return f"it is no node, or one of another version (the leader's protocol is {PROTOCOL})"
        rank = hello.get("rank")
        for name in sorted({*self._terms, *hello["terms"]}, key=str):
            mine, other = self._terms.get(name), hello["terms"].get(name)
            if mine != other:
                return f"{name} is {other} there, and {mine} at the leader"
        if type(rank) is not int or not 0 < rank < self._nodes:
            return f"--node-rank {rank}: the leader expects 1 to {self._nodes - 1}"
        if rank in self._joined:
            return (
                f"--node-rank {rank} has joined already, from {self._joined[rank].peer}; to start anew, stop the leader"
            )
        return None

    def _listen(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                self._inbox.put((rank, connection.receive()))
        except Closed as error:
            reason = str(error)
        if self._closing:
            return
        with self._changed:
            loss = self._loss = self._loss or NodeError(f"{self._name(rank)} has gone: {reason}")
            self._changed.notify_all()
        self._inbox.put(None)
        self._on_loss(loss)


class Leader:
    """An `engine.Device` whose steps run in all processes."""

    def __init__(self, runner: Runner, followers: Followers) -> None:
        self._runner, self._followers = runner, followers

    def warm_up(self, progress: Progress = lambda *_: None) -> None:
        """Everybody compiles, then all run everything once."""
        self._followers.send("compile")
        compiled = self._runner.compile(progress)
        # Nobody waits in a sum over all for somebody who is still compiling.
        self._followers.expect("compiled")
        self._runner.rehearse(self.run, progress, compiled)

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """See `Runner.run`. NodeError if a follower is lost."""
        self._followers.send("plan", plan=pack_plan(plan))
        try:
            return self._runner.run(plan, sampling)
        except Exception as error:
            raise self._followers.explain(error) from error


# -- a follower ------------------------------------------------------------------------------------------------------


def join(host: str, port: int, rank: int, terms: dict[str, Any], seconds: float) -> Connection:
    """A connection to the leader, which may not be there yet. NodeError after that many seconds."""
    deadline = time.monotonic() + seconds
    _log.info("looking for the leader", address=f"{host}:{port}")
    while True:
        try:
            connection = Connection(socket.create_connection((host, port), timeout=HELLO_SECONDS))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or error
                raise NodeError(f"no leader at {host}:{port} within {seconds:g} s: {reason} (--dist-timeout)") from None
            time.sleep(_RETRY_SECONDS)
    with _leader_gone():
        connection.send("hello", protocol=PROTOCOL, rank=rank, terms=terms)
    return connection


def hear(connection: Connection, kind: str) -> dict[str, Any]:
    """The leader's next message, which is of that kind. NodeError if it refuses, or has gone."""
    with _leader_gone():
        message = connection.receive()
    if message["kind"] == "refused":
        raise NodeError(f"the leader refuses this node: {message['reason']}")
    if message["kind"] != kind:
        raise NodeError(f"the leader said {message['kind']!r}, {kind!r} was expected")
    return message


def follow(connection: Connection, runner: Runner, gone: Callable[[NodeError], None]) -> None:
    """Do what the leader says until it says stop.

    `gone` is called, in a thread of its own, if the leader disappears: this one may be waiting for it in a step.
    """
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    losses: queue.SimpleQueue[NodeError] = queue.SimpleQueue()

    def listen() -> None:
        try:
            while True:
                message = connection.receive()
                inbox.put(message)
                if message["kind"] == "stop":
                    return
        except Closed as error:
            loss = NodeError(f"the leader has gone: {error}")
            losses.put(loss)
            gone(loss)

    threading.Thread(target=listen, name="leader", daemon=True).start()
    while (message := inbox.get())["kind"] != "stop":
        if message["kind"] == "compile":
            runner.compile(samples=False)
            with _leader_gone():
                connection.send("compiled")
        elif message["kind"] == "plan":
            try:
                # What goes wrong in a step is to be known before the next.
                jax.block_until_ready(runner.forward(unpack_plan(message["plan"])))
            except Exception:
                # A step may notice first that the leader is no more, and does not say so.
                with contextlib.suppress(queue.Empty):
                    raise losses.get(timeout=_NEWS_SECONDS) from None
                raise
        else:
            raise NodeError(f"the leader said {message['kind']!r}, which is nothing to do")


@contextlib.contextmanager
def _leader_gone() -> Iterator[None]:
    try:
        yield
    except Closed as error:
        raise NodeError(f"the leader has gone: {error}") from None


def _address(name: Any) -> str:
    return f"{name[0]}:{name[1]}"
