"""All kernels on one GPU in under six minutes: right on every case, then timed: `python -m benchmarks.gpu_check`.

Needs jax (0.10 or 0.11, with its GPU plugin), NumPy and ml_dtypes, and of this repository `pallas_kernels` and a few
files beside this one; installs nothing, so `python benchmarks/gpu_check.py` in a copy of it will do. Each part has a
time of its own, and everything ends in time: what did not fit is listed as skipped. The report is JSON (--json), with
the card's name and the version of jax, and is written after each part. Exit code 1 if a kernel is wrong.

Timed are decode (batch 16 and 64, contexts of 4k, 32k and 96k), prefill of 8,192 new tokens in 1, 8 and 32 segments
over a context of 32k, reposition of 96k tokens, reading with shifts against copying, and the products of 16, 64 and
8,192 tokens with a quarter of the experts, for GPT-OSS-120B and Qwen3-30B-A3B; as fractions of a copy's bandwidth and a
matmul's rate, measured in the same process.

--dry-run runs all of it in miniature by Pallas' interpreter, without a GPU; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from benchmarks.checking import CHECKS
from benchmarks.launches import (
    GPT_OSS,
    QWEN3,
    Experts,
    Launch,
    Shape,
    arguments_of,
    attention_launches,
    experts_launches,
    moved_bytes,
    moves_of,
    pool,
    rotation_of,
    table,
)
from benchmarks.timing import Limits, limits, product_seconds, repeated_seconds
from pallas_kernels.grouped_matmul import api as grouped_api
from pallas_kernels.reposition import api as reposition_api
from pallas_kernels.segment_attention import api as attention_api

#: Seconds: of the whole, and after which no part begins another item.
BUDGET = 345.0
#: The share of the budget by whose end a part must be done.
CHECKED, TIMED = 0.5, 0.9
BACKENDS = {
    "segment_attention": attention_api.backend,
    "reposition": reposition_api.backend,
    "grouped_matmul": grouped_api.backend,
}
#: Of the interpreter, a few of each operation are enough to run the script.
DRY_CASES = ("one_query", "rows_only", "one", "partial", "rows_of_no_group", "one_row")
Row = dict[str, Any]


class Report:
    """What has come out so far."""

    def __init__(self, path: Path | None, budget: float) -> None:
        self._path, self._start, self._budget = path, time.monotonic(), budget
        self.wrong = 0
        self.values: dict[str, Any] = {
            "date": time.strftime("%Y-%m-%d"),
            "card": jax.devices()[0].device_kind,
            "platform": jax.default_backend(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "checks": [],
            "timings": [],
            "skipped": [],
        }

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start

    def late(self, share: float) -> bool:
        """Whether that share of the budget is spent."""
        return self.seconds > share * self._budget

    def add(self, part: str, row: Row) -> None:
        """Print a row, and keep it."""
        self.values[part].append(row)
        text = "  ".join(f"{key} {_short(value)}" for key, value in row.items())
        print(f"{self.seconds:6.1f} s  {'skipped: ' if part == 'skipped' else ''}{text}", flush=True)

    def skip(self, what: str, why: str) -> None:
        """Keep what there was no room for."""
        self.add("skipped", {"what": what, "why": why})

    def write(self) -> None:
        """Whatever happens afterwards, this much is safe."""
        self.values |= {"wrong": self.wrong, "seconds": self.seconds}
        if self._path is not None:
            self._path.write_text(json.dumps(self.values, indent=1) + "\n", encoding="utf-8")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def check(report: Report, backend: str, dry: bool) -> None:
    """Every case of every operation against the oracle; compiled in threads, which is most of the time."""
    pending: list[tuple[str, str, Future[Any]]] = []
    threads = ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1))
    for operation, (cases, prepare) in CHECKS.items():
        function = BACKENDS[operation](backend)
        for name, case in cases.items():
            if case.kind == "bits" or (dry and name not in DRY_CASES):
                continue
            if report.late(CHECKED):
                report.skip(f"{operation} {name}", "out of time for checks")
            else:
                pending.append((operation, name, threads.submit(prepare, name, case, function)))
    for operation, name, prepared in pending:
        if report.late(CHECKED):
            prepared.cancel()
            report.skip(f"{operation} {name}", "out of time for checks")
            continue
        try:
            verdict = prepared.result()()
            row: Row = {"operation": operation, **verdict._asdict()}
        except Exception as error:
            row = {"operation": operation, "case": name, "wrong": f"failed: {str(error)[:300] or type(error).__name__}"}
        report.wrong += row["wrong"] is not None
        report.add("checks", row)
    threads.shutdown(cancel_futures=True)


def sizes(dry: bool) -> tuple[dict[str, Launch], tuple[int, int]]:
    """Launches by name, and how many tokens are repositioned: of all, and in comparison with reading."""
    if not dry:
        return attention_launches(gpu=True), (96 * 1024, 32 * 1024)
    small = {}
    for name, launch in list(attention_launches(gpu=True).items())[::5]:
        queries = 16 * launch.segments if launch.queries > 1 else 1
        small[name] = replace(launch, sequences=2, context=40, queries=queries, tile=16)
    return small, (40, 20)


def timings(report: Report, backend: str, best: Limits, dry: bool) -> None:
    """Attention, reposition and experts over real sizes."""
    launches, (moved, _) = sizes(dry)
    effort: dict[str, Any] = {"seconds": 0.0, "runs": 1} if dry else {"seconds": 0.1, "runs": 3}
    attention, reposition, grouped = (find(backend) for find in BACKENDS.values())
    jobs: list[tuple[str, Callable[[], Row]]] = []
    pools = Pools()
    for shape in (GPT_OSS, QWEN3):
        name = f"{shape.name} reposition of {moved} tokens"
        jobs.append((name, lambda shape=shape: time_moves(reposition, shape, moved, best, effort)))
    for name, launch in experts_launches(gpu=True).items():
        if dry:
            launch = launch._replace(experts=4, inputs=launch.inputs // 32, outputs=32, tokens=min(launch.tokens, 20))
        jobs.append((f"experts: {name}", lambda launch=launch: time_experts(grouped, launch, best, effort)))
    # Short ones first, so that one size that does not fit takes nothing from the others.
    for name, launch in sorted(launches.items(), key=lambda item: item[1].pages):
        jobs.append((name, lambda launch=launch: time_attention(attention, launch, pools, best, effort)))
    for name, job in jobs:
        measured(report, name, job, TIMED)


def reading_or_copying(report: Report, backend: str, dry: bool) -> None:
    """C8: a decode step with shifts in its lists, with none though allowed, and with none promised; and what copying
    the same entries costs. After so many steps copying has paid for itself in time (not in pages)."""
    _, (_, moved) = sizes(dry)
    effort: dict[str, Any] = {"seconds": 0.0, "runs": 1} if dry else {"seconds": 0.1, "runs": 3}
    attention, reposition = (BACKENDS[name](backend) for name in ("segment_attention", "reposition"))
    pools = Pools()
    plain = Launch(GPT_OSS, 1 if dry else 16, moved - 1)
    for name, run in (("promised none", None), ("allowed, none", 0), ("runs of 2,000", 2000), ("runs of 100", 100)):
        launch = replace(plain, run=run)
        job = lambda launch=launch: time_attention(attention, launch, pools, None, effort)  # noqa: E731
        measured(report, f"shifts: {name}, decode {launch.sequences} x {moved}", job, 1.0)
    job = lambda: time_moves(reposition, GPT_OSS, moved, None, effort)  # noqa: E731
    measured(report, f"shifts: copying {moved} instead", job, 1.0)


def measured(report: Report, name: str, job: Callable[[], Row], share: float) -> None:
    """Run a timing if there is time; no memory for it is no mistake."""
    if report.late(share):
        report.skip(name, "out of time")
        return
    try:
        report.add("timings", {"what": name, **job()})
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
            report.skip(name, "not enough memory")
            return
        report.wrong += 1
        report.add("timings", {"what": name, "wrong": text[:300]})


class Pools:
    """K and V for launches of one width, made anew only when a launch needs more pages: a power of two of them."""

    def __init__(self) -> None:
        self._pools: tuple[jax.Array, jax.Array] | None = None

    def of(self, launch: Launch) -> tuple[jax.Array, jax.Array]:
        """bfloat16 [P, G*D], twice."""
        width = launch.shape.num_kv_heads * launch.shape.head_dim
        if self._pools is None or self._pools[0].shape[1] != width or len(self._pools[0]) <= launch.pages:
            # The old ones go first.
            self._pools = None
            size = 1 << (launch.pages + 1000).bit_length()
            self._pools = pool(size, width, jnp.bfloat16, 0), pool(size, width, jnp.bfloat16, 1)
        return self._pools


def time_attention(function: Any, launch: Launch, pools: Pools, best: Limits | None, effort: dict[str, Any]) -> Row:
    """Seconds of a launch, and how near it is to the limits."""
    q, *others = arguments_of(launch, *pools.of(launch))[:-1]
    step = lambda q, *others: function(q, *others, launch.attention)  # noqa: E731
    seconds = repeated_seconds(step, q, *others, **effort)
    return {"seconds": seconds, **_shares(seconds, launch.bytes_read(2), launch.flops, best)}


def time_moves(function: Any, shape: Shape, count: int, best: Limits | None, effort: dict[str, Any]) -> Row:
    """Seconds of so many moves in one layer."""
    width = shape.num_kv_heads * shape.head_dim
    pools = tuple(pool(2 * count + 1, width, jnp.bfloat16, seed) for seed in (0, 1))
    moves: Any = moves_of(count, 2 * count + 1)
    angles = [jnp.asarray(a) for a in table(count + 500, shape.head_dim // 2)]
    rotation = rotation_of(shape)
    step = lambda pools, moves, cos, sin: function(pools[0], pools[1], moves, cos, sin, rotation)  # noqa: E731
    seconds = repeated_seconds(step, pools, moves, *angles, **effort)
    return {"seconds": seconds, **_shares(seconds, moved_bytes(shape, count, 2), 0, best)}


def time_experts(function: Any, launch: Experts, best: Limits, effort: dict[str, Any]) -> Row:
    """Seconds of one grouped product, and how near it is to the limits."""
    seconds = product_seconds(function, launch.arguments(jnp.bfloat16), **effort)
    return {"seconds": seconds, **_shares(seconds, launch.bytes_moved(2), launch.flops, best)}


def _shares(seconds: float, moved: int, flops: int, best: Limits | None) -> Row:
    row: Row = {"GB/s": moved / seconds / 1e9, "TFLOP/s": flops / seconds / 1e12}
    if best is None:
        return row
    row |= {"of copy": moved / seconds / best.copy, "of matmul": flops / seconds / best.matmul}
    return row | {"of the limit": max(row["of copy"], row["of matmul"])}


def parts(report: Report, backend: str, dry: bool) -> Iterator[Callable[[], None]]:
    """In this order: limits, checks, timings, the two ways to reposition."""
    size = {"copied": 1 << 20, "side": 64} if dry else {"copied": 1 << 30, "side": 8192}
    best = limits(**size, dtype=jnp.bfloat16)
    report.values["limits"] = best._asdict()
    print(f"copy {best.copy / 1e9:,.0f} GB/s, bfloat16 matmul {best.matmul / 1e12:,.2f} TFLOP/s", flush=True)
    yield lambda: check(report, backend, dry)
    yield lambda: timings(report, backend, best, dry)
    yield lambda: reading_or_copying(report, backend, dry)


def main(argv: Sequence[str] | None = None) -> int:
    """Print rows as they come; 1 if something is wrong, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="in miniature, interpreted, without a GPU")
    parser.add_argument("--backend", metavar="NAME", help="pallas_triton, or a module with all operations")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="the report (%(default)s)")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="for everything (%(default)s)")
    arguments = parser.parse_args(argv)
    dry = arguments.dry_run
    if not dry and jax.default_backend() != "gpu":
        print(f"no GPU: jax runs on {jax.default_backend()}; --dry-run runs in miniature without one", file=sys.stderr)
        return 2
    report = Report(arguments.json, arguments.budget)
    print(f"{report.values['card']}, jax {jax.__version__}, Python {report.values['python']}", flush=True)
    backend = arguments.backend or ("pallas_triton_interpret" if dry else "pallas_triton")
    for part in parts(report, backend, dry):
        part()
        report.write()
    print(f"{report.wrong} wrong, {len(report.values['skipped'])} skipped, {report.seconds:.0f} s", flush=True)
    return int(report.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
