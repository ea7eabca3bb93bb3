"""The engine against Hugging Face transformers, same weights, same machine, one run: `python -m benchmarks.engine`.

Measured in turn, so that a drift of the machine's speed meets both: prefill of 512, 2,048 and 6,000 tokens, decode at
batch 1, 4, 8 and 16 with a context of 1,000. The engine runs as it serves: scheduler, planner, page pool, sampler.
transformers decodes from a cache of random numbers. Medians; the ratios are what to quote, with the machine.

Before that the server, in a process of its own: from its start until it is ready and to its first token, compiled
programs absent and present; then the time to first token of a short prompt, streamed; and its resident memory.

Needs torch and transformers (`make oracle`) and httpx.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from akv_jax.runtime.runner import default_dtype
from benchmarks.report import add_common_flags, machine, write_json
from benchmarks.started_server import ServerTimes, server_times
from benchmarks.transformers_model import llama_in_transformers, random_cache
from spec.operations import Append

#: Tokens of the pool.
PAGES = 24_000
#: Least ratios wanted of a CPU that computes bfloat16 in hardware, by dtype and what is measured.
ASKED: dict[str, dict[str, float]] = {
    "float32": {f"prefill {n}": 0.9 for n in (512, 2048, 6000)} | {f"decode batch {n}": 1.0 for n in (1, 4, 8, 16)},
    "bfloat16": {"prefill 512": 0.9, "prefill 2048": 0.65, "prefill 6000": 0.45}
    | {"decode batch 1": 2.0, "decode batch 16": 1.0},
}


class EngineSide:
    """Tokens a second of the engine."""

    def __init__(self, model: LoadedModel, dtype: str, chunk: int) -> None:
        config = EngineConfig(
            context_length=model.config.max_positions,
            num_pages=PAGES,
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
        # While others' prompts are computed, the first ones decode already.
        waiting = sum(2 + len(prompt) // self.engine.config.chunked_prefill_size for prompt in prompts)
        for prompt in prompts:
            self._submit(prompt, waiting + steps)
        times = []
        while len(times) < steps:
            if not self.engine.busy:
                raise RuntimeError(f"{len(prompts)} requests did not decode together for {steps} steps")
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
        """Median seconds of a step of the whole batch.

        The cache holds random numbers: a step takes as long whatever is in it, and computing 16 prompts takes minutes.
        """
        torch = self._torch
        token = torch.tensor(np.stack(prompts))[:, -1:]
        with torch.inference_mode():
            cache = random_cache(self._model, len(prompts), len(prompts[0]))
            times = []
            for _ in range(steps):
                start = time.perf_counter()
                out = self._model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1].argmax(-1, keepdim=True)
                times.append(time.perf_counter() - start)
        return statistics.median(times)


def ratios(sides: dict[str, Any], measure: Callable[[Any], float], tokens: int, runs: int) -> dict[str, float]:
    """Median tokens a second of each side, measured in turn, and the ratio of the first to the second."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(runs):
        for name, side in sides.items():
            times[name].append(measure(side))
    rates = {name: tokens / statistics.median(values) for name, values in times.items()}
    first, second = rates.values()
    return {**rates, "ratio": first / second}


