"""Kernels by name: right first, then how fast: `python -m benchmarks.kernels --backend mine,pallas_triton --op OP`.

A backend is one of `pallas_kernels`, or a module that defines the operation (docs/kernels.md). Each is run over the
cases that the tests use, against the oracle; one that is wrong is reported so and not timed, and the command then ends
with exit code 1. The others are timed over launches of real sizes: median time, bytes that have to be moved, achieved
bandwidth and FLOP/s, and how near that is to what the device did in the same process: its copy bandwidth and its
matmul rate. Interpreted kernels and the oracle are not timed.

--out FOLDER gets OP.json and a plot, OP.svg.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from benchmarks.bars import chart
from benchmarks.checking import CHECKS, Verdict
from benchmarks.launches import (
    Experts,
    Launch,
    Shape,
    arguments_of,
    attention_launches,
    experts_launches,
    move_launches,
    moved_bytes,
    moves_of,
    pool,
    rotation_of,
    table,
)
from benchmarks.report import machine, write_json
from benchmarks.timing import Limits, limits, medians, product_seconds, repeated_seconds
from pallas_kernels.grouped_matmul import api as grouped_api
from pallas_kernels.reposition import api as reposition_api
from pallas_kernels.segment_attention import api as attention_api

BACKEND = {
    "segment_attention": attention_api.backend,
    "reposition": reposition_api.backend,
    "grouped_matmul": grouped_api.backend,
}
#: Launches by name, on a GPU or elsewhere.
LAUNCHES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "segment_attention": attention_launches,
    "reposition": move_launches,
    "grouped_matmul": experts_launches,
}
#: Their times would mean nothing.
UNTIMED = ("pallas_triton_interpret", "reference")


def judge(operation: str, name: str, function: Any, cases: Sequence[str]) -> list[Verdict]:
    """One backend over cases; whatever it raises is a verdict too."""
    known, prepare = CHECKS[operation]
    verdicts = []
    for case in cases:
        try:
            verdicts.append(prepare(case, known[case], function)())
        except Exception as error:
            text = str(error).strip() or type(error).__name__
            verdicts.append(Verdict(case, float("nan"), float("nan"), f"failed: {text.splitlines()[0][:160]}"))
    return verdicts


def time_attention(function: Any, launch: Launch, dtype: Any) -> tuple[float, int, int]:
    """Seconds, bytes and FLOP of one launch."""
    width = launch.shape.num_kv_heads * launch.shape.head_dim
    k_pool, v_pool = (pool(launch.pages + 1000, width, dtype, seed) for seed in (0, 1))
    arguments = arguments_of(launch, k_pool, v_pool)
    moved = launch.bytes_read(jnp.dtype(dtype).itemsize)
    if jax.default_backend() == "cpu":
        compiled = jax.jit(function, static_argnums=7)
        return medians({"it": lambda: compiled(*arguments)}, 30)["it"], moved, launch.flops
    q, *others = arguments[:-1]
    # The result has the shape of the queries, and is the next run's.
    step = lambda q, *others: function(q, *others, launch.attention)  # noqa: E731
    return repeated_seconds(step, q, *others), moved, launch.flops


def time_reposition(function: Any, shape: Shape, count: int, dtype: Any) -> tuple[float, int, int]:
    """Seconds, bytes and FLOP of so many moves, in donated pools."""
    width = shape.num_kv_heads * shape.head_dim
    pools = tuple(pool(2 * count + 1, width, dtype, seed) for seed in (0, 1))
    moves: Any = moves_of(count, 2 * count + 1)
    angles = [jnp.asarray(a) for a in table(count + 500, shape.head_dim // 2)]
    rotation = rotation_of(shape)
    step = lambda pools, moves, cos, sin: function(pools[0], pools[1], moves, cos, sin, rotation)  # noqa: E731
    seconds = repeated_seconds(step, pools, moves, *angles)
    return seconds, moved_bytes(shape, count, jnp.dtype(dtype).itemsize), 3 * count * width


def time_grouped_matmul(function: Any, launch: Experts, dtype: Any) -> tuple[float, int, int]:
    """Seconds, bytes and FLOP of one product."""
    dtype = jnp.dtype(jnp.bfloat16 if dtype == jnp.uint16 else dtype)
    arguments, counts = launch.arguments(dtype), (launch.bytes_moved(dtype.itemsize), launch.flops)
    if jax.default_backend() == "cpu":
        compiled = jax.jit(function)
        return medians({"it": lambda: compiled(*arguments)}, 30)["it"], *counts
    return product_seconds(function, arguments), *counts


def timed(operation: str, functions: dict[str, Any], sizes: Sequence[str], dtype: Any, best: Limits) -> list[dict]:
    """A row for each size and backend."""
    known, rows = LAUNCHES[operation](jax.default_backend() != "cpu"), []
    for size in sizes or known:
        for name, function in functions.items():
            if operation == "segment_attention":
                seconds, moved, flops = time_attention(function, known[size], dtype)
            elif operation == "grouped_matmul":
                seconds, moved, flops = time_grouped_matmul(function, known[size], dtype)
            else:
                shape, count = known[size]
                seconds, moved, flops = time_reposition(function, shape, count, dtype)
            bandwidth, rate = moved / seconds, flops / seconds
            # Nothing can be faster than the slower of its reads and its arithmetic.
            limit = max(moved / best.copy, flops / best.matmul) / seconds
            row = {"size": size, "backend": name, "seconds": seconds, "bytes": moved, "flop": flops}
            rows.append({**row, "bytes/s": bandwidth, "flop/s": rate, "of the limit": limit})
    return rows


def table_of(rows: list[dict], best: Limits) -> Table:
    """What was timed."""
    out = Table("launch", "backend", "ms", "MB", "GB/s", "of copy", "GFLOP/s", "of matmul", "of the limit")
    for row in rows:
        out.add_row(
            row["size"],
            row["backend"],
            f"{1e3 * row['seconds']:.3f}",
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['bytes/s'] / 1e9:,.1f}",
            f"{row['bytes/s'] / best.copy:.2f}",
            f"{row['flop/s'] / 1e9:,.0f}",
            f"{row['flop/s'] / best.matmul:.2f}",
            f"{row['of the limit']:.2f}",
        )
    return out


def argument_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--backend", default="xla", metavar="NAMES", help="names or modules, comma-separated (%(default)s)")
    add("--op", choices=tuple(CHECKS), default="segment_attention")
    add("--cases", metavar="NAMES", help="cases to check, comma-separated (all)")
    add("--sizes", metavar="NAMES", help="launches to time, semicolon-separated (all; `none` times nothing)")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of what is timed (%(default)s)")
    add("--out", type=Path, metavar="FOLDER", help="write OP.json and OP.svg there")
    return parser


def chosen(parser: argparse.ArgumentParser, flag: str, text: str | None, separator: str, known: Any) -> list[str]:
    """The names given with a flag, or all of them."""
    if text is None:
        return list(known)
    names = [name.strip() for name in text.split(separator)]
    for name in names:
        if name not in known:
            parser.error(f"{flag}: {name!r} is none of {', '.join(known)}")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 if a backend is wrong."""
    parser = argument_parser()
    arguments = parser.parse_args(argv)
    operation, gpu = arguments.op, jax.default_backend() != "cpu"
    cases = chosen(parser, "--cases", arguments.cases, ",", CHECKS[operation][0])
    launches = LAUNCHES[operation](gpu)
    sizes = [] if arguments.sizes == "none" else chosen(parser, "--sizes", arguments.sizes, ";", launches)
    if gpu:
        # What a GPU's pool never holds.
        cases = [case for case in cases if CHECKS[operation][0][case].kind != "bits"]
    functions: dict[str, Any] = {}
    for name in dict.fromkeys(arguments.backend.split(",")):
        try:
            functions[name] = BACKEND[operation](name)
        except ValueError as error:
            parser.error(f"--backend: {error}")
    console = Console()
    card = f"{jax.devices()[0].device_kind}; {machine()}"
    console.print(f"{operation} on {card}, jax {jax.__version__}")
    verdicts = {name: judge(operation, name, function, cases) for name, function in functions.items()}
    right = Table("backend", "cases", "largest error", "verdict")
    for name, judged in verdicts.items():
        wrong = [f"{verdict.case}: {verdict.wrong}" for verdict in judged if verdict.wrong]
        largest = max(verdict.error for verdict in judged)
        right.add_row(name, str(len(judged)), f"{largest:.2g}", "\n".join(wrong) or "right")
    console.print(right)
    fit = {
        name: function
        for name, function in functions.items()
        if name not in UNTIMED and not any(verdict.wrong for verdict in verdicts[name])
    }
    results: dict[str, Any] = {"device": card, "jax": jax.__version__}
    results["verdicts"] = {name: [verdict._asdict() for verdict in judged] for name, judged in verdicts.items()}
    if fit and sizes:
        dtype = jnp.dtype(arguments.dtype)
        best = limits(copied=1 << 30 if gpu else 1 << 26, side=8192 if gpu else 1024, dtype=dtype)
        pool_dtype = jnp.uint16 if not gpu and arguments.dtype == "bfloat16" else dtype
        rows = timed(operation, fit, sizes, pool_dtype, best)
        note = f"copy {best.copy / 1e9:,.1f} GB/s, {arguments.dtype} matmul {best.matmul / 1e9:,.0f} GFLOP/s"
        console.print(f"Measured limits: {note}", table_of(rows, best))
        results |= {"limits": best._asdict(), "timings": rows}
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            groups: dict[str, dict[str, float]] = {}
            for row in rows:
                groups.setdefault(row["size"], {})[row["backend"]] = row["of the limit"]
            svg = chart(f"{operation}: share of what {card} could do at best", groups, note)
            (arguments.out / f"{operation}.svg").write_text(svg, encoding="utf-8")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / f"{operation}.json", f"kernels, {operation}", vars(arguments), results)
    return int(any(verdict.wrong for judged in verdicts.values() for verdict in judged))


if __name__ == "__main__":
    sys.exit(main())
