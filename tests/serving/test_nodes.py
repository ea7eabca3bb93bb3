"""One server out of two processes with two devices each (DESIGN R5), as a person starts them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from akv_jax.async_engine import AsyncEngine
from akv_jax.engine import Engine
from akv_jax.flags import argument_parser, nodes_of
from akv_jax.models.load import LoadedModel
from akv_jax.runtime.multi_process import NodeError, hear, join
from akv_jax.serve import main
from akv_jax.startup import engine_config
from tests.serving.running import eventually, running, write_tiny_model
from tests.serving.test_serve import Process
from tests.tiny_engine import quick_compiles

SIZES = ["--chunked-prefill-size", "4", "--max-running-requests", "1", "--context-length", "512"]
SIZES += ["--max-total-tokens", "512"]
HEADERS = {"Authorization": "Bearer sesame"}


def flags(directory: Path) -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return ["--model", str(directory), *SIZES, "--tp", "4", "--nnodes", "2", "--dist-init-addr", address]


@contextmanager
def two_processes(directory: Path, cache: Path) -> Iterator[tuple[Process, Process, list[str]]]:
    """Leader, follower and their flags; ready."""
    common = flags(directory)
    follower = Process(*common, "--node-rank", "1", cache=cache)
    leader = Process(*common, cache=cache)
    try:
        eventually(lambda: leader.status("/ready") == 200, 240)
        yield leader, follower, common
    finally:
        leader.process.kill()
        follower.process.kill()


def ended(process: Process) -> tuple[int, str]:
    """Exit code and what it wrote to stderr."""
    _, err = process.process.communicate(timeout=20)
    return process.process.returncode, err


def chat(url: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"word {number}"} for number in range(3)]
    body = {"messages": messages, "cache": {"drop": {"1": [0]}, "reposition": [1]}, "temperature": 0, "max_tokens": 12}
    response = httpx.post(f"{url}/v1/chat/completions", json=body | fields, headers=HEADERS, timeout=60)
    return response.raise_for_status().json()


def test_two_processes_serve_and_end_together(tiny_directory: Path, tmp_path: Path, model: LoadedModel) -> None:
    """Answers are one process's; whoever comes late is refused; and a follower that is killed in the middle of a stream
    ends the server, with a message and an exit code, in seconds."""
    config = engine_config(argument_parser().parse_args(SIZES), model, "float32")
    alone = AsyncEngine(lambda: Engine(model, config))
    with quick_compiles(), running(alone) as server:
        alone.start()
        alone.wait_ready()
        expected = chat(server.url, logprobs=True)
    with two_processes(tiny_directory, tmp_path) as (leader, follower, common):
        answer = chat(leader.url, logprobs=True)
        assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
        assert answer["usage"] == expected["usage"]
        logprobs = ([e["logprob"] for e in a["choices"][0]["logprobs"]["content"]] for a in (answer, expected))
        assert next(logprobs) == pytest.approx(next(logprobs), abs=1e-4)
        parser = argument_parser()
        late = nodes_of(parser, parser.parse_args([*common, "--node-rank", "1"]))
        assert late is not None
        with pytest.raises(NodeError, match="--node-rank 1 has joined already"):
            hear(join(late.host, late.port, late.rank, late.terms, 5), "start")
        body = {"prompt": "on and on", "max_tokens": 450, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{leader.url}/v1/completions", json=body, headers=HEADERS, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            follower.process.send_signal(signal.SIGKILL)
            rest = [line for line in lines if line]
        assert first.startswith("data: {") and "shutting_down" in rest[-1]
        code, err = ended(leader)
        assert code == 1
        assert "error: node 1 (127.0.0.1:" in err and "has gone: " in err
        assert "4 × cpu (cpu), mesh data 1 × model 4, 2 KV heads in 4 slots" in " ".join(err.split())


@pytest.mark.long
def test_a_leader_that_is_killed_takes_its_follower_along(tiny_directory: Path, tmp_path: Path) -> None:
    with two_processes(tiny_directory, tmp_path) as (leader, follower, _):
        leader.process.kill()
        code, err = ended(follower)
        assert code != 0 and ("the leader has gone" in err or "another task died" in err)


@pytest.mark.long
def test_a_clean_stop_is_clean_everywhere(tiny_directory: Path, tmp_path: Path) -> None:
    with two_processes(tiny_directory, tmp_path) as (leader, follower, _):
        chat(leader.url)
        code, err = leader.terminate()
        assert code == 0 and "Traceback" not in err, err
        code, err = ended(follower)
        assert code == 0 and "Traceback" not in err, err


@pytest.mark.long
def test_a_follower_with_another_model_ends_both(tiny_directory: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", soon_ends=True)
    common = flags(tiny_directory)
    follower = Process(*common, "--model", str(other), "--node-rank", "1", cache=tmp_path)
    leader = Process(*common, cache=tmp_path)
    try:
        for process in (follower, leader):
            code, err = ended(process)
            assert code == 1 and "the weights of its other are not the leader's" in err, err
    finally:
        leader.process.kill()
        follower.process.kill()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nnodes", "2", "--tp", "2"], "--dist-init-addr: expected HOST:PORT of node 0"),
        (
            ["--nnodes", "2", "--tp", "2", "--dist-init-addr", "here:x"],
            "--dist-init-addr: expected HOST:PORT of node 0",
        ),
        (["--nnodes", "2", "--tp", "3", "--dist-init-addr", "x:1"], "--tp 3: expected a multiple of --nnodes 2"),
        (["--nnodes", "2", "--tp", "2", "--node-rank", "2"], "--node-rank 2: expected 0 to 1"),
        (["--node-rank", "1"], "only with --nnodes"),
        (
            ["--nnodes", "2", "--tp", "2", "--dist-init-addr", "x:1", "--replicas", "2"],
            "--nnodes: not with --disaggregation or --replicas",
        ),
    ],
)
def test_flags_that_do_not_fit_are_explained(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_cache_on_disk_is_for_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--nnodes", "2", "--tp", "2", "--dist-init-addr", "x:1", "--cache-dir", os.fspath(tmp_path / "kv")])
    assert "--cache-dir: not with --nnodes" in capsys.readouterr().err
