"""`python -m akv_jax.serve` as a person runs it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from akv_jax.flags import FlagError, argument_parser
from akv_jax.models.load import LoadedModel
from akv_jax.serve import listen, main, server_config, settings_of
from akv_jax.startup import engine_config, load_engine, page_bytes
from serving.settings import Environment
from tests.serving.running import Process, eventually


def test_help_is_short(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 50 and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--model", "/no/such/model.gguf"], "no such file or directory: /no/such/model.gguf"),
        (["--tp", "0"], "--tp"),
        (["--tp", "x"], "--tp: expected 1 or more, found x"),
        (["--port", "70000"], "--port"),
        (["--max-total-tokens", "0"], "--max-total-tokens"),
        (["--mem-fraction-static", "1.5"], "--mem-fraction-static"),
        (["--drain-seconds", "-1"], "--drain-seconds: expected 0 or more, below a million, found -1"),
        (["--dtype", "int8"], "--dtype"),
        (["--cache-dir", "/dev/null"], "--cache-dir: /dev/null: File exists"),
        (["--cache-dir", "kv", "--disable-radix-cache"], "there is nothing to keep"),
    ],
)
def test_a_bad_command_line_is_explained(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_port_in_use_is_noticed_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit) as caught:
        main(["--model", str(tmp_path), "--port", str(taken.getsockname()[1])])
    assert caught.value.code == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


def test_answers_are_sent_at_once() -> None:
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(
    "flags", [["--attention-backend", "nope"], ["--attention-backend", "json"], ["--tp", "9" * 20]], ids=" ".join
)
def test_flags_that_do_not_fit_are_named(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(FlagError, match=flags[0]):
        load_engine(argument_parser().parse_args(flags), tmp_path)


def test_flags_and_memory_make_the_engine_configuration(model: LoadedModel) -> None:
    def config(*flags: str):
        return engine_config(argument_parser().parse_args(flags), model, "float32")

    # No more than all requests at full length could use.
    assert config("--max-running-requests", "2").num_pages == 2 * model.config.max_positions
    assert config("--max-total-tokens", "77").num_pages == 77
    small = 5000 * page_bytes(model.config, "float32") / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    pages = config("--mem-fraction-static", f"{small:.12f}").num_pages
    assert pages <= 5000 and pages % 1024 == 0
    with pytest.raises(FlagError, match="--max-total-tokens"):
        config("--mem-fraction-static", f"{small / 1000:.15f}")
    with pytest.raises(FlagError, match="--context-length"):
        config("--context-length", str(model.config.max_positions + 1))
    with pytest.raises(FlagError, match="--max-total-tokens 1000000000000: all memory has room for"):
        config("--max-total-tokens", "1000000000000")
    assert config("--context-length", "64").context_length == 64
    # K and V, 2 layers, 2 heads of 16, 4 bytes.
    assert page_bytes(model.config, "float32") == 2 * 2 * 2 * 16 * 4


def test_from_start_to_drain(tiny_directory: Path, tmp_path: Path) -> None:
    """Alive at once, ready later, then SIGTERM lets a stream that has begun come to its end."""
    # The smallest sizes, so that one small program has to be compiled.
    sizes = ["--chunked-prefill-size", "4", "--max-running-requests", "1", "--context-length", "512"]
    server = Process("--model", str(tiny_directory), *sizes, cache=tmp_path)
    try:
        eventually(lambda: server.status("/health") == 200, 30)
        assert server.status("/ready") == 503
        eventually(lambda: server.status("/ready") == 200, 60)
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert server.status("/v1/models") == 200
        text: list[str] = []
        begun = threading.Event()

        def stream() -> None:
            body = {
                "messages": [{"role": "user", "content": "Hi"}],
                "stream": True,
                "max_tokens": 300,
                "ignore_eos": True,
            }
            headers = {"Authorization": "Bearer sesame"}
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as response:
                for line in response.iter_lines():
                    begun.set()
                    text.append(line)

        reader = threading.Thread(target=stream)
        reader.start()
        assert begun.wait(20)
        code, err = server.terminate()
        reader.join(20)
        assert code == 0
        assert text[-2:] == ["data: [DONE]", ""]
        for word in ("tiny", "float32", "512 positions", "short for agents", "curl"):
            assert word in err
        assert "Traceback" not in err
    finally:
        server.process.kill()


def test_what_was_cached_at_the_stop_is_there_at_the_next_start(tiny_directory: Path, tmp_path: Path) -> None:
    """--cache-dir, through two processes; and --tp, for what is stored is the same over any devices."""
    sizes = ["--chunked-prefill-size", "4", "--max-running-requests", "1", "--context-length", "512"]
    flags = ["--model", str(tiny_directory), *sizes, "--max-total-tokens", "512", "--cache-dir", str(tmp_path / "kv")]
    answers = []
    for start, tp in (("first", "1"), ("second", "4")):
        server = Process(*flags, "--tp", tp, cache=tmp_path)
        try:
            eventually(lambda server=server: server.status("/ready") == 200, 240)
            body = {
                "messages": [{"role": "user", "content": "Hi"}],
                "temperature": 0,
                "max_tokens": 4,
                "logprobs": True,
            }
            headers = {"Authorization": "Bearer sesame"}
            answers.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).json())
            # Told again and again, it does not leave the store half done.
            while server.process.poll() is None:
                server.process.send_signal(signal.SIGTERM)
                time.sleep(0.02)
            code, err = server.terminate()
            assert code == 0 and "KV cache stored" in err and "Traceback" not in err, err
            assert "KV cache loaded" in err and ("pages=0" in err) == (start == "first")
            assert ("4 × cpu (cpu), mesh data 1 × model 4, 2 KV heads in 4 slots" in " ".join(err.split())) == (
                tp == "4"
            )
        finally:
            server.process.kill()
    first, second = answers
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == first["usage"]["prompt_tokens"] - 1
    assert second["cache"]["computed_tokens"] == 1
    first, second = first["choices"][0], second["choices"][0]
    assert second["message"] == first["message"]
    logprobs = ([entry["logprob"] for entry in choice["logprobs"]["content"]] for choice in (first, second))
    assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)


def test_a_broken_model_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AKV_JAX_CACHE_DIR", str(tmp_path))
    (tmp_path / "broken.gguf").write_bytes(b"junk")
    assert main(["--model", str(tmp_path / "broken.gguf"), "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert "error:" in err and "broken.gguf is not a GGUF file" in err


def test_how_long_a_drain_may_take() -> None:
    for flags, seconds in (([], 10), (["--drain-seconds", "0.5"], 0.5)):
        settings = settings_of(argument_parser().parse_args(flags), Environment())
        assert settings.drain_seconds == seconds
        assert server_config(lambda *_: None, settings).timeout_graceful_shutdown >= seconds  # pyright: ignore


def test_a_failure_of_ours_ends_with_1_and_a_traceback(
    tiny_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot start, and nobody can help it."""
    monkeypatch.setenv("AKV_JAX_CACHE_DIR", str(tmp_path))

    def broken(*_: object) -> NoReturn:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("akv_jax.startup.engine_config", broken)
    assert main(["--model", str(tiny_directory), "--port", "0"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and "ZeroDivisionError: a bug" in err


def test_sigterm_while_loading_ends_with_0(tiny_directory: Path, tmp_path: Path) -> None:
    """At once, whatever the compiler is at."""
    server = Process("--model", str(tiny_directory), cache=tmp_path)
    try:
        eventually(lambda: server.status("/health") == 200, 60)
        assert server.status("/ready") == 503
        code, err = server.terminate()
        assert code == 0 and "Traceback" not in err and "URL" not in err
    finally:
        server.process.kill()


#: The server as `serve` has it, with one route that takes a minute.
SLOW = """
import asyncio
from akv_jax.serve import QuietServer, listen, server_config
from serving.settings import Settings

async def app(scope, receive, send):
    assert scope["type"] == "http"
    print("asked", flush=True)
    await asyncio.sleep(60)

listener = listen("127.0.0.1", 0)
print(listener.getsockname()[1], flush=True)
settings = Settings(drain_seconds=60)
QuietServer(server_config(app, settings), lambda: print("draining", flush=True)).run(sockets=[listener])
"""


def test_a_second_ctrl_c_ends_at_once_and_quietly() -> None:
    command = [sys.executable, "-c", SLOW]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = ("127.0.0.1", int(server.stdout.readline()))
        with socket.create_connection(address, timeout=30) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert server.stdout.readline() == "asked\n"
            server.send_signal(signal.SIGINT)
            assert server.stdout.readline() == "draining\n"
            assert server.poll() is None
            server.send_signal(signal.SIGINT)
            _, err = server.communicate(timeout=10)
        assert (server.returncode, err) == (0, "")
    finally:
        server.kill()
