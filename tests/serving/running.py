"""A real uvicorn server in a thread, and a tiny model with a real byte-level tokenizer."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import openai
import tokenizers
import uvicorn
from tokenizers import decoders, models, pre_tokenizers

from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.config import Layer, ModelConfig, Rotary
from akv_jax.models.load import LoadedModel
from akv_jax.models.weights.table import build_params, weight_table
from serving.app import create_app
from serving.logging import create_logger
from serving.settings import Settings
from serving.state import Server

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


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
def running(engine: Any, **settings: Any) -> Iterator[Running]:
    """Serve `engine` on a free port. Does not start the engine; stops it at the end, as the app does."""
    log = io.StringIO()
    app = create_app(engine, Settings(**settings), create_logger("debug", log))
    listener = socket.create_server(("127.0.0.1", 0))
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


def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def send(server: Running, body: bytes, length: int | None = None) -> socket.socket:
    """POST by hand, so that the connection can be cut."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def byte_tokenizer() -> Tokenizer:
    """One token a byte, then ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend, "byte_level", eos_token_id=backend.token_to_id("<|im_end|>"))


def tiny_model(max_positions: int = 1024) -> LoadedModel:
    """Two layers of random float32 weights that know nothing. (With one, K and V would not depend on the history.)"""
    tokenizer = byte_tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        layers=(Layer(Rotary(8)),) * 2,
        max_positions=max_positions,
        tie_embeddings=True,
        name="tiny",
    )
    random = np.random.default_rng(0)

    def leaf(info: Any) -> np.ndarray:
        return random.normal(0, 0.3, info.shape).astype(np.float32)

    return LoadedModel(
        config=config,
        params=build_params(weight_table(config), leaf),
        tokenizer=tokenizer,
        chat_template=None,
        eos_token_ids=(tokenizer.eos_token_id or 0,),
        bos_token="",
        eos_token="<|im_end|>",
        name="tiny",
        source="random",
    )
