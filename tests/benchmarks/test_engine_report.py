"""`benchmarks.engine` runs and says what is so, on a tiny model; what it measures in seconds is hardly looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from akv_jax.models.llama import config_from_hf
from benchmarks import engine
from benchmarks.started_server import server_times, started
from tests.models.checkpoints import HF_CONFIG, hf_tensors, random_params, write_hf

SMALL = ("--context-length", "512", "--chunked-prefill-size", "4", "--max-running-requests", "1")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is run afterwards."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `tiny_directory`, for prompts of thousands of tokens."""
    described = {**HF_CONFIG, "max_position_embeddings": 8192}
    config = config_from_hf(described)
    folder = tmp_path_factory.mktemp("models") / "long"
    return write_hf(folder, described, hf_tensors(config, random_params(config)))


def test_a_server_that_ends_at_its_start_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"junk")
    with pytest.raises(RuntimeError, match=r"exit code 2 at its start:\n(.|\n)*broken.gguf is not a GGUF file"):
        server_times(["--model", str(tmp_path / "broken.gguf")], tmp_path, runs=1)


@pytest.mark.long
def test_a_started_server_is_measured(tiny_directory: Path, tmp_path: Path) -> None:
    """It is another process than this one, which answers, and ends with the measurement."""
    with started(["--model", str(tiny_directory), *SMALL], tmp_path) as server:
        ready = server.wait_ready()
        first, second = server.first_token(0), server.first_token(1)
        assert 0 < first + ready < server.age and second > 0
        assert 50 < server.resident() < 4000
    assert server.process.poll() is not None


def report(tmp_path: Path, *flags: str) -> dict[str, Any]:
    out = tmp_path / "report.json"
    engine.main([*flags, "--cache-dir", str(tmp_path), "--json", str(out)])
    return json.loads(out.read_text())["results"]


def test_what_is_reported_of_the_server(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both dtypes unless told otherwise, cold and warm, and which one `auto` is."""
    seen: list[Any] = []

    def times(flags: list[str], cache_dir: Path, runs: int) -> engine.ServerTimes:
        seen.append((flags[1], cache_dir, flags[-2:]))
        return engine.ServerTimes(4.0, 5.0, 0.25, 812.0)

    monkeypatch.setattr(engine, "server_times", times)
    results = report(tmp_path, "--only", "server", "--model", str(tiny_directory))
    assert [dtype for dtype, *_ in seen] == ["float32", "float32", "bfloat16", "bfloat16"]
    # Warm is what cold has left behind, and one dtype leaves nothing to the other.
    folders = [folder for _, folder, _ in seen]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert all(flags == ["--model", str(tiny_directory)] for *_, flags in seen)
    assert results["auto"] in ("float32", "bfloat16")
    assert set(results["server"]) == {"float32", "bfloat16"} and set(results["server"]["float32"]) == {"cold", "warm"}
    assert results["server"]["bfloat16"]["warm"] == {
        "ready": 4.0,
        "first_token": 5.0,
        "short_prompt": 0.25,
        "resident": 812.0,
    }
    out = capsys.readouterr().out
    assert f"--dtype auto is {results['auto']} here" in out and "812" in out


def sizes(prefills: tuple[int, ...], batches: tuple[int, ...], context: int) -> list[str]:
    lengths = ["--prefills", *map(str, prefills), "--batches", *map(str, batches), "--context", str(context)]
    return ["--only", "speed", *lengths, "--runs", "1", "--steps", "2"]


@pytest.mark.long
def test_what_is_reported_of_the_speed(long_model: Path, tmp_path: Path) -> None:
    """Against transformers with the same weights; skips without it."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    small = [*sizes((40,), (1, 3), 20), "--chunk", "16", "--dtypes", "float32"]
    rows = report(tmp_path, *small, "--model", str(long_model))["speed"]
    assert list(rows) == ["float32"]
    assert list(rows["float32"]) == ["prefill 40", "decode batch 1", "decode batch 3"]
    for row in rows["float32"].values():
        assert row["ratio"] == pytest.approx(row["engine"] / row["transformers"]) and row["ratio"] > 0


@pytest.mark.long
def test_the_sizes_that_the_report_is_about(long_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    rows = report(tmp_path, *sizes((512, 2048, 6000), (1, 16), 1000), "--model", str(long_model))["speed"]
    assert set(rows) == {"float32", "bfloat16"}
    decodes = ["decode batch 1", "decode batch 16"]
    assert list(rows["bfloat16"]) == ["prefill 512", "prefill 2048", "prefill 6000", *decodes]
