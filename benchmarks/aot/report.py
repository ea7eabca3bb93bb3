"""What the gate saw, as tables and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import jax

from benchmarks.aot import target
from benchmarks.aot.jobs import Job, bytes_of_missing_layers, model_of
from benchmarks.aot.judge import is_ours, needed
from benchmarks.aot.memory import billions
from benchmarks.report import machine

Results = Mapping[Job, Mapping[str, Any]]


class PoolRow(NamedTuple):
    """The largest pool of a model, in pages (tokens), and bytes of one page on a device."""

    model: str
    page: int
    predicted: int
    measured: int


def tables(results: Results, pools: Sequence[PoolRow]) -> str:
    """Everything as Markdown tables."""
    parts = []
    if kernels := [row for job, seen in results.items() for row in _kernel_rows(job, seen)]:
        parts.append(_table(("job", "kernel", "registers", "spills", "shared memory", "threads"), kernels))
    steps = [(job, seen) for job, seen in results.items() if job.operation == "step" and "error" not in seen]
    if steps:
        names = (
            "step",
            "arguments",
            "temporaries",
            "all layers, GB",
            "sums a layer",
            "other collectives",
            "copies",
            "XLA spills",
        )
        parts.append(_table(names, [_step_row(job, seen) for job, seen in steps]))
    if pools:
        names = ("model", "bytes a page", "largest pool by arithmetic, tokens", "as compiled, tokens")
        parts.append(_table(names, pools))
    return "\n\n".join(parts)


def as_json(results: Results, pools: Sequence[PoolRow], failures: Sequence[str]) -> dict[str, Any]:
    return {
        "report": "aot",
        "machine": machine(),
        "jax": jax.__version__,
        "budget": target.BUDGET,
        "jobs": [{"name": job.name, **asdict(job), **seen} for job, seen in results.items()],
        "pools": [pool._asdict() for pool in pools],
        "failures": list(failures),
    }


def _kernel_rows(job: Job, seen: Mapping[str, Any]) -> Iterable[tuple[Any, ...]]:
    """A row for each of our kernels; variants that differ in nothing that is shown are one."""
    rows: dict[tuple[Any, ...], None] = {}
    launches = {launch["name"]: launch for launch in seen.get("launches", ())}
    for kernel in seen.get("kernels", ()):
        if not is_ours(kernel["name"]):
            continue
        launch = launches.get(kernel["name"], {"shared_memory": "-", "threads": "-"})
        spills = kernel["spill_stores"] + kernel["spill_loads"]
        name = re.sub(r"__\d+$", "", kernel["name"])
        rows[job.name, name, kernel["registers"], spills, launch["shared_memory"], launch["threads"]] = None
    return rows


def _step_row(job: Job, seen: Mapping[str, Any]) -> tuple[Any, ...]:
    layers = model_of(job).num_layers
    collectives = dict(seen["collectives"])
    sums = collectives.pop("all-reduce", 0)
    others = ", ".join(f"{count} {name}" for name, count in {"all-reduce": sums - 2 * layers, **collectives}.items())
    spilling = sum(1 for kernel in seen["kernels"] if kernel["spill_stores"] and not is_ours(kernel["name"]))
    total = needed(seen) + bytes_of_missing_layers(job)
    sizes = billions(seen["arguments"]), billions(seen["temporaries"]), billions(total)
    return job.name, *sizes, 2 if sums > 2 * layers else sums / layers, others, len(seen["copies"]), spilling


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join(
        "| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in line) + " |" for line in lines
    )
