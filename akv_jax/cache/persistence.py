"""The cache as files, from one run to the next (`--cache-dir`): written at once, believed only if whole and ours.

A folder holds `index.akv` and the folder of array files that it names. The index is a fixed header (what it is, format,
length, SHA-256) and msgpack: what the K and V depend on, the tree as columns, and size and SHA-256 of each array file.
An array file is NumPy's `.npy`: one layer's K or V of every resident page, row by row in the tree's order of slots.

Array files go to a new folder, all is synced to the disk, and then one rename puts the new index in place of the old:
a crash at any moment leaves the old state or the new one. Then the old folder goes, so for a moment both are there.

What is written says what was said to the model, and who said it (salts): files are for their owner alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np

from akv_jax.cache.export import TreeExport, from_columns, to_columns
from akv_jax.config import ModelConfig

#: Raised whenever the files' layout, or what a page's bytes mean, changes.
FORMAT = 1
INDEX = "index.akv"
_MAGIC = b"AKV-JAX KV cache"
#: What it is, format, length of what follows and its SHA-256.
_HEADER = struct.Struct("<16sIQ32s")
_FOLDER_PREFIX = "akv-pages-"
#: Of no influence on K and V: what a model is called, and how far it may go.
_FREE = {"name", "max_positions"}


class StoredCacheError(Exception):
    """What is stored cannot be used; the message says which file and why."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the K and V of a token depend on besides the history up to it.

    The tokenizer does not matter (paths are token ids), nor do pool sizes, nor the way to reposition: birth versions
    are the same in both (DESIGN C8). `weights` is `weights_digest` of the model's.
    """

    model: ModelConfig
    weights: str
    dtype: str

    def plain(self) -> dict[str, Any]:
        """As msgpack gives it back."""
        model = {name: value for name, value in asdict(self.model).items() if name not in _FREE}
        whole = {"dtype": self.dtype, "model": model, "weights": self.weights, "name": self.model.name}
        return msgpack.unpackb(cast(bytes, msgpack.packb(whole)))


@dataclass(frozen=True, slots=True)
class StoredCache:
    """What a folder holds, its index checked; the array files are checked as they are read."""

    folder: Path
    tree: TreeExport
    #: Name, bytes and SHA-256 of each array file.
    files: tuple[tuple[str, int, bytes], ...]

    def arrays(self, count: int) -> Iterator[tuple[str, np.ndarray]]:
        """The first `count` rows of every array with its name; StoredCacheError once one turns out to be damaged."""
        for name, size, digest in self.files:
            path = self.folder / f"{name}.npy"
            try:
                data = path.read_bytes()
            except OSError as error:
                raise StoredCacheError(f"{path} cannot be read: {error.strerror}") from None
            if len(data) != size:
                raise StoredCacheError(f"{path} is damaged: {len(data)} bytes, expected {size}")
            if hashlib.sha256(data).digest() != digest:
                raise StoredCacheError(f"{path} is damaged: its checksum is wrong")
            try:
                rows = np.load(io.BytesIO(data), allow_pickle=False)
            except ValueError as error:
                raise StoredCacheError(f"{path} is no array file: {error}") from None
            if rows.ndim != 2 or len(rows) != self.tree.num_slots:
                raise StoredCacheError(f"{path} has shape {rows.shape}, expected {self.tree.num_slots} rows")
            yield name, rows[:count]


# -- writing ---------------------------------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """Make the folder, for its owner alone. OSError if that cannot be, or if nothing can be written there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(13, "cannot be written to", str(folder))


def save(folder: Path, identity: Identity, tree: TreeExport, arrays: Iterable[tuple[str, np.ndarray]]) -> int:
    """Put this state in place of what the folder holds; returns bytes written.

    `arrays`: names, each with [slots, anything], a row a slot. OSError if the disk does not take it, StoredCacheError
    if the folder's index is not ours; in either case what was there stays.
    """
    prepare(folder)
    with _locked(folder, fcntl.LOCK_EX):
        # An empty one is nobody's: what a full disk or a crash of the machine leaves.
        if (old := _head(folder / INDEX)) and not old.startswith(_MAGIC):
            raise StoredCacheError(f"{folder / INDEX} is no KV cache of this program; it is left alone")
        new = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=folder))
        try:
            written = _write_all(new, identity, tree, arrays)
            os.replace(new / INDEX, folder / INDEX)
        except BaseException:
            _remove(new)
            raise
        _sync_folder(folder)
        for other in folder.glob(f"{_FOLDER_PREFIX}*"):
            # The state before this one, and what crashes have left.
            if other != new:
                _remove(other)
    return written