def compare(model: LoadedModel, dtype: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By what is measured: tokens a second of each side and their ratio."""
    sides = {"engine": EngineSide(model, dtype, arguments.chunk), "transformers": TransformersSide(model, dtype)}
    random, largest = np.random.default_rng(0), min(40_000, model.config.vocab_size)
    rows: dict[str, dict[str, float]] = {}
    for side in sides.values():
        # Compiles and allocates, untimed.
        side.prefill(random.integers(10, largest, arguments.chunk))
    for length in arguments.prefills:
        prompt = random.integers(10, largest, length)
        rows[f"prefill {length}"] = ratios(sides, lambda side: side.prefill(prompt), length, arguments.runs)  # noqa: B023
    for batch in arguments.batches:
        prompts = list(random.integers(10, largest, (batch, arguments.context)))
        decode = functools.partial(_decode, prompts=prompts, steps=arguments.steps)
        rows[f"decode batch {batch}"] = ratios(sides, decode, batch, arguments.runs)
    return rows


def _decode(side: EngineSide | TransformersSide, prompts: list[np.ndarray], steps: int) -> float:
    return side.decode(prompts, steps)


def starts(arguments: argparse.Namespace, dtype: str) -> dict[str, ServerTimes]:
    """The server without compiled programs, and started again with them."""
    flags = ["--dtype", dtype, "--chunked-prefill-size", str(arguments.chunk), "--max-total-tokens", str(PAGES)]
    flags += ["--model", str(arguments.model)] if arguments.model else []
    with tempfile.TemporaryDirectory() as scratch:
        os.symlink((arguments.cache_dir / "models").resolve(), Path(scratch) / "models")
        return {state: server_times(flags, Path(scratch), arguments.runs) for state in ("cold", "warm")}


def speed_table(rows: dict[str, dict[str, dict[str, float]]]) -> Table:
    """A row for each dtype and what is measured of it."""
    table = Table("dtype", "what", "engine tokens/s", "transformers tokens/s", "ratio", "asked")
    for dtype, of_dtype in rows.items():
        for what, row in of_dtype.items():
            least, ratio = ASKED[dtype].get(what), row["ratio"]
            asked = "" if least is None else f"≥ {least:g}: {'met' if ratio >= least else 'MISSED'}"
            table.add_row(dtype, what, f"{row['engine']:.0f}", f"{row['transformers']:.0f}", f"{ratio:.2f}", asked)
    return table


def server_table(rows: dict[str, dict[str, ServerTimes]]) -> Table:
    """A row for each dtype and start."""
    table = Table("dtype", "start", "ready s", "first token s", "TTFT of a short prompt s", "resident MiB")
    for dtype, of_dtype in rows.items():
        for state, times in of_dtype.items():
            numbers = (f"{times.ready:.1f}", f"{times.first_token:.1f}", f"{times.short_prompt:.3f}")
            table.add_row(dtype, state, *numbers, f"{times.resident:,.0f}")
    return table


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    add("--only", nargs="+", choices=("server", "speed"), default=["server", "speed"])
    add("--prefills", type=int, nargs="*", default=[512, 2048, 6000], help="tokens of prompts")
    add("--batches", type=int, nargs="*", default=[1, 4, 8, 16], help="requests that decode together")
    add("--context", type=int, default=1000, help="tokens that each of them has to begin with (%(default)s)")
    add("--chunk", type=int, default=256)
    add("--runs", type=int, default=3)
    add("--steps", type=int, default=20, help="decode steps a run")
    add_common_flags(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write JSON if asked."""
    arguments = argument_parser().parse_args(argv)
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache_dir / "xla"))
    console, chosen = Console(width=max(120, Console().width)), default_dtype(jax.local_devices()[0].platform)
    console.print(f"{machine()}; --dtype auto is {chosen} here")
    results: dict[str, Any] = {"auto": chosen}
    if "server" in arguments.only:
        # Fetches it, if need be, which is no part of a start.
        load_model(arguments.model, arguments.dtypes[0], arguments.cache_dir / "models", progress=False)
        servers = {dtype: starts(arguments, dtype) for dtype in arguments.dtypes}
        console.print(server_table(servers))
        results["server"] = {d: {state: asdict(times) for state, times in row.items()} for d, row in servers.items()}
    if "speed" in arguments.only:
        speeds = {}
        for dtype in arguments.dtypes:
            model = load_model(arguments.model, dtype, arguments.cache_dir / "models", progress=False)
            speeds[dtype] = compare(model, dtype, arguments)
            console.print(speed_table({dtype: speeds[dtype]}))
        results["speed"] = speeds
    write_json(arguments.json, "engine against transformers", vars(arguments), results)


if __name__ == "__main__":
    main()
