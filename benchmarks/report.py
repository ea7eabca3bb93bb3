"""What the reports of the cache share: the machine, medians, and a JSON file beside the printed tables."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def machine() -> str:
    """Processor and cores that this process may use."""
    name = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    return f"{name}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where to write it."""
    add = parser.add_argument
    add("--model", type=Path, help="GGUF file or Hugging Face directory (default: the embedded model)")
    add("--cache-dir", type=Path, default=Path.home() / ".cache" / "akv-jax")
    add("--json", type=Path, help="also write the numbers here")


def percentile(values: Sequence[float], share: float) -> float:
    """Of no values it is not a number."""
    return float(np.percentile(values, 100 * share)) if values else float("nan")


def write_json(path: Path | None, what: str, settings: Mapping[str, Any], results: Any) -> None:
    """Numbers with what they were measured on and with; nothing if `path` is None."""
    if path is None:
        return
    report = {
        "report": what,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "results": results,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
