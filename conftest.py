"""Which tests share a process, where several run them (`make test`): those that share something slow to make."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from akv_jax.config import Disaggregation

ROOT = Path(__file__).parent
#: By file or folder, the longest name counting; a file that is not named is a group of its own. The largest come first,
#: so that the processes end together.
GROUPS = {
    "tests/serving": "servers",
    "tests/test_stateful.py": "two layers",
    "tests/test_soak.py": "two layers",
    "tests/test_pressure.py": "two layers",
    "tests/test_drift.py": "two layers",
    "tests/test_disaggregated": "two layers",
    "spec/test_conformance.py": "conformance",
    "spec/test_conformance_sharded.py": "sharded",
    "tests/runtime/test_sharded_runner.py": "sharded",
    "tests/models/test_smollm2.py": "SmolLM2",
    "tests/serving/test_smollm2.py": "SmolLM2",
    "tests/models/test_load.py": "SmolLM2",
    "tests/test_engine.py": "tiny engines",
    "tests/test_async_engine.py": "tiny engines",
    "tests/test_reuse.py": "tiny engines",
    "tests/test_isolation.py": "tiny engines",
    "tests/test_stats.py": "tiny engines",
    "tests/cache/test_inspection.py": "tiny engines",
    "tests/cache/test_persistence.py": "tiny engines",
    "tests/kernels": "kernels",
}


#: Virtual devices of every process, for the tests that lay a model over several (DESIGN R5). The others take the first,
#: and neither compile nor run slower for the rest.
DEVICES = 8


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tp", type=int, metavar="N", help="spec/test_conformance.py: lay the models over N devices")
    parser.addoption(
        "--disaggregation",
        metavar="prefill=N,decode=M",
        help="spec/test_conformance.py: prefill and decode on that many devices each",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Devices must be asked for before anything looks at them."""
    split = config.getoption("--disaggregation")
    wanted = max(config.getoption("--tp") or 1, Disaggregation.parse(split).devices if split else 1)
    jax.config.update("jax_num_cpu_devices", max(DEVICES, wanted))


def group_of(item: pytest.Item) -> str:
    path = item.path.relative_to(ROOT).as_posix()
    return GROUPS[max(starts, key=len)] if (starts := [start for start in GROUPS if path.startswith(start)]) else path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the groups for `--dist loadgroup`, and put the large ones first."""
    order = {group: place for place, group in enumerate(dict.fromkeys(GROUPS.values()))}
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))
    items.sort(key=lambda item: order.get(group_of(item), len(order)))
