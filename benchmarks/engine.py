"""The engine against Hugging Face transformers, same weights, same machine, one run: `python -m benchmarks.engine`.

Measured in turn, so that a drift of the machine's speed meets both: prefill of 512, 2,048 and 6,000 tokens, decode at
batch 1, 4, 8 and 16 with a context of 1,000. The engine runs as it serves: scheduler, planner, page pool, sampler. Also
its time from start to ready (a process of its own, compiled programs absent and present) and its resident memory.
Medians; the ratios are what to quote, with the machine. Needs torch and transformers (`make oracle`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel, load_model
from akv_jax.request import Request, Sampling
from benchmarks.transformers_model import llama_in_transformers
from spec.operations import Append

PREFILLS = (512, 2048, 6000)
BATCHES = (1, 4, 8, 16)
CONTEXT = 1000


class EngineSide:
    """Tokens a second of the engine."""

    def __init__(self, model: LoadedModel, dtype: str, chunk: int) -> None:
        config = EngineConfig(
            context_length=model.config.max_positions,
            num_pages=24_000,
            chunked_prefill_size=chunk,
            # Every run is to be computed.
            disable_radix_cache=True,
            dtype=dtype,  # pyright: ignore[reportArgumentType]
        )
        self.engine = Engine(model, config)
        self.engine.warm_up()
        self._count = 0

    def prefill(self, tokens: np.ndarray) -> float:
        """Seconds from the request to its first token."""
        start = time.perf_counter()
        self._submit(tokens, 1)
        while self.engine.busy:
            self.engine.step()
        return time.perf_counter() - start

    def decode(self, prompts: list[np.ndarray], steps: int) -> float:
        """Median seconds of a step in which every one of `prompts` decodes."""
        for prompt in prompts:
            self._submit(prompt, steps + len(prompts) * 8)
        times = []
        while len(times) < steps:
            start = time.perf_counter()
            outputs = self.engine.step()
            if len(outputs) == len(prompts):
                times.append(time.perf_counter() - start)
        for request_id in self._running:
            self.engine.abort(request_id)
        return statistics.median(times)

    def _submit(self, tokens: np.ndarray, max_tokens: int) -> None:
        self._running = [] if not self.engine.busy else self._running
        self._count += 1
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._running.append(f"r{self._count}")
        self.engine.submit(Request(f"r{self._count}", (Append(tuple(tokens.tolist())),), sampling))


class TransformersSide:
    """The same of transformers' own `LlamaForCausalLM` with its dynamic cache."""

    def __init__(self, model: LoadedModel, dtype: str) -> None:
        import torch

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch, self._model = torch, llama_in_transformers(model, dtype)

    def prefill(self, tokens: np.ndarray) -> float:
        """Seconds of one forward pass over the prompt, logits of its last token."""
        torch = self._torch
        start = time.perf_counter()
        with torch.inference_mode():
            self._model(torch.tensor(tokens)[None], use_cache=True, logits_to_keep=1)
        return time.perf_counter() - start

    def decode(self, prompts: list[np.ndarray], steps: int) -> float:
        """Median seconds of a step of the whole batch."""
        torch = self._torch
        with torch.inference_mode():
            out = self._model(torch.tensor(np.stack(prompts)), use_cache=True, logits_to_keep=1)
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                out = self._model(token, past_key_values=out.past_key_values, use_cache=True)
                times.append(time.perf_counter() - start)
        return statistics.median(times)


def startup(cache_dir: Path, dtype: str, chunk: int) -> float:
    """Seconds from starting the server's process to its being ready."""
    command = [sys.executable, "-m", "akv_jax.serve", "--port", "0", "--dtype", dtype]
    command += ["--chunked-prefill-size", str(chunk), "--max-total-tokens", "24000"]
    environment = {**os.environ, "AKV_JAX_CACHE_DIR": str(cache_dir)}
    start = time.perf_counter()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        for line in server.stderr:
            if line.startswith("URL"):
                break
        seconds = time.perf_counter() - start
        server.terminate()
        server.stderr.read()
    return seconds


def ratios(sides: dict[str, Any], measure: Callable[[Any], float], tokens: int, runs: int) -> dict[str, float]:
    """Median tokens a second of each side, measured in turn, and the ratio of the first to the second."""
    for side in sides.values():
        measure(side)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, side in sides.items():
            times[name].append(measure(side))
    rates = {name: tokens / statistics.median(values) for name, values in times.items()}
    first, second = rates.values()
    return {**rates, "ratio": first / second}


def main() -> None:
    """Print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], choices=["float32", "bfloat16"])
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="decode steps a run")
    parser.add_argument("--skip-startup", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "akv-jax")
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache_dir / "xla"))
    console, random = Console(), np.random.default_rng(0)
    report: dict[str, Any] = {"machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"}
    table = Table("dtype", "what", "engine tokens/s", "transformers tokens/s", "ratio")
    for dtype in arguments.dtypes:
        model = load_model(None, dtype, arguments.cache_dir / "models", progress=False)
        sides = {"engine": EngineSide(model, dtype, arguments.chunk), "transformers": TransformersSide(model, dtype)}
        rows: dict[str, dict[str, float]] = {}
        for length in PREFILLS:
            prompt = random.integers(10, 40_000, length)
            rows[f"prefill {length}"] = ratios(sides, lambda side: side.prefill(prompt), length, arguments.runs)  # noqa: B023
        for batch in BATCHES:
            prompts = list(random.integers(10, 40_000, (batch, CONTEXT)))
            rows[f"decode batch {batch}"] = ratios(
                sides,
                lambda side: side.decode(prompts, arguments.steps),  # noqa: B023
                batch,
                arguments.runs,
            )
        for what, row in rows.items():
            table.add_row(dtype, what, f"{row['engine']:.0f}", f"{row['transformers']:.0f}", f"{row['ratio']:.2f}")
        report[dtype] = rows
    report["peak resident MiB of this process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if not arguments.skip_startup:
        with tempfile.TemporaryDirectory() as scratch:
            os.symlink(arguments.cache_dir / "models", Path(scratch) / "models")
            for state in ("cold", "warm"):
                report[f"start {state}, s"] = startup(Path(scratch), arguments.dtypes[0], arguments.chunk)
    console.print(table)
    for name, value in report.items():
        if not isinstance(value, dict):
            console.print(f"{name}: {value if isinstance(value, str) else round(value, 1)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
