"""Reading a Hugging Face model directory: JSON files, and tensors from one or several safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import ml_dtypes  # noqa: F401  (safetensors gives bfloat16 tensors in its dtype)
import numpy as np
from safetensors import SafetensorError, safe_open

from akv_jax.models.weights.errors import ModelError

#: What a float checkpoint may hold; others (float8, integers) are quantised and need their scales.
_FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})


class HfDirectory:
    """An open model directory; a `TensorSource`. Raises `ModelError` for one that lacks a file or is damaged."""

    file_format: Literal["hf"] = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        #: The contents of config.json.
        self.config: dict[str, Any] = self.read_json("config.json")
        if self.config.get("quantization_config"):
            method = self.config["quantization_config"].get("quant_method")
            raise ModelError(f"{path}/config.json: quantised weights ({method}) are not read, expected float ones")
        self._files = self._tensor_files()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}
        for file in sorted(set(self._files.values())):
            self._open(file)
        for name in self._files:
            if name not in self._shapes:
                raise ModelError(f"{path}: {self._files[name]} lacks {name}, which the index says it has")

    def read_json(self, name: str, required: bool = True) -> dict[str, Any]:
        """The contents of a JSON file of the directory; {} if it is absent and not required."""
        file = self.path / name
        if not file.exists():
            if required:
                raise ModelError(f"{self.path} has no {name}, expected a Hugging Face model directory")
            return {}
        try:
            content = json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ModelError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise ModelError(f"{file}: expected a JSON object")
        return content

    def read_text(self, name: str) -> str | None:
        """The contents of a text file of the directory, None if it is absent."""
        file = self.path / name
        return file.read_text("utf-8") if file.exists() else None

    def _tensor_files(self) -> dict[str, str]:
        """File name by tensor name."""
        index = self.read_json("model.safetensors.index.json", required=False)
        if index:
            if not isinstance(index.get("weight_map"), dict):
                raise ModelError(f"{self.path}/model.safetensors.index.json: expected an object under weight_map")
            return index["weight_map"]
        if not (self.path / "model.safetensors").exists():
            raise ModelError(
                f"{self.path} has neither model.safetensors nor model.safetensors.index.json "
                "(pickled .bin checkpoints are not read)"
            )
        with self._safe_open("model.safetensors") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")

    def _safe_open(self, file: str) -> Any:
        try:
            return safe_open(self.path / file, framework="numpy")
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{self.path / file} cannot be read: {error}") from error

    def _open(self, file: str) -> None:
        """Keep the file open and note its tensors' shapes. Raises for dtypes that are not plain floats."""
        handle = self._safe_open(file)
        self._handles[file] = handle
        for name in handle.keys():  # noqa: SIM118 (no mapping: it cannot be iterated)
            view = handle.get_slice(name)
            if view.get_dtype() not in _FLOAT_TYPES:
                expected = ", ".join(sorted(_FLOAT_TYPES))
                raise ModelError(f"{self.path / file}: {name} is {view.get_dtype()}, expected one of {expected}")
            self._shapes[name] = tuple(view.get_shape())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self._shapes.items() if not self._is_redundant(name)}

    def _is_redundant(self, name: str) -> bool:
        """Whether the tensor follows from others: old checkpoints store rotary tables, some the tied head twice."""
        tied = name == "lm_head.weight" and self.config.get("tie_word_embeddings", False)
        return tied or name.endswith(".rotary_emb.inv_freq")

    def read(self, name: str) -> np.ndarray:
        """The tensor in its stored dtype."""
        return self._handles[self._files[name]].get_tensor(name)
