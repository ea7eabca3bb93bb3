"""Reading GGUF files: metadata as a plain dict, tensors dequantised to float32 by the `gguf` package.

The header is parsed here rather than by `gguf.GGUFReader`, which makes a NumPy view for every string of the vocabulary
and so takes longer (4.5 s for SmolLM2) than everything else about loading the model.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize

from akv_jax.models.weights.errors import ModelError

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class _Tensor:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    #: Bytes from the start of the file.
    offset: int
    num_bytes: int


class GgufFile:
    """An open GGUF file; a `TensorSource`. Raises `ModelError` for a file that is damaged or not GGUF."""

    file_format: Literal["gguf"] = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise ModelError(f"{path} is empty, expected a GGUF file") from error
            except OSError as error:
                raise ModelError(f"{path} is no file that can be mapped: {error.strerror}") from error
        try:
            cursor = _Cursor(self._data)
            tensor_count, metadata_count = self._preamble(cursor)
            #: Header values by key: str, int, float, bool, a list of str, or a NumPy array of numbers.
            self.metadata: dict[str, Any] = {}
            for _ in range(metadata_count):
                key = cursor.string()
                self.metadata[key] = cursor.value(cursor.value_type())
            self._tensors = self._tensor_infos(cursor, tensor_count)
        except (struct.error, ValueError, ArithmeticError) as error:
            raise ModelError(f"{path} is damaged or cut off: {error}") from error

    def _preamble(self, cursor: _Cursor) -> tuple[int, int]:
        if self._data[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it starts with {self._data[:4]!r}, expected b'GGUF'")
        cursor.offset = 4
        version = cursor.scalar("<u4")
        if version not in _SUPPORTED_VERSIONS:
            expected = " or ".join(str(version) for version in _SUPPORTED_VERSIONS)
            raise ModelError(f"{self.path}: GGUF version {version}, expected {expected}, little-endian")
        return cursor.scalar("<u8"), cursor.scalar("<u8")

    def _tensor_infos(self, cursor: _Cursor, count: int) -> dict[str, _Tensor]:
        tensors: dict[str, _Tensor] = {}
        for _ in range(count):
            name = cursor.string()
            dimensions = [cursor.scalar("<u8") for _ in range(cursor.scalar("<u4"))]
            kind_number, offset = cursor.scalar("<u4"), cursor.scalar("<u8")
            try:
                kind = GGMLQuantizationType(kind_number)
            except ValueError:
                raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind_number}") from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            # The file lists the innermost dimension first.
            shape = tuple(reversed(dimensions))
            if not shape or shape[-1] % block:
                raise ValueError(f"tensor {name} of shape {list(shape)} does not divide into {kind.name} blocks")
            tensors[name] = _Tensor(shape, kind, offset, int(np.prod(shape)) // block * block_bytes)
        alignment = int(self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        start = -(-cursor.offset // alignment) * alignment
        for name, tensor in tensors.items():
            tensors[name] = _Tensor(tensor.shape, tensor.kind, start + tensor.offset, tensor.num_bytes)
            if start + tensor.offset + tensor.num_bytes > len(self._data):
                raise ValueError(f"tensor {name} lies beyond the end of the file")
        return tensors

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised to float32, outermost dimension first."""
        tensor = self._tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        try:
            flat = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.kind)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name} of type {tensor.kind.name} cannot be dequantised") from error
        # Float32 comes as a view of the file; what we hand out must outlive a change of the file.
        return flat.reshape(tensor.shape) if flat.flags.writeable else flat.reshape(tensor.shape).copy()


class _Cursor:
    """Reads values one after another. Out of bounds raises `struct.error` or `ValueError`."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, dtype: str) -> Any:
        return self.numbers(dtype, 1)[0].item()

    def numbers(self, dtype: str, count: int) -> np.ndarray:
        values = np.frombuffer(self.data, dtype, count, self.offset)
        self.offset += values.nbytes
        return values

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.offset)
        start = self.offset + 8
        if start + length > len(self.data):
            raise ValueError(f"a string at byte {self.offset} runs beyond the end of the file")
        self.offset = start + length
        return self.data[start : self.offset].decode("utf-8")

    def value_type(self) -> GGUFValueType:
        return GGUFValueType(self.scalar("<u4"))

    def value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind != GGUFValueType.ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.value_type(), self.scalar("<u8")
        if item in _SCALARS:
            return self.numbers(_SCALARS[item], count)
        return [self.value(item) for _ in range(count)]
