"""The `xla` kernels on a CPU against what bounds them, in one run: `python -m benchmarks.kernels_cpu`.

- decode attention against `np.copyto` of the same K and V bytes (one thread's copy);
- decode attention of lists that may have shifts and have none against the promise that there are none (DESIGN C8);
- prefill attention through page lists against `jax.nn.dot_product_attention` with a dense mask, whose K and V lie in
  order and side by side;
- a restore in segments that each see all before them against one causal prefill of as many tokens.

All in the default mode, on_read, but for that promise. Medians of calls made in turn. Ratios are what to quote, with
the machine; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.launches import QWEN3, SMOLLM2, Arguments, Launch, Shape, arguments_of, pool
from benchmarks.report import machine, write_json
from benchmarks.timing import medians
from pallas_kernels.segment_attention.api import backend

#: As `EngineConfig.dtype` names them, and what a CPU's pool holds.
POOLS: dict[str, Any] = {"float32": jnp.float32, "bfloat16": jnp.uint16}


def launched(launch: Launch, dtype: str, name: str) -> tuple[Callable[[], Any], Arguments]:
    """A call of a backend, compiled."""
    width = launch.shape.num_kv_heads * launch.shape.head_dim
    k_pool, v_pool = (pool(launch.pages + 5000, width, POOLS[dtype], seed) for seed in (0, 1))
    arguments = arguments_of(launch, k_pool, v_pool)
    function = jax.jit(backend(name), static_argnums=7)
    return lambda: function(*arguments), arguments


def copying(launch: Launch, dtype: str) -> Callable[[], Any]:
    """`np.copyto` of as many rows of K and V as the launch reads."""
    width = launch.shape.num_kv_heads * launch.shape.head_dim
    source = [np.asarray(pool(launch.pages, width, POOLS[dtype], seed)).copy() for seed in (0, 1)]
    target = [np.zeros_like(array) for array in source]

    def copy() -> None:
        for to, array in zip(target, source, strict=True):
            np.copyto(to, array)

    return copy


def dense(launch: Launch, arguments: Arguments) -> Callable[[], Any]:
    """The same queries over the same tokens, K and V in order, and a mask [T, entries]."""
    shape, total = launch.shape, launch.entries
    pages = arguments.batch.pages[:total]
    k, v = (
        (jax.lax.bitcast_convert_type(a, jnp.bfloat16) if a.dtype == jnp.uint16 else a).reshape(
            1, total, shape.num_kv_heads, shape.head_dim
        )
        for a in (arguments.k_pool[pages], arguments.v_pool[pages])
    )
    mask = jnp.arange(total)[None, :] <= arguments.batch.query_positions[:, None]
    function = jax.jit(lambda q, k, v, mask: jax.nn.dot_product_attention(q[None], k, v, mask=mask)[0])
    return lambda: function(arguments.q, k, v, mask)


def compare(ours: Launch, dtype: str, name: str, runs: int) -> dict[str, float]:
    """Prefill against a dense mask; the two must agree first."""
    call, arguments = launched(ours, dtype, name)
    other = dense(ours, arguments)
    error = float(jnp.abs(call().astype(jnp.float32) - other().astype(jnp.float32)).max())
    if error > (1e-4 if dtype == "float32" else 6e-2):
        raise SystemExit(f"{name} and the dense mask differ by {error:.2g} on {ours}")
    return medians({"ours": call, "dense": other}, runs)


def report(name: str, dtypes: list[str], shapes: list[Shape], runs: int) -> list[dict[str, Any]]:
    """A row a measurement: milliseconds of both sides, their ratio, and what is asked of it."""
    rows: list[dict[str, Any]] = []

    def add(what: str, shape: Shape, dtype: str, seconds: dict[str, float], ratio: float, asked: str) -> None:
        times = {f"{side} ms": 1000 * value for side, value in seconds.items()}
        rows.append({"what": what, "shape": shape.name, "dtype": dtype, **times, "ratio": ratio, "asked": asked})

    for dtype in dtypes:
        for shape in shapes:
            decode = Launch(shape, sequences=8, context=1999, run=0)
            ours, promised = (launched(one, dtype, name)[0] for one in (decode, replace(decode, run=None)))
            times = medians({"ours": ours, "copy": copying(decode, dtype), "promised": promised}, runs)
            for what, other, asked in (("np.copyto", "copy", "<= 3.5"), ("promised none", "promised", "<= 1.05")):
                seconds = {"ours": times["ours"], "other": times[other]}
                add(f"decode, 8 × 2,000, by {what}", shape, dtype, seconds, times["ours"] / times[other], asked)
            prefill = Launch(shape, queries=2048, run=0)
            seconds = compare(prefill, dtype, name, max(5, runs // 4))
            seconds = {"ours": seconds["ours"], "other": seconds["dense"]}
            add("dense mask by prefill, 2,048", shape, dtype, seconds, seconds["other"] / seconds["ours"], ">= 1.5")
            whole = Launch(shape, queries=4096, run=0)
            parts = replace(whole, segments=8)
            calls = {side: launched(one, dtype, name)[0] for side, one in (("ours", parts), ("other", whole))}
            seconds = medians(calls, max(5, runs // 6))
            add("restore of 8 × 512 by prefill", shape, dtype, seconds, seconds["ours"] / seconds["other"], "<= 1.15")
    return rows


def main() -> None:
    """Print the table, and write JSON if asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels_cpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--backend", default="xla", metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=POOLS, default=["bfloat16", "float32"])
    parser.add_argument("--shapes", nargs="+", choices=("smollm2", "qwen3"), default=["smollm2"])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    arguments = parser.parse_args()
    shapes = [{"smollm2": SMOLLM2, "qwen3": QWEN3}[name] for name in arguments.shapes]
    rows = report(arguments.backend, arguments.dtypes, shapes, arguments.runs)
    table = Table("what", "shape", "dtype", "ours, ms", "other, ms", "ratio", "asked")
    for row in rows:
        numbers = (f"{row['ours ms']:.2f}", f"{row['other ms']:.2f}", f"{row['ratio']:.2f}", row["asked"])
        table.add_row(row["what"], row["shape"], row["dtype"], *numbers)
    console = Console()
    console.print(machine(), table)
    write_json(arguments.json, "kernels on a CPU", vars(arguments), rows)


if __name__ == "__main__":
    main()
