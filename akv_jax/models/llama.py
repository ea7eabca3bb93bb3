"""The Llama family (Llama, SmolLM, Mistral): from a GGUF header or a `config.json` to a `ModelConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from akv_jax.config import Layer, ModelConfig, MoE, Rotary, RotaryScaling
from akv_jax.models.rope import inverse_frequencies
from akv_jax.models.weights.errors import ModelError
from akv_jax.models.weights.gguf import GgufFile
from akv_jax.models.weights.table import ArrayInfo

#: Every Llama 3.x model has these; a GGUF stores only the resulting factor of each frequency.
_LLAMA3 = RotaryScaling("llama3", factor=1.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
_ROPE_FACTORS = "rope_freqs.weight"


# --- GGUF -----------------------------------------------------------------------------------------------------------


def config_from_gguf(file: GgufFile) -> ModelConfig:
    """Translate a GGUF header. Raises `ModelError` that names the key at fault."""
    header = _Header(file)
    heads = header.integer("attention.head_count")
    hidden = header.integer("embedding_length")
    head_dim = header.integer("attention.key_length", hidden // heads)
    if (value_dim := header.integer("attention.value_length", head_dim)) != head_dim:
        raise header.error("attention.value_length", value_dim, f"the key length {head_dim}")
    experts = header.integer("expert_count", 0)
    intermediate = header.integer("feed_forward_length")
    rotary = _gguf_rotary(header, head_dim)
    layer = Layer(rotary, window=header.integer("attention.sliding_window", 0) or None)
    names = file.shapes
    return ModelConfig(
        vocab_size=names["token_embd.weight"][0] if "token_embd.weight" in names else header.integer("vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=header.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=intermediate,
        layers=(layer,) * header.integer("block_count"),
        max_positions=_max_positions(header.integer("context_length"), rotary.scaling),
        norm_eps=header.number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        # Mixtral, which renormalises the chosen experts' weights.
        moe=MoE(experts, header.integer("expert_used_count"), intermediate) if experts else None,
    )


def reorder_gguf(config: ModelConfig, info: ArrayInfo, array: np.ndarray) -> np.ndarray:
    """Rows of q and k from GGUF's order, which rotates neighbours (2i, 2i+1), to ours, which rotates halves.

    Only the first `rotary.dim` dimensions of each head are rotated, so only those move.
    """
    if len(info.path) == 1 or info.path[-1] not in ("q", "k", "q_bias", "k_bias"):
        return array
    dim = config.layers[int(info.path[1])].rotary.dim
    heads = array.reshape(-1, config.head_dim, *array.shape[1:])
    order = np.concatenate([np.arange(0, dim, 2), np.arange(1, dim, 2), np.arange(dim, config.head_dim)])
    return heads[:, order].reshape(array.shape)


def derived_gguf_tensors(name: str) -> bool:
    """Whether a tensor is no weight but part of the configuration."""
    return name == _ROPE_FACTORS


class _Header:
    """Typed access to the keys of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = file.metadata["general.architecture"]

    def error(self, key: str, value: Any, expected: str) -> ModelError:
        return ModelError(f"{self.file.path}: {self.architecture}.{key} is {value!r}, expected {expected}")

    def get(self, key: str, default: Any = None) -> Any:
        """The value; an array of one number for every layer counts as that number, if they are all the same."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return default
        if isinstance(value, np.ndarray):
            if value.size == 0 or (value != value[0]).any():
                raise self.error(key, value.tolist(), "one value for all layers")
            return value[0].item()
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(key, value, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(key, value, "a number")
        # The shortest decimal of a float32: 1e-05 where the bits, widened, would say 9.99999975e-06.
        return float(str(np.float32(value)))


def _gguf_rotary(header: _Header, head_dim: int) -> Rotary:
    rotary = Rotary(header.integer("rope.dimension_count", head_dim), header.number("rope.freq_base", 10_000.0))
    if _ROPE_FACTORS in header.file.shapes:
        return replace(rotary, scaling=_llama3_from_factors(header, rotary))
    kind = header.get("rope.scaling.type", "linear" if header.get("rope.scale_linear") else "none")
    factor = header.number("rope.scaling.factor", header.number("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return rotary
    if kind == "linear":
        return replace(rotary, scaling=RotaryScaling("linear", factor))
    if kind != "yarn":
        raise header.error("rope.scaling.type", kind, "none, linear or yarn")
    # GGUF's attention factor multiplies the magnitude that YaRN prescribes.
    attention = header.number("rope.scaling.attn_factor", header.number("rope.scaling.yarn_attn_factor", 1.0))
    scaling = RotaryScaling(
        "yarn",
        factor,
        original_context=header.integer("rope.scaling.original_context_length", header.integer("context_length")),
        beta_fast=header.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=header.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=None if attention == 1.0 else attention * (0.1 * math.log(factor) + 1.0),
    )
    return replace(rotary, scaling=scaling)


def _llama3_from_factors(header: _Header, rotary: Rotary) -> RotaryScaling:
    """The llama3 scaling whose frequencies are the plain ones divided by the file's factors."""
    factors = header.file.read(_ROPE_FACTORS).astype(np.float64).reshape(-1)
    context = header.integer("rope.scaling.original_context_length", _LLAMA3.original_context)
    scaling = replace(_LLAMA3, factor=round(float(factors.max()), 4), original_context=context)
    plain, scaled = inverse_frequencies(rotary), inverse_frequencies(replace(rotary, scaling=scaling))
    if factors.shape != plain.shape or not np.allclose(scaled * factors, plain, rtol=1e-4):
        raise ModelError(
            f"{header.file.path}: the frequency factors in {_ROPE_FACTORS} are not those of Llama 3 "
            "(low 1, high 4); load the original Hugging Face directory instead"
        )
    return scaling


