"""Compiles one job after another, in a process of its own: what a compiler aborts on must not end the gate.

Reads a job as a line of JSON from standard input, writes what it saw as a line of JSON to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # XLA writes its own ptxas' words to standard error, and the flags are read once: before jax is imported.
        log, dumps = Path(folder, "log"), Path(folder, "dumps")
        os.environ |= {
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "TF_CPP_VMODULE": "subprocess_compilation=3",
            "XLA_FLAGS": f"--xla_dump_to={dumps}",
        }
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        from benchmarks.aot.jobs import Job

        for line in sys.stdin:
            print(json.dumps(observe(Job(**json.loads(line)), log, dumps)), flush=True)


def observe(job: Any, log: Path, dumps: Path) -> dict[str, Any]:
    """Compile a job and read what there is to read, or what went wrong."""
    from benchmarks.aot import jobs, reading

    start, before = time.monotonic(), log.stat().st_size
    try:
        compiled = jobs.compile_job(job)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:2000], "seconds": time.monotonic() - start}
    seconds, hlo, memory = time.monotonic() - start, compiled.as_text(), compiled.memory_analysis()
    with log.open(errors="replace") as file:
        file.seek(before)
        kernels = reading.kernels(file.read())
    thunks = [path.read_text() for path in dumps.glob("*.thunk_sequence.txt")]
    for path in dumps.iterdir():
        path.unlink()
    step = job.operation == "step"
    return {
        "seconds": seconds,
        "kernels": [vars_of(kernel) for kernel in kernels],
        "launches": [vars_of(launch) for text in thunks for launch in reading.launches(text)],
        "collectives": reading.collectives(hlo),
        "copies": reading.copies(hlo, jobs.pool_array(job)) if step else [],
        "donated": reading.donated(hlo),
        "largest": reading.largest(hlo, 6),
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "aliases": memory.alias_size_in_bytes,
    }


def vars_of(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}


if __name__ == "__main__":
    main()
