"""Messages between the processes of one server: msgpack in frames over TCP. Nothing received is code or a pickle."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any, cast

import msgpack
import numpy as np

from akv_jax.planning.plan import Moves, Segment, StepPlan

#: Longest message, bytes: of somebody not known yet, and of a plan with the longest page lists.
MOST_FROM_STRANGERS, MOST_BYTES = 1 << 16, 1 << 31
_LENGTH = struct.Struct(">I")
#: Seconds until a machine that has gone without a word is missed: idle time, pause between probes, probes.
_KEEP_ALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 15_000))


class Closed(Exception):
    """The other side has gone, or does not speak this protocol; the message says which."""


class Connection:
    """Sends and receives messages: a kind and fields of plain values. One thread may send while another receives."""

    def __init__(self, connected: socket.socket, most: int = MOST_BYTES) -> None:
        self._socket, self._sending = connected, threading.Lock()
        #: Longest message that is taken, bytes.
        self.most = most
        self.peer = "{}:{}".format(*connected.getpeername()[:2])
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEP_ALIVE:
            # Not every system has all of them.
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: str, **fields: Any) -> None:
        """Closed if it cannot be sent."""
        data = cast(bytes, msgpack.packb({"kind": kind, **fields}))
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None

    def receive(self, seconds: float | None = None) -> dict[str, Any]:
        """The next message, with its `kind`. Closed if there comes none, or none within that time."""
        try:
            self._socket.settimeout(seconds)
            (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
            if length > self.most:
                raise Closed("it does not speak this protocol")
            message = msgpack.unpackb(self._exactly(length))
        except TimeoutError:
            raise Closed(f"silent for {seconds:g} s") from None
        except OSError as error:
            raise Closed(error.strerror or str(error)) from None
        except (ValueError, msgpack.UnpackException):
            raise Closed("it does not speak this protocol") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise Closed("it does not speak this protocol")
        return message

    def _exactly(self, count: int) -> bytearray:
        data, filled = bytearray(count), 0
        while filled < count:
            got = self._socket.recv_into(memoryview(data)[filled:])
            if got == 0:
                raise Closed("connection closed")
            filled += got
        return data

    def close(self) -> None:
        """Wakes whoever receives."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def pack_plan(plan: StepPlan) -> dict[str, Any]:
    """A plan as plain values: numbers, and the bytes of int32 arrays."""
    return {
        "tokens": _bytes(plan.tokens),
        "positions": _bytes(plan.positions),
        "destinations": _bytes(plan.destinations),
        "segments": [[s.start, s.stop, _bytes(s.pages), _bytes(s.positions), _bytes(s.shifts)] for s in plan.segments],
        "moves": [_bytes(plan.moves.source), _bytes(plan.moves.target), _bytes(plan.moves.shift)],
        "logit_rows": _bytes(plan.logit_rows),
    }


def unpack_plan(packed: dict[str, Any]) -> StepPlan:
    """What `pack_plan` was given."""
    return StepPlan(
        _array(packed["tokens"]),
        _array(packed["positions"]),
        _array(packed["destinations"]),
        tuple(Segment(start, stop, *map(_array, lists)) for start, stop, *lists in packed["segments"]),
        Moves(*map(_array, packed["moves"])),
        _array(packed["logit_rows"]),
    )


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array, "<i4").tobytes()


def _array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i4")
