"""A real uvicorn server in a thread or a process, and a tiny model for it."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn

from akv_jax.models.llama import config_from_hf
from akv_jax.serve import listen
from akv_jax.stats import Clock
from serving.app import create_app
from serving.logging import create_logger
from serving.settings import Settings
from serving.state import Server
from tests.models.checkpoints import CONTROL, HF_CONFIG, hf_tensors, random_params, write_hf


@dataclass
class Running:
    """A server that answers at `url`, with what a test wants to look into."""

    url: str
    state: Server
    log: io.StringIO
    http: httpx.Client = field(init=False)
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=30)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=30)

    def post(self, path: str, body: Any) -> httpx.Response:
        """Bytes as they are, anything else as JSON."""
        return self.http.post(path, content=body) if isinstance(body, bytes) else self.http.post(path, json=body)


@contextmanager
def running(engine: Any, clock: Clock = time.monotonic, **settings: Any) -> Iterator[Running]:
    """Serve `engine` on a free port. Does not start the engine; stops it at the end, as the app does.

    `clock` times the requests.
    """
    log = io.StringIO()
    app = create_app(engine, Settings(**settings), create_logger("debug", log), clock)
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        eventually(lambda: server.started)
        result = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", app.state.server, log)
        yield result
        result.http.close()
        result.client.close()
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


class Process:
    """The command in a process of its own."""

    def __init__(self, *flags: str, cache: Path, quick: bool = True) -> None:
        """`quick`: little is run afterwards, so compile without optimising much. `cache`: models and programs."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "akv_jax.serve", "--port", str(port), *flags]
        environ = {**os.environ, "AKV_JAX_CACHE_DIR": str(cache), "AKV_API_KEY": "sesame"}
        if quick:
            environ |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, headers={"Authorization": "Bearer sesame"}).status_code
        except (httpx.ConnectError, httpx.TimeoutException):
            # Not listening yet, or a machine too busy to answer in time.
            assert self.process.poll() is None
            return 0

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; exit code and what it wrote to stderr."""
        self.process.send_signal(signal.SIGTERM)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def send(
    server: Running | str,
    body: bytes,
    length: int | None = None,
    path: str = "/v1/chat/completions",
    headers: str = "",
) -> socket.socket:
    """POST by hand, so that the connection can be cut. `server` may be a URL; `headers` end with CRLF each."""
    url = server if isinstance(server, str) else server.url
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {length or len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def write_tiny_model(folder: Path, soon_ends: bool = False) -> Path:
    """A Hugging Face directory: two layers of random weights, a token a byte, ChatML.

    `soon_ends`: the end token is likely now and then, whatever came before.
    """
    config = config_from_hf(HF_CONFIG)
    tensors = hf_tensors(config, random_params(config))
    if soon_ends:
        tensors["lm_head.weight"][CONTROL.index("<|im_end|>")] *= 2
    return write_hf(folder, HF_CONFIG, tensors)


def check_pages(server: Running) -> None:
    """C7, and that nobody holds a page any more."""
    eventually(lambda: "akv:num_requests_running 0.0" in server.http.get("/metrics").text)
    asyncio.run(server.state.engine.check())
    assert 'akv:pages{state="private"} 0.0' in server.http.get("/metrics").text
