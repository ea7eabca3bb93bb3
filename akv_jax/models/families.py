"""Which file translates which model. A new family is a file beside `llama.py` and an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from akv_jax.config import ModelConfig
from akv_jax.models import llama
from akv_jax.models.weights.errors import ModelError
from akv_jax.models.weights.gguf import GgufFile
from akv_jax.models.weights.table import ArrayInfo


@dataclass(frozen=True, slots=True)
class Family:
    """How models of one family are written in files."""

    name: str
    #: Values of `general.architecture` in GGUF files.
    gguf_architectures: frozenset[str]
    #: Values of `model_type` in config.json.
    hf_model_types: frozenset[str]
    config_from_gguf: Callable[[GgufFile], ModelConfig]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    #: Rearranges a weight whose rows GGUF keeps in another order than we do.
    reorder_gguf: Callable[[ModelConfig, ArrayInfo, np.ndarray], np.ndarray]
    #: Tensors of a GGUF file that the configuration has taken in.
    derived_gguf_tensors: Callable[[str], bool]


FAMILIES = (
    Family(
        "llama",
        gguf_architectures=frozenset({"llama"}),
        hf_model_types=frozenset({"llama", "mistral"}),
        config_from_gguf=llama.config_from_gguf,
        config_from_hf=llama.config_from_hf,
        reorder_gguf=llama.reorder_gguf,
        derived_gguf_tensors=llama.derived_gguf_tensors,
    ),
)


def family_of_gguf(architecture: Any) -> Family:
    """The family of a GGUF `general.architecture`; `ModelError` if there is none."""
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = sorted(name for family in FAMILIES for name in family.gguf_architectures)
    raise ModelError(f"general.architecture is {architecture!r}, expected one of {', '.join(known)}")


def family_of_hf(model_type: Any) -> Family:
    """The family of a Hugging Face `model_type`; `ModelError` if there is none."""
    for family in FAMILIES:
        if model_type in family.hf_model_types:
            return family
    known = sorted(name for family in FAMILIES for name in family.hf_model_types)
    raise ModelError(f"config.json: model_type is {model_type!r}, expected one of {', '.join(known)}")
