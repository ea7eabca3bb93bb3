"""`python -m akv_jax.serve` in a process of its own: how long it takes to start and to answer, and its memory."""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.local_server import ask_now

#: Between two looks at whether it is ready, seconds.
POLL_SECONDS = 0.02
#: A prompt of some forty tokens. What is filled in comes first, so that next to nothing of it is cached.
SYSTEM, USER = "{} is your number.", "Two apples and a pear lie on the table. How many apples are there?"


@dataclass(frozen=True, slots=True)
class ServerTimes:
    """Seconds from the start of the process, and of one request; memory that is resident after those, MiB."""

    ready: float
    #: The first event of the first request's stream, which is sent when the server is ready.
    first_token: float
    #: Median, from sending a short prompt to the first event of its stream, once the server has answered before.
    short_prompt: float
    resident: float


class StartedServer:
    """A server that has been started, from `begun` on; see `started`."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, begun: float, log: Path) -> None:
        self.process, self.url, self._begun, self._log = process, url, begun, log

    def wait_ready(self) -> float:
        """Seconds from its start until it is ready. RuntimeError, with what it said, if it ends before."""
        while True:
            if self.process.poll() is not None:
                said = self._log.read_text(errors="replace").strip()
                raise RuntimeError(f"the server ended with exit code {self.process.returncode} at its start:\n{said}")
            try:
                if httpx.get(f"{self.url}/ready", timeout=60).status_code == 200:
                    return self.age
            except httpx.TransportError:
                # Nothing listens yet.
                pass
            time.sleep(POLL_SECONDS)

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return time.perf_counter() - self._begun

    def first_token(self, number: int) -> float:
        """Seconds from sending a short prompt, of another number for each, to the first event of its stream."""
        messages = [{"role": "system", "content": SYSTEM.format(number)}, {"role": "user", "content": USER}]
        return ask_now(self.url, {"messages": messages, "max_tokens": 2}).first_token

    def resident(self) -> float:
        """MiB of memory that the process has now (Linux)."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"no VmRSS in {status!r}")
        return int(found[1]) / 1024


@contextmanager
def started(flags: Sequence[str], cache_dir: Path) -> Iterator[StartedServer]:
    """Start the command with `flags`; its models and compiled programs are in `cache_dir`. It is ended at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "akv_jax.serve", "--port", str(port), *flags]
    environment = {**os.environ, "AKV_JAX_CACHE_DIR": str(cache_dir)}
    with tempfile.NamedTemporaryFile() as log:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            yield StartedServer(process, f"http://127.0.0.1:{port}", begun, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def server_times(flags: Sequence[str], cache_dir: Path, runs: int) -> ServerTimes:
    """Of one start. RuntimeError if it ends before it is ready."""
    with started(flags, cache_dir) as server:
        ready = server.wait_ready()
        asked = server.age
        first = asked + server.first_token(0)
        short = statistics.median(server.first_token(number) for number in range(1, runs + 1))
        return ServerTimes(ready, first, short, server.resident())