# --- Hugging Face ---------------------------------------------------------------------------------------------------


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Translate a `config.json`. Raises `ModelError` that names the field at fault."""
    _require(config, "hidden_act", {"silu", "swish"}, "silu")
    _require(config, "mlp_bias", {False, None}, False)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    head_dim = _integer(config, "head_dim", hidden // heads)
    rotary = _hf_rotary(config, head_dim)
    window = config.get("sliding_window") if config.get("model_type") == "mistral" else None
    return ModelConfig(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=_integer(config, "intermediate_size"),
        layers=(Layer(rotary, window),) * _integer(config, "num_hidden_layers"),
        max_positions=_max_positions(_integer(config, "max_position_embeddings"), rotary.scaling),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
    )


def _require(config: Mapping[str, Any], field: str, allowed: set[Any], default: Any) -> None:
    if (value := config.get(field, default)) not in allowed:
        expected = " or ".join(sorted(repr(choice) for choice in allowed if choice is not None))
        raise ModelError(f"config.json: {field} is {value!r}, expected {expected}")


def _integer(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"config.json: {field} is {value!r}, expected a positive integer")
    return value


def _hf_rotary(config: Mapping[str, Any], head_dim: int) -> Rotary:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling` (before)."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    base = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    return Rotary(int(head_dim * partial), float(base), scaling=_hf_scaling(rope, config))


def _hf_scaling(rope: Mapping[str, Any], config: Mapping[str, Any]) -> RotaryScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(f"config.json: rope_type is {kind!r}, expected default, linear, llama3 or yarn")
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = rope.get("factor")
    if factor is None and kind == "yarn":
        factor = config["max_position_embeddings"] / original
    if not isinstance(factor, int | float):
        raise ModelError(f"config.json: the factor of rope_type {kind} is {factor!r}, expected a number")
    if kind == "linear":
        return RotaryScaling("linear", float(factor))
    if kind == "llama3":
        if absent := [key for key in ("low_freq_factor", "high_freq_factor") if key not in rope]:
            raise ModelError(f"config.json: rope_type llama3 needs {' and '.join(absent)}")
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        return RotaryScaling("llama3", float(factor), original, low_freq_factor=low, high_freq_factor=high)
    return RotaryScaling(
        "yarn",
        float(factor),
        original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(rope, float(factor)),
        truncate=bool(rope.get("truncate", True)),
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """The factor as given, or from DeepSeek's pair of scales; None is YaRN's own."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim") and factor > 1:
        log = 0.1 * math.log(factor)
        return (log * rope["mscale"] + 1.0) / (log * rope["mscale_all_dim"] + 1.0)
    return None


def _max_positions(stated: int, scaling: RotaryScaling | None) -> int:
    """N of DESIGN A7: the stated context, or a YaRN extension of the original one that the file did not count in."""
    if scaling is not None and scaling.kind == "yarn":
        return max(stated, int(scaling.factor * scaling.original_context))
    return stated
