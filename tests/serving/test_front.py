"""The front of several replicas, over real applications in this process; tests/serving/test_ray.py has it on Ray."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import httpx
import msgpack
import pytest
import uvicorn
from starlette.types import Message

from akv_jax.errors import Reason, RequestError
from akv_jax.models.load import LoadedModel
from akv_jax.request import Output, Request
from akv_jax.serve import listen
from serving.app import create_app
from serving.logging import create_logger
from serving.replicas.affinity import rank
from serving.replicas.front import ACCEPTED, Answer, NoReplica, ReplicaLost, create_front
from serving.replicas.in_process import messages_of
from serving.settings import Settings
from tests.serving.fake_engine import USAGE, FakeEngine, endless, failing, silent
from tests.serving.running import Running, eventually, running, send

KEY = "sesame"


async def two_tokens(request: Request) -> AsyncGenerator[Output, None]:
    yield Output(request.request_id, (65,), "A")
    yield Output(request.request_id, (66,), "B", finish_reason="stop", usage=USAGE)


class InProcess:
    """Replicas that are applications of this process. `lost` die when they are asked, `breaking` after a few words."""

    def __init__(self, engines: dict[str, FakeEngine], settings: Settings) -> None:
        self.engines = engines
        log = create_logger("debug", io.StringIO())
        self._apps = {name: create_app(engine, settings, log) for name, engine in engines.items()}  # pyright: ignore
        #: Of their front.
        self.address = ""
        self.lost: set[str] = set()
        self.breaking: set[str] = set()
        self.asked: list[str] = []

    async def send(self, scope: dict[str, Any], body: bytes, key: str) -> AsyncGenerator[Message, None]:
        names = [name for name in self._apps if name not in self.lost or name not in self.asked]
        if not names:
            raise NoReplica
        name = names[rank(key, names)[0]]
        self.asked.append(name)
        if name in self.lost:
            raise ReplicaLost("killed")
        yield {"type": ACCEPTED, "replica": name}
        sent = 0
        messages = messages_of(self._apps[name], scope, body)
        try:
            async for message in messages:
                yield message
                sent += 1
                if name in self.breaking and sent == 3:
                    raise ReplicaLost("killed")
        finally:
            await messages.aclose()

    async def send_all(self, scope: dict[str, Any], seconds: float) -> list[Answer]:
        answers = []
        for name, app in self._apps.items():
            if name not in self.lost:
                messages = [message async for message in messages_of(app, scope, b"")]
                body = b"".join(message.get("body", b"") for message in messages[1:])
                answers.append(Answer(name, messages[0]["status"], messages[0]["headers"], body))
        return answers


@pytest.fixture(scope="module")
def _served(model: LoadedModel) -> Iterator[tuple[httpx.Client, InProcess, Running]]:
    settings = Settings(api_key=KEY, max_body_size=10_000, keep_alive_seconds=0.2)
    replicas = InProcess({name: FakeEngine(model, two_tokens) for name in "01"}, settings)
    listener = listen("127.0.0.1", 0)
    front = create_front(replicas, settings, create_logger("debug", io.StringIO()))
    server = uvicorn.Server(uvicorn.Config(front, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    # The same engine without a front, to compare with.
    with running(FakeEngine(model, two_tokens), api_key=KEY, max_body_size=10_000) as alone:
        replicas.address = url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=30, headers={"Authorization": f"Bearer {KEY}"}) as http:
            alone.http.headers["Authorization"] = f"Bearer {KEY}"
            yield http, replicas, alone
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()


@pytest.fixture
def served(_served: tuple[httpx.Client, InProcess, Running]) -> Iterator[tuple[httpx.Client, InProcess, Running]]:
    yield _served
    _, replicas, alone = _served
    for engine in (*replicas.engines.values(), alone.state.engine):
        engine.script, engine.aborted = two_tokens, 0  # pyright: ignore
    replicas.lost, replicas.breaking, replicas.asked = set(), set(), []


Served = tuple[httpx.Client, InProcess, Running]


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


@pytest.mark.parametrize(
    "method, path, body",
    [
        ("GET", "/v1/models", None),
        ("GET", "/v1/chat/completions", None),
        ("GET", "/nowhere", None),
        ("PUT", "/v1/models", b"x"),
        ("POST", "/v1/chat/completions", json.dumps(chat("Hi")).encode()),
        ("POST", "/v1/chat/completions", b"{"),
        ("POST", "/v1/chat/completions", json.dumps(chat("Hi", cache={"drop": {"9": [0]}})).encode()),
        ("POST", "/v1/chat/completions", b'{"messages": 5}'),
        ("POST", "/v1/chat/completions", b"x" * 20_000),
        ("POST", "/v1/completions", b'{"prompt": [1, 2], "logprobs": 99}'),
        ("POST", "/v1/sequence", b'{"operations": [["append", [1, 2]]], "max_tokens": 2}'),
        ("POST", "/tokenize", b'{"prompt": "Hi"}'),
        ("POST", "/detokenize", b'{"tokens": [72, 105]}'),
    ],
)
@pytest.mark.parametrize("authorized", [True, False])
def test_answers_are_those_of_one_server(served: Served, method: str, path: str, body: Any, authorized: bool) -> None:
    """Status, headers and body, refusals included."""
    http, _, alone = served
    headers = {} if authorized else {"Authorization": "Bearer wrong"}
    one = alone.http.request(method, path, content=body, headers=headers)
    many = http.request(method, path, content=body, headers=headers)
    assert many.status_code == one.status_code

    def plain(response: httpx.Response) -> Any:
        value = response.json()
        return (
            {k: v for k, v in value.items() if k not in ("id", "created")}
            if "data" not in value
            else len(value["data"])
        )

    assert plain(many) == plain(one)
    left_out = {"date", "server", "x-akv-replica"}
    assert {k: v for k, v in many.headers.items() if k not in left_out | {"content-length"}} == {
        k: v for k, v in one.headers.items() if k not in left_out | {"content-length"}
    }


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.SHUTTING_DOWN, Reason.POOL_TOO_SMALL])
def test_refusals_keep_their_headers(served: Served, reason: Reason) -> None:
    http, replicas, alone = served
    for engine in (*replicas.engines.values(), alone.state.engine):
        engine.script = failing(RequestError(reason, "no"))  # pyright: ignore
    one, many = (client.post("/v1/chat/completions", json=chat("Hi")) for client in (alone.http, http))
    assert (many.status_code, many.json()) == (one.status_code, one.json())
    for name in ("retry-after", "x-should-retry"):
        assert many.headers.get(name) == one.headers.get(name)


def test_conversations_go_home_and_spread(served: Served) -> None:
    http, _, _ = served
    homes = {}
    for number in range(12):
        history = [{"role": "user", "content": f"task {number}"}]
        for _ in range(3):
            response = http.post("/v1/chat/completions", json={"messages": history})
            homes.setdefault(number, set()).add(response.headers["x-akv-replica"])
            history += [{"role": "assistant", "content": "AB"}, {"role": "user", "content": "go on"}]
    assert all(len(seen) == 1 for seen in homes.values())
    assert set.union(*homes.values()) == {"0", "1"}


def test_msgpack_has_the_same_home_as_json(served: Served) -> None:
    http, replicas, _ = served
    for number in range(6):
        body = {"operations": [["append", [number, 2]]], "max_tokens": 2}
        replicas.asked.clear()
        http.post("/v1/sequence", json=body)
        packed = http.post("/v1/sequence", content=msgpack.packb(body), headers={"Content-Type": "application/msgpack"})
        assert packed.status_code == 200 and msgpack.unpackb(packed.content)["choices"]
        assert replicas.asked[0] == replicas.asked[1]


def test_events_come_as_they_are_made(served: Served) -> None:
    http, replicas, _ = served
    for engine in replicas.engines.values():
        engine.script = endless
    with http.stream("POST", "/v1/chat/completions", json=chat("Hi", stream=True)) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        # An endless stream that is held back anywhere would never show anything.
        for _ in range(10):
            next(lines)
    eventually(lambda: not any(engine.running for engine in replicas.engines.values()))
    assert sum(engine.aborted for engine in replicas.engines.values()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, endless])
def test_hanging_up_aborts_the_request(served: Served, script: Any, stream: bool) -> None:
    _, replicas, _ = served
    for engine in replicas.engines.values():
        engine.script = script
    body = json.dumps(chat("Hi", stream=stream)).encode()
    connection = send(replicas.address, body, headers=f"Authorization: Bearer {KEY}\r\n")
    eventually(lambda: sum(engine.running for engine in replicas.engines.values()) == 1)
    connection.close()
    eventually(lambda: sum(engine.running for engine in replicas.engines.values()) == 0)
    assert sum(engine.aborted for engine in replicas.engines.values()) == 1


def test_a_replica_that_dies_before_it_answers_is_replaced(served: Served) -> None:
    http, replicas, _ = served
    home = http.post("/v1/chat/completions", json=chat("Hi")).headers["x-akv-replica"]
    replicas.asked.clear()
    replicas.lost.add(home)
    response = http.post("/v1/chat/completions", json=chat("Hi"))
    assert response.status_code == 200
    assert [response.headers["x-akv-replica"]] == [name for name in "01" if name != home]
    assert replicas.asked[0] == home


def test_a_stream_whose_replica_dies_says_so(served: Served) -> None:
    http, replicas, _ = served
    for engine in replicas.engines.values():
        engine.script = endless
    replicas.breaking.update("01")
    with http.stream("POST", "/v1/chat/completions", json=chat("Hi", stream=True)) as response:
        events = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert "[DONE]" not in events[-1]


def test_without_replicas_there_is_a_503_that_says_when_to_try_again(served: Served) -> None:
    http, replicas, _ = served
    replicas.lost.update("01")
    replicas.asked.extend("01")
    assert http.get("/health").status_code == 200
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/ready"), ("POST", "/flush_cache")):
        response = http.request(method, path, **({"json": chat("Hi")} if "chat" in path else {}))
        assert response.status_code == 503 and response.headers["retry-after"] == "5"
        assert response.json()["error"]["code"] == "not_ready"
    assert "akv:replicas 0" in http.get("/metrics").text


def test_questions_to_all(served: Served) -> None:
    http, replicas, _ = served
    assert http.get("/ready").json() == {"status": "ready", "replicas": 2}
    assert http.post("/flush_cache").json() == {"freed_pages": 6, "replicas": {"0": 3, "1": 3}}
    assert http.post("/flush_cache", headers={"Authorization": ""}).status_code == 401
    metrics = http.get("/metrics").text
    for name in "01":
        assert f'akv:pages{{replica="{name}",state="free"}} 250.0' in metrics
    replicas.lost.add("1")
    assert http.get("/ready").json() == {"status": "ready", "replicas": 1}


def test_hanging_up_while_sending_asks_nobody(served: Served) -> None:
    http, replicas, _ = served
    send(replicas.address, b"{", length=100, headers=f"Authorization: Bearer {KEY}\r\n").close()
    assert http.get("/health").status_code == 200
    assert replicas.asked == []