def _write_all(new: Path, identity: Identity, tree: TreeExport, arrays: Iterable[tuple[str, np.ndarray]]) -> int:
    """Everything into the new folder, safe on the disk."""
    files = []
    for name, rows in arrays:
        with _CheckedFile(new / f"{name}.npy") as file:
            np.lib.format.write_array(file, rows, allow_pickle=False)
        files.append([name, file.size, file.digest])
    index = {
        "identity": identity.plain(),
        "folder": new.name,
        "files": files,
        "salts": tree.salts,
        "tree": to_columns(tree),
    }
    payload = cast(bytes, msgpack.packb(index))
    with _CheckedFile(new / INDEX) as file:
        file.write(_HEADER.pack(_MAGIC, FORMAT, len(payload), hashlib.sha256(payload).digest()))
        file.write(payload)
    _sync_folder(new)
    return sum(size for _, size, _ in files) + file.size


class _CheckedFile:
    """A new file for its owner alone, that knows what was written to it; closing it syncs it."""

    def __init__(self, path: Path) -> None:
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self.size += self._file.write(data)

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def __enter__(self) -> _CheckedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def _sync_folder(folder: Path) -> None:
    """Names are safe on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(pages: Path) -> None:
    """Remove a folder of array files, and nothing that is none."""
    with contextlib.suppress(OSError):
        for path in [*pages.glob("*.npy"), pages / INDEX]:
            path.unlink(missing_ok=True)
        pages.rmdir()


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    """One writer at a time, and none while another process reads. The system lets go when a process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


# -- reading ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(folder: Path, identity: Identity) -> Iterator[StoredCache | None]:
    """What the folder holds, for as long as the context lasts; None if that is nothing.

    StoredCacheError if it is not ours, of another format, damaged, or of another model or dtype than `identity`.
    """
    path = folder / INDEX
    with contextlib.ExitStack() as stack:
        try:
            stored = None
            if path.exists():
                stack.enter_context(_locked(folder, fcntl.LOCK_SH))
                stored = _read_index(path, identity)
        except OSError as error:
            raise StoredCacheError(f"{error.filename or path} cannot be read: {error.strerror}") from None
        yield stored


def _head(path: Path) -> bytes | None:
    """The first bytes of a file, None if there is none."""
    try:
        with path.open("rb") as file:
            return file.read(_HEADER.size)
    except FileNotFoundError:
        return None


def _read_index(path: Path, identity: Identity) -> StoredCache:
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        raise StoredCacheError(f"{path} is no KV cache of this program")
    if len(data) < _HEADER.size:
        raise StoredCacheError(f"{path} is damaged: {len(data)} bytes, not even a header")
    _, version, length, digest = _HEADER.unpack_from(data)
    if version != FORMAT:
        raise StoredCacheError(f"{path} has format {version}, this program reads format {FORMAT}")
    payload = memoryview(data)[_HEADER.size :]
    if len(payload) != length:
        raise StoredCacheError(f"{path} is damaged: {len(payload)} bytes after its header, expected {length}")
    if hashlib.sha256(payload).digest() != digest:
        raise StoredCacheError(f"{path} is damaged: its checksum is wrong")
    try:
        index = msgpack.unpackb(payload)
        _compare(path, index["identity"], identity.plain())
        tree = from_columns(tuple(index["salts"]), index["tree"])
        files = tuple((_plain_name(name), int(size), bytes(digest)) for name, size, digest in index["files"])
        return StoredCache(path.parent / _plain_name(index["folder"]), tree, files)
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise StoredCacheError(f"{path} holds no tree that could be: {error!r}") from None


def _plain_name(name: str) -> str:
    """A name in a folder, never a way out of it."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
        raise ValueError(f"{name!r} is no name of a file")
    return name


def _compare(path: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """StoredCacheError that names the first thing in which the two differ."""
    if stored["dtype"] != wanted["dtype"]:
        raise StoredCacheError(f"{path} holds {stored['dtype']}, this server computes in {wanted['dtype']}")
    old, new = stored["model"], wanted["model"]
    different = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if different:
        raise StoredCacheError(
            f"{path} is of another model: {stored['name']}, and this is {wanted['name']}, "
            f"with other {', '.join(different)}"
        )
    if stored["weights"] != wanted["weights"]:
        raise StoredCacheError(
            f"{path} is of other weights: {stored['name']} {stored['weights'][:12]}, "
            f"and this is {wanted['name']} {wanted['weights'][:12]}"
        )
