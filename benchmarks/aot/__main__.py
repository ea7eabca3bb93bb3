"""`make aot`: compile everything for eight A100-80GB without a GPU, and fail on what must not be (docs/aot.md).

    python -m benchmarks.aot              the kernels' cases, the largest step, the others with a layer of each kind
    python -m benchmarks.aot --all        all steps with all layers: a quarter of an hour on two cores
    python -m benchmarks.aot --only moe   what has that in its name

Prints tables, writes JSON with --out, and exits with 1 on a failure, which it names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.aot import jobs, report, shapes, target
from benchmarks.aot.judge import judge_kernels, judge_reposition, judge_step, needed

#: Layers of a model whose steps are compiled where not all are: one of each of its kinds.
LAYERS = 2
WHEELS = ("jax-cuda12-plugin", "jax-cuda12-pjrt")


class Compiler:
    """A process that compiles jobs (`child.py`), started again after one that it did not survive."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def observe(self, job: jobs.Job) -> dict[str, Any]:
        if self._process is None:
            command = [sys.executable, "-m", "benchmarks.aot.child"]
            # XLA looks for ptxas on the PATH.
            path = f"{os.environ.get('PATH', '')}{os.pathsep}{Path(ptxas() or '').parent}"
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PATH": path}
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._process = None
        return {"error": f"the compiler's process ended with {code}", "seconds": 0.0}

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()


def observe_all(wanted: Sequence[jobs.Job], processes: int) -> dict[jobs.Job, dict[str, Any]]:
    """Compile all jobs in that many processes, the first ones first."""
    local = threading.local()
    compilers: list[Compiler] = []

    def observe(job: jobs.Job) -> dict[str, Any]:
        if not hasattr(local, "compiler"):
            local.compiler = Compiler()
            compilers.append(local.compiler)
        seen = local.compiler.observe(job)
        print(
            f"  {job.name}: {'failed' if 'error' in seen else 'compiled'} in {seen['seconds']:.0f} s", file=sys.stderr
        )
        return seen

    with ThreadPoolExecutor(processes) as pool:
        results = dict(zip(wanted, pool.map(observe, wanted), strict=True))
    for compiler in compilers:
        compiler.close()
    return results


def judge(job: jobs.Job, seen: dict[str, Any]) -> list[str]:
    """What is wrong with a job, in sentences."""
    if job.operation != "step":
        return judge_reposition(seen) if job.operation == "reposition" else judge_kernels(seen)
    model = jobs.model_of(job)
    pool = jobs.estimate_of(model, job.rows).page * (jobs.pages_of(model) + 1)
    more = jobs.bytes_of_missing_layers(job)
    failures = judge_step(seen, layers=model.num_layers, pool=pool, more=more, budget=target.BUDGET)
    if job.donated or "error" in seen:
        return failures
    # The gate's own test: what it must notice, it does.
    noticed = any("not updated in place" in failure for failure in failures)
    return [] if noticed else ["a pool that is not donated went unnoticed"]


def judge_pool(results: dict[jobs.Job, dict[str, Any]]) -> tuple[list[report.PoolRow], list[str]]:
    """The largest pool of each model by arithmetic and as compiled, and where they do not agree within 10 %."""
    rows, failures = [], []
    for name, model in shapes.MODELS.items():
        compiled = [
            (job, seen) for job, seen in results.items() if job.case == name and job.donated and "error" not in seen
        ]
        if not compiled:
            continue
        page, pages = jobs.estimate_of(model, 1).page, jobs.pages_of(model)
        predicted = min(jobs.estimate_of(model, rows).largest_pool(target.BUDGET) for rows in jobs.ROWS)
        needs = max(needed(seen) + jobs.bytes_of_missing_layers(job) for job, seen in compiled)
        measured = pages + (target.BUDGET - needs) // page
        rows.append(report.PoolRow(name, page, predicted, measured))
        if abs(measured - predicted) > 0.1 * predicted:
            failures.append(f"{name}: {measured} pages fit, but arithmetic says {predicted}")
    return rows, failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aot", description="The AOT gate (docs/aot.md).")
    parser.add_argument("--all", action="store_true", help="all steps with all of their layers")
    parser.add_argument("--only", default="", help="jobs that have this in their name")
    parser.add_argument("--out", type=Path, help="write what was seen as JSON")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    if missing := [*(wheel for wheel in WHEELS if not installed(wheel)), *([] if ptxas() else ["ptxas"])]:
        print(f"make aot: skipped, for there is no {' and no '.join(missing)}; it installs what it can get")
        return 0
    start = time.monotonic()
    # The longest first. The step that decides how large a pool fits is always whole: what adds up over layers shows.
    decisive = jobs.Job("step", "gpt-oss-120b", rows=max(jobs.ROWS))
    wanted: list[jobs.Job] = list(dict.fromkeys([decisive, *(jobs.step_jobs(0) if options.all else [])]))
    wanted += [job for job in jobs.step_jobs(LAYERS)[::-1] if replace(job, layers=0) not in wanted]
    wanted += [
        jobs.Job("step", "gpt-oss-120b", rows=max(jobs.ROWS), layers=LAYERS, reposition="copy"),
        jobs.Job("step", "gpt-oss-120b", rows=1, layers=LAYERS, donated=False),
        *jobs.kernel_jobs(),
    ]
    results = observe_all([job for job in wanted if options.only in job.name], options.processes)
    failures = [f"{job.name}: {failure}" for job, seen in results.items() for failure in judge(job, seen)]
    pools, disagreements = judge_pool(results)
    failures += disagreements
    print(report.tables(results, pools))
    print(f"{len(results)} compilations in {time.monotonic() - start:.0f} s, {len(failures)} failures")
    for failure in failures:
        print(f"FAILED  {failure}")
    if options.out is not None:
        options.out.write_text(json.dumps(report.as_json(results, pools, failures), indent=1))
    return 1 if failures else 0


def ptxas() -> str | None:
    """NVIDIA's assembler: on the PATH, or in the wheel nvidia-cuda-nvcc-cu12."""
    wheel = importlib.util.find_spec("nvidia.cuda_nvcc") if importlib.util.find_spec("nvidia") else None
    folders = [f"{folder}/bin" for folder in (wheel and wheel.submodule_search_locations) or ()]
    return shutil.which("ptxas") or shutil.which("ptxas", path=os.pathsep.join(folders))


def installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
