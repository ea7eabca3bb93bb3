"""The kernel benchmarks: what is wrong is never timed, counts are right, and the GPU script needs nothing but JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gpu_check, kernels
from benchmarks.checking import prepare_attention, prepare_grouped_matmul, prepare_reposition
from benchmarks.launches import (
    SMOLLM2,
    Experts,
    Launch,
    Shape,
    arguments_of,
    batch_of,
    moves_of,
    pool,
    rotation_of,
    table,
)
from pallas_kernels.cases import cases
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.grouped_matmul.reference import multiply
from pallas_kernels.grouped_matmul.xla import grouped_matmul
from pallas_kernels.reposition.cases import cases as reposition_cases
from pallas_kernels.reposition.reference import move
from pallas_kernels.reposition.xla import reposition
from pallas_kernels.segment_attention.reference import attend
from pallas_kernels.segment_attention.xla import segment_attention

SMALL = Shape("small", 4, 2, 16)
ROOT = Path(__file__).parents[2]


def test_a_wrong_kernel_is_named_and_not_timed(tmp_path, monkeypatch, capsys) -> None:
    """R4: exit code 1, its case in the report, and no time of it."""
    (tmp_path / "a_little_off.py").write_text(
        "from pallas_kernels.segment_attention import xla\n"
        "def segment_attention(*arguments):\n    return xla.segment_attention(*arguments) * 1.01\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--backend", "a_little_off,xla", "--cases", "one_query,gaps", "--out", str(tmp_path)]
    assert kernels.main([*flags, "--dtype", "float32", "--sizes", "SmolLM2 decode 8 x 2k"]) == 1
    assert "off by" in capsys.readouterr().out
    results = json.loads((tmp_path / "segment_attention.json").read_text())["results"]
    wrong = [verdict["wrong"] for verdict in results["verdicts"]["a_little_off"]]
    assert all("more than 2e-05" in text for text in wrong)
    assert [verdict["wrong"] for verdict in results["verdicts"]["xla"]] == [None, None]
    (timing,) = results["timings"]
    assert timing["backend"] == "xla" and timing["seconds"] > 0
    assert timing["bytes/s"] == pytest.approx(timing["bytes"] / timing["seconds"])
    svg = (tmp_path / "segment_attention.svg").read_text()
    assert svg.startswith("<svg") and "SmolLM2 decode 8 x 2k" in svg and "a_little_off" not in svg


def test_what_a_kernel_raises_is_a_verdict(capsys) -> None:
    """A GPU kernel on a machine without one fails, and the command says so."""
    flags = ["--op", "reposition", "--backend", "pallas_triton", "--cases", "one", "--sizes", "none"]
    assert kernels.main(flags) == 1
    assert "failed: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend", "flash"], "unknown segment_attention backend 'flash'"),
        (["--cases", "nosuch"], "--cases: 'nosuch' is none of mixed"),
        (["--sizes", "huge"], "--sizes: 'huge' is none of SmolLM2 decode"),
    ],
)
def test_unknown_names_are_refused(flags: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        kernels.main(flags)
    assert message in capsys.readouterr().err


def test_each_way_to_be_wrong_is_seen() -> None:
    """C2, R4: keys, values, untouched pages, and rows of no task."""

    def values_halved(k, v, *others):
        k, v = reposition(k, v, *others)
        return k, v * 0.5

    def scratched(k, v, *others):
        k, v = reposition(k, v, *others)
        return k.at[1150:].add(1.0), v

    def unturned(k, v, moves, *others):
        return reposition(k, v, moves._replace(shift=moves.shift * 0), *others)

    case = reposition_cases()["one"]
    for function, wrong in ((values_halved, "values"), (scratched, "no target"), (unturned, "off by")):
        assert wrong in str(prepare_reposition("one", case, function)().wrong)
    nothing = prepare_attention("one_query", cases()["one_query"], lambda *a: segment_attention(*a) + 1e-6)()
    assert nothing.wrong == "rows of no task are not zeros"


def test_what_is_not_written_is_seen() -> None:
    """R2: over NaN in place of zeros, by a backend that takes what it writes over."""

    def added(*arguments, out):
        return segment_attention(*arguments, out=out) + 0 * out[:1]

    def ignored(*arguments, out):
        return segment_attention(*arguments)

    for function, wrong in ((added, "not every element is written"), (ignored, "rows of no task are written")):
        assert prepare_attention("one_query", cases()["one_query"], function)().wrong == wrong
    case = grouped_cases.cases()["one_row"]
    left = prepare_grouped_matmul("one_row", case, lambda *inputs, out: grouped_matmul(*inputs).at[0, 0].set(out[0, 0]))
    assert left().wrong == "off by nan, more than 2e-05"
    assert prepare_grouped_matmul("one_row", case, grouped_matmul)().wrong is None


def test_timed_products_are_well_formed() -> None:
    """Rows of experts that are elsewhere are of no group, and what is counted is what has to be done."""
    launch = Experts("small", 4, 2, 16, 8, tokens=30, bias=True)
    x, weight, sizes, bias = launch.arguments(jnp.float32)
    assert (x.shape, weight.shape, bias.shape) == ((60, 16), (4, 8, 16), (4, 8))
    rows = int(sizes.sum())
    assert 0 < rows < 60
    np.testing.assert_allclose(grouped_matmul(x, weight, sizes, bias), multiply(x, weight, sizes, bias), atol=2e-5)
    assert launch.flops == 2 * rows * 16 * 8
    assert launch.bytes_moved(4) == 4 * (int((sizes > 0).sum()) * 16 * 8 + rows * 16 + 60 * 8)


@pytest.mark.parametrize(
    "launch",
    [
        Launch(SMALL, 3, 40),
        Launch(SMALL, 2, 300, run=100),
        Launch(SMALL, 1, 10, 60, 3, tile=16),
        Launch(SMALL, 1, 30, 40, 2, window=7, run=0, tile=16),
    ],
)
def test_launches_are_well_formed(launch: Launch) -> None:
    """R1: what is timed is what the oracle computes, and FLOP and bytes are those of what its queries see."""
    pools = pool(launch.pages + 10, 32, jnp.float32, 0), pool(launch.pages + 10, 32, jnp.float32, 1)
    arguments = arguments_of(launch, *pools)
    arrays = [np.asarray(a) for a in arguments[:3]]
    meant = attend(*arrays, arguments.batch, *map(np.asarray, arguments[4:6]), None, attention=launch.attention)
    np.testing.assert_allclose(segment_attention(*arguments), meant, atol=2e-5)
    batch = batch_of(launch, len(pools[0]))
    seen = entries = 0
    for tasks in (batch.rows, batch.tiles):
        for task in range(int(tasks.num)):
            view = batch.positions[tasks.first[task] : tasks.first[task] + tasks.length[task]]
            rows = batch.query_positions[tasks.query[task] : tasks.query[task] + tasks.count[task]]
            distance = rows[:, None] - view
            seen += int(((distance >= 0) & (distance < (launch.window or 10**6))).sum())
    assert launch.flops == 4 * 4 * 16 * seen
    size = launch.queries // launch.segments
    for segment in range(launch.segments):
        end = launch.context + (segment + 1) * size
        entries += min(end, size - 1 + (launch.window or end))
    rows = launch.sequences * launch.queries
    assert launch.bytes_read(2) == 2 * (2 * 32 * launch.sequences * entries + 2 * rows * 64)


def test_timed_moves_are_well_formed() -> None:
    """R1: no target is a source or listed twice."""
    moves = moves_of(50, 101, run=20)
    both = np.concatenate([moves.source[:50], moves.target[:50]])
    assert len(set(both.tolist())) == 100 and 0 not in both
    k, v = pool(101, 32, jnp.float32, 0), pool(101, 32, jnp.float32, 1)
    arrays = (np.asarray(k), np.asarray(v), moves, *table(200, 8))
    for out, meant in zip(reposition(*arrays, rotation_of(SMALL)), move(*arrays, rotation=rotation_of(SMALL))):
        np.testing.assert_allclose(out, meant, atol=2e-5)
    assert SMOLLM2.num_heads % SMOLLM2.num_kv_heads == 0


def test_the_gpu_script_needs_only_jax_and_numpy() -> None:
    """It is copied to machines that have nothing else, and nothing may be installed there."""
    code = (
        "import sys, jax; before = set(sys.modules); import benchmarks.gpu_check\n"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) <= {"benchmarks", "pallas_kernels", "jax", "numpy", "ml_dtypes"}


def test_the_gpu_script_ends_in_time(tmp_path: Path, capsys) -> None:
    """Out of time, it says what it left out, and is not wrong for that. Without a GPU it says so."""
    report = tmp_path / "report.json"
    assert gpu_check.main(["--dry-run", "--budget", "0", "--json", str(report)]) == 0
    written = json.loads(report.read_text())
    assert written["checks"] == [] and written["timings"] == [] and written["wrong"] == 0
    assert {"what": "shifts: runs of 100, decode 1 x 20", "why": "out of time"} in written["skipped"]
    assert {"what": "segment_attention one_query", "why": "out of time for checks"} in written["skipped"]
    assert gpu_check.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


@pytest.mark.long
def test_the_gpu_script_in_miniature(tmp_path: Path) -> None:
    """Every part, as on a GPU."""
    report = tmp_path / "report.json"
    command = [sys.executable, "benchmarks/gpu_check.py", "--dry-run", "--budget", "3000", "--json", str(report)]
    subprocess.run(command, cwd=ROOT, check=True)
    written = json.loads(report.read_text())
    assert written["wrong"] == 0 and not written["skipped"]
    assert {"segment_attention", "reposition", "grouped_matmul"} == {row["operation"] for row in written["checks"]}
    assert sum(row["what"].startswith("experts: ") for row in written["timings"]) == 9
    assert len(written["checks"]) == 7 and len(written["timings"]) > 10
