"""How the processes of a server find each other, talk, and notice that one has gone.

What they serve together is checked by `tests/serving/test_nodes.py`.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any, cast

import jax
import msgpack
import numpy as np
import pytest

from akv_jax.cache.persistence import Identity
from akv_jax.models.llama import config_from_hf
from akv_jax.nodes import _difference
from akv_jax.planning.plan import NO_MOVES, Moves, Segment, StepPlan
from akv_jax.runtime.multi_process import PROTOCOL, Followers, NodeError, follow, hear, join
from akv_jax.runtime.wire import MOST_FROM_STRANGERS, Closed, Connection, pack_plan, unpack_plan
from tests.models.checkpoints import HF_CONFIG
from tests.serving.running import eventually

TERMS = {"--tp": 4, "--nnodes": 3, "--reposition": "on_read"}


class Meeting:
    """The leader's side of it, and what it was told of losses."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.losses: queue.SimpleQueue[NodeError] = queue.SimpleQueue()
        self.followers = Followers(self.listener, 3, TERMS, self.losses.put)

    def join(self, rank: int, **terms: Any) -> Connection:
        return join("127.0.0.1", self.port, rank, {**TERMS, **terms}, seconds=5)

    def full(self) -> list[Connection]:
        """Both others are here."""
        connections = [self.join(2), self.join(1)]
        self.followers.gather(5)
        return connections


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.followers.close()


def refused(connection: Connection) -> str:
    with pytest.raises(NodeError, match="the leader refuses this node") as caught:
        hear(connection, "start")
    return str(caught.value)


def test_messages_reach_everybody_and_answers_come_by_rank(meeting: Meeting) -> None:
    second, first = meeting.full()
    meeting.followers.send("start", port=7)
    assert hear(first, "start")["port"] == hear(second, "start")["port"] == 7
    second.send("loaded", identity=2)
    first.send("loaded", identity=1)
    assert {rank: m["identity"] for rank, m in meeting.followers.expect("loaded").items()} == {1: 1, 2: 2}
    meeting.followers.close()
    assert first.receive()["kind"] == second.receive()["kind"] == "stop"
    first.close()
    second.close()
    assert meeting.losses.empty()


