"""Copy or on-read? Both ways of reposition (DESIGN C8) on one long conversation: `python -m benchmarks.reposition`.

The conversation is synthetic: a system prompt, then turns of a short assistant message and a long tool output. After
every turn the tool output of `keep` turns ago is dropped, and every few turns the cache is repositioned. Reported for
each mode, in one process: pages at the fullest moment, time of the cold prefill, time of a decode step after it, and
the error of the next-token logits against the same history in float32, for each dtype of the pool.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel, load_model
from akv_jax.request import Request, Sampling
from spec.operations import Append, Drop, Operation, Reposition


def conversation(turns: int, tool: int, keep: int, every: int, vocabulary: int, seed: int = 0) -> tuple[Operation, ...]:
    """A history of `turns` turns with tool outputs of `tool` tokens."""
    random = np.random.default_rng(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(random.integers(10, vocabulary, count).tolist())

    operations: list[Operation] = [Append(tokens(200))]
    outputs: list[range] = []
    position = 200
    for turn in range(turns):
        operations += [Append(tokens(40)), Append(tokens(tool))]
        outputs.append(range(position + 40, position + 40 + tool))
        position += 40 + tool
        if turn >= keep:
            operations.append(Drop(frozenset(outputs[turn - keep])))
        if (turn + 1) % every == 0:
            operations.append(Reposition())
    return (*operations, Append(tokens(20)))


@dataclasses.dataclass(frozen=True)
class Measured:
    """One request: seconds of its prefill and of the median decode step, pages at the fullest moment, logits."""

    prefill: float
    decode: float
    pages: int
    forwards: int
    logits: np.ndarray


def measure(engine: Engine, history: tuple[Operation, ...], name: str, steps: int) -> Measured:
    """Serve one request alone."""
    sampling = Sampling(max_tokens=steps + 1, temperature=0.0, ignore_eos=True)
    engine.submit(Request(name, history, sampling, return_logits=True))
    pages, times, first, logits, forwards = 0, [], None, np.zeros(0), 0
    start = time.perf_counter()
    while engine.busy:
        began = time.perf_counter()
        outputs = engine.step()
        pages = max(pages, engine.config.num_pages - engine.pool.num_free)
        for output in outputs:
            if output.next_logits is not None:
                first, logits = time.perf_counter() - start, output.next_logits
            else:
                times.append(time.perf_counter() - began)
            forwards = output.usage.forwards if output.usage else forwards
    assert first is not None
    return Measured(first, statistics.median(times), pages, forwards, logits)


def engine_for(model: LoadedModel, mode: str, arguments: argparse.Namespace, dtype: str) -> Engine:
    """A warm engine."""
    config = EngineConfig(
        context_length=8192,
        num_pages=arguments.pages,
        max_running_requests=1,
        chunked_prefill_size=arguments.chunk,
        reposition=mode,  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        # Every run is to be computed.
        disable_radix_cache=True,
        token_buckets=(1 if dtype == "float32" else 4, arguments.chunk),
    )
    engine = Engine(model, config)
    engine.warm_up()
    return engine


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reposition", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tool", type=int, default=250, help="tokens of one tool output")
    parser.add_argument("--keep", type=int, default=6, help="tool outputs kept")
    parser.add_argument("--every", type=int, default=4, help="turns between repositions")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--pages", type=int, default=12_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--model", type=Path, help="GGUF file or Hugging Face directory (default: the embedded model)")
    parser.add_argument("--cache-dir", type=Path, default=Path.home() / ".cache" / "akv-jax")
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(arguments.cache_dir / "xla"))
    table = Table("dtype", "mode", "pages", "forwards", "prefill s", "decode ms", "max logit error", "same argmax")
    exact: np.ndarray | None = None
    for dtype in arguments.dtypes:
        model = load_model(arguments.model, dtype, arguments.cache_dir / "models", progress=False)
        history = conversation(
            arguments.turns, arguments.tool, arguments.keep, arguments.every, model.config.vocab_size
        )
        engines = {mode: engine_for(model, mode, arguments, dtype) for mode in ("on_read", "copy")}
        # In turn, so that a drift of the machine's speed meets both.
        runs = [
            {mode: measure(engine, history, f"{mode}{run}", 20) for mode, engine in engines.items()}
            for run in range(arguments.runs)
        ]
        for mode in engines:
            results = [run[mode] for run in runs]
            exact = results[0].logits if exact is None else exact
            error = np.abs(results[0].logits - exact).max()
            table.add_row(
                dtype,
                mode,
                str(results[0].pages),
                str(results[0].forwards),
                f"{statistics.median(r.prefill for r in results):.2f}",
                f"{1000 * statistics.median(r.decode for r in results):.1f}",
                f"{error:.2e}",
                str(bool(results[0].logits.argmax() == exact.argmax())),
            )
    Console().print(table)


if __name__ == "__main__":
    main()