def test_who_cannot_take_part_is_told_why_and_the_others_still_come(meeting: Meeting) -> None:
    assert "--reposition is copy there, and on_read at the leader" in refused(
        meeting.join(1, **{"--reposition": "copy"})
    )
    assert "--seed is 3 there, and None at the leader" in refused(meeting.join(1, **{"--seed": 3}))
    assert "--node-rank 3: the leader expects 1 to 2" in refused(meeting.join(3))
    kept = meeting.full()
    assert "--node-rank 1 has joined already" in refused(meeting.join(1))
    stranger = Connection(socket.create_connection(("127.0.0.1", meeting.port)))
    stranger.send("hello", protocol=PROTOCOL + 1, rank=1, terms=TERMS)
    assert "another version" in refused(stranger)
    for rank in ("abc", True, [1], None, 1.0):
        stranger = Connection(socket.create_connection(("127.0.0.1", meeting.port)))
        stranger.send("hello", protocol=PROTOCOL, rank=rank, terms=TERMS)
        assert "the leader expects 1 to 2" in refused(stranger)
    stranger = Connection(socket.create_connection(("127.0.0.1", meeting.port)))
    stranger.send("hello", protocol=PROTOCOL, rank=1, terms={**TERMS, b"--tp": 1})
    assert "at the leader" in refused(stranger)
    assert meeting.losses.empty() and len(kept) == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", MOST_FROM_STRANGERS + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        struct.pack(">I", 1) + msgpack.packb(5),
        struct.pack(">I", 9) + msgpack.packb({"kind": 1})[:3],
        b"",
    ],
)
def test_strangers_do_no_harm(meeting: Meeting, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", meeting.port)) as stranger:
        stranger.settimeout(5)
        stranger.sendall(sent)
        # It may have been hung up on by now.
        with contextlib.suppress(OSError):
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(100) == b""
    meeting.full()


@pytest.mark.parametrize("rank", [1, 2])
def test_a_follower_that_goes_is_missed_at_once(meeting: Meeting, rank: int) -> None:
    connections = dict(zip((2, 1), meeting.full(), strict=True))
    waiting: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def wait() -> None:
        try:
            meeting.followers.expect("compiled")
        except NodeError as error:
            waiting.put(error)

    threading.Thread(target=wait).start()
    connections[3 - rank].send("compiled")
    connections[rank].close()
    loss = meeting.losses.get(timeout=5)
    assert f"node {rank} (127.0.0.1:" in str(loss) and "has gone: " in str(loss)
    # Whoever waits for it is told so, and so is whoever failed for the lack of it.
    assert waiting.get(timeout=5) is loss
    assert meeting.followers.explain(RuntimeError("a sum over all failed")) is loss
    assert meeting.losses.empty()


def test_without_a_loss_an_error_explains_itself(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("akv_jax.runtime.multi_process._NEWS_SECONDS", 0.01)
    error = RuntimeError("out of memory")
    assert meeting.followers.explain(error) is error


def test_nobody_waits_for_ever() -> None:
    meeting = Meeting()
    meeting.join(2)
    eventually(lambda: 2 in meeting.followers._joined)
    with pytest.raises(NodeError, match=r"no sign of node 1 within 0.1 s \(--dist-timeout\)"):
        meeting.followers.gather(0.1)
    meeting.followers.close()
    with pytest.raises(NodeError, match=f"no leader at 127.0.0.1:{meeting.port} within 0.1 s: Connection refused"):
        join("127.0.0.1", meeting.port, 1, TERMS, seconds=0.1)


def test_a_leader_that_goes_is_missed_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    connection = join("127.0.0.1", listener.getsockname()[1], 1, TERMS, seconds=5)
    accepted, _ = listener.accept()
    accepted.close()
    with pytest.raises(NodeError, match="the leader has gone"):
        hear(connection, "start")
    listener.close()


@pytest.mark.parametrize("dies", [True, False])
def test_a_step_that_fails_is_explained_by_a_leader_that_dies(monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    """The step notices first, as a sum over processes does."""
    monkeypatch.setattr("akv_jax.runtime.multi_process._NEWS_SECONDS", 5 if dies else 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Connection(socket.create_connection(listener.getsockname()))
        theirs = Connection(listener.accept()[0])

    class Failing:
        def forward(self, plan: StepPlan) -> Any:
            if dies:
                theirs.close()
            raise RuntimeError("a sum over all failed")

    nothing = np.zeros(0, np.int32)
    theirs.send("plan", plan=pack_plan(StepPlan(nothing, nothing, nothing, (), NO_MOVES, nothing)))
    losses: queue.SimpleQueue[NodeError] = queue.SimpleQueue()
    failure = pytest.raises(NodeError, match="gone") if dies else pytest.raises(RuntimeError, match="a sum")
    with failure:
        follow(ours, cast(Any, Failing()), losses.put)
    assert losses.empty() is not dies
    ours.close()


def test_silence_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = Connection(socket.create_connection(listener.getsockname()))
        with pytest.raises(Closed, match=r"silent for 0.05 s"):
            connection.receive(0.05)
        connection.close()


def test_a_plan_is_the_same_at_the_other_end() -> None:
    """R1: several segments, one with an empty list; moves or none."""
    rng = np.random.default_rng(0)

    def column(count: int) -> np.ndarray:
        return rng.integers(-(2**31), 2**31, count).astype(np.int32)

    segments = (Segment(0, 3, column(9), column(9), column(9)), Segment(3, 4, column(0), column(0), column(0)))
    for moves in (NO_MOVES, Moves(column(5), column(5), column(5))):
        plan = StepPlan(column(4), column(4), column(4), segments, moves, column(2))
        again = unpack_plan(msgpack.unpackb(msgpack.packb(pack_plan(plan))))  # type: ignore[arg-type]
        assert jax.tree.structure(_values(again)) == jax.tree.structure(_values(plan))
        jax.tree.map(np.testing.assert_array_equal, _values(again), _values(plan))


def _values(plan: StepPlan) -> list[Any]:
    lists = [[s.start, s.stop, s.pages, s.positions, s.shifts] for s in plan.segments]
    moves = [plan.moves.source, plan.moves.target, plan.moves.shift]
    return [plan.tokens, plan.positions, plan.destinations, lists, moves, plan.logit_rows]


def test_another_model_is_recognised() -> None:
    """By its architecture, its weights and its dtype; what it is called does not matter."""
    config = config_from_hf(HF_CONFIG)
    mine = Identity(config, "a" * 64, "float32").plain()
    other = config_from_hf({**HF_CONFIG, "rope_theta": 5.0})
    assert _difference(mine, {**mine, "name": "other"}) is None
    assert "set --dtype" in str(_difference(mine, Identity(config, "a" * 64, "bfloat16").plain()))
    assert "differs from the leader's model in layers" in str(
        _difference(mine, Identity(other, "a" * 64, "float32").plain())
    )
    assert "weights" in str(_difference(mine, Identity(config, "b" * 64, "float32").plain()))
