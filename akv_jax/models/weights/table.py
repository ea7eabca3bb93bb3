"""Every weight declared once: its place in the params tree, shape, logical axes and name in each file format.

The table is derived from a `ModelConfig` alone. Loading walks it, and so does sharding (DESIGN R5), which maps the
logical axes to mesh axes. Weights are stored `[out, in]`, the order both file formats have and the faster one for few
rows on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import ml_dtypes  # noqa: F401  (makes np.dtype("bfloat16") known)
import numpy as np

from akv_jax.config import ModelConfig
from akv_jax.models.weights.errors import ModelError
from akv_jax.runtime.host_array import empty_aligned

#: `{"embed", "layers": [{"attn_norm", "q", ...}], "norm", "head"?}`; see `weight_table` for every name and shape.
Params = dict[str, Any]

#: How many names of missing, extra or misshapen tensors an error message lists.
_MOST_NAMES = 5


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """One array of the params tree.

    `axes` has a logical name for each dimension: "vocab", "embed" (the residual stream), "heads" (query heads times
    head_dim), "kv_heads", "ffn", "experts", or None for one that is never split.
    """

    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    #: The tensor's name in a GGUF file.
    gguf: str
    #: Its name in a Hugging Face checkpoint; several are stacked along a new first axis (one tensor an expert).
    hf: tuple[str, ...]

    @property
    def name(self) -> str:
        return ".".join(str(part) for part in self.path)

    def sources(self, file_format: Literal["gguf", "hf"]) -> tuple[str, ...]:
        return (self.gguf,) if file_format == "gguf" else self.hf


class TensorSource(Protocol):
    """A file, or several, of named tensors."""

    @property
    def file_format(self) -> Literal["gguf", "hf"]: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, outermost dimension first."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in a floating-point dtype. Called from several threads."""
        ...


def weight_table(config: ModelConfig) -> tuple[ArrayInfo, ...]:
    """All weights of a model, in the order of the forward pass."""
    v, d = config.vocab_size, config.hidden_size
    table = [ArrayInfo(("embed",), (v, d), ("vocab", "embed"), "token_embd.weight", ("model.embed_tokens.weight",))]
    for layer in range(config.num_layers):
        table += _attention(config, layer)
        table += _dense_ffn(config, layer) if config.moe is None else _sparse_ffn(config, layer)
    table.append(ArrayInfo(("norm",), (d,), ("embed",), "output_norm.weight", ("model.norm.weight",)))
    if not config.tie_embeddings:
        table.append(ArrayInfo(("head",), (v, d), ("vocab", "embed"), "output.weight", ("lm_head.weight",)))
    return tuple(table)


def _attention(config: ModelConfig, layer: int) -> list[ArrayInfo]:
    d = config.hidden_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def info(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], gguf: str, hf: str) -> ArrayInfo:
        return ArrayInfo(("layers", layer, name), shape, axes, f"blk.{layer}.{gguf}", (f"model.layers.{layer}.{hf}",))

    infos = [
        info("attn_norm", (d,), ("embed",), "attn_norm.weight", "input_layernorm.weight"),
        info("q", (heads, d), ("heads", "embed"), "attn_q.weight", "self_attn.q_proj.weight"),
        info("k", (kv_heads, d), ("kv_heads", "embed"), "attn_k.weight", "self_attn.k_proj.weight"),
        info("v", (kv_heads, d), ("kv_heads", "embed"), "attn_v.weight", "self_attn.v_proj.weight"),
        info("o", (d, heads), ("embed", "heads"), "attn_output.weight", "self_attn.o_proj.weight"),
    ]
    if config.attention_bias:
        infos += [
            info("q_bias", (heads,), ("heads",), "attn_q.bias", "self_attn.q_proj.bias"),
            info("k_bias", (kv_heads,), ("kv_heads",), "attn_k.bias", "self_attn.k_proj.bias"),
            info("v_bias", (kv_heads,), ("kv_heads",), "attn_v.bias", "self_attn.v_proj.bias"),
            info("o_bias", (d,), ("embed",), "attn_output.bias", "self_attn.o_proj.bias"),
        ]
    if config.qk_norm:
        infos += [
            info("q_norm", (config.head_dim,), (None,), "attn_q_norm.weight", "self_attn.q_norm.weight"),
            info("k_norm", (config.head_dim,), (None,), "attn_k_norm.weight", "self_attn.k_norm.weight"),
        ]
    if config.attention_sinks:
        infos.append(info("sinks", (config.num_heads,), ("heads",), "attn_sinks.weight", "self_attn.sinks"))
    infos.append(info("ffn_norm", (d,), ("embed",), "ffn_norm.weight", "post_attention_layernorm.weight"))
    return infos


def _dense_ffn(config: ModelConfig, layer: int) -> list[ArrayInfo]:
    d, f = config.hidden_size, config.intermediate_size

    def info(name: str, shape: tuple[int, int], axes: tuple[str, str]) -> ArrayInfo:
        hf = f"model.layers.{layer}.mlp.{name}_proj.weight"
        return ArrayInfo(("layers", layer, name), shape, axes, f"blk.{layer}.ffn_{name}.weight", (hf,))

    return [
        info("gate", (f, d), ("ffn", "embed")),
        info("up", (f, d), ("ffn", "embed")),
        info("down", (d, f), ("embed", "ffn")),
    ]


def _sparse_ffn(config: ModelConfig, layer: int) -> list[ArrayInfo]:
    assert config.moe is not None
    d, f, experts = config.hidden_size, config.moe.intermediate_size, config.moe.num_experts
    gguf, hf = f"blk.{layer}.ffn_", f"model.layers.{layer}.mlp."

    def info(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> ArrayInfo:
        each = tuple(f"{hf}experts.{expert}.{name}_proj.weight" for expert in range(experts))
        path = ("layers", layer, f"experts_{name}")
        return ArrayInfo(path, (experts, *shape), ("experts", *axes), f"{gguf}{name}_exps.weight", each)

    router = ("layers", layer, "router")
    return [
        # Every device routes every token.
        ArrayInfo(router, (experts, d), (None, "embed"), f"{gguf}gate_inp.weight", (f"{hf}gate.weight",)),
        info("gate", (f, d), ("ffn", "embed")),
        info("up", (f, d), ("ffn", "embed")),
        info("down", (d, f), ("embed", "ffn")),
    ]


def build_params(table: Iterable[ArrayInfo], leaf: Callable[[ArrayInfo], Any]) -> Params:
    """The params tree with `leaf(info)` at every place of the table."""
    params: Params = {"layers": []}
    for info in table:
        if len(info.path) == 1:
            params[str(info.path[0])] = leaf(info)
            continue
        _, layer, name = info.path
        while len(params["layers"]) <= int(layer):
            params["layers"].append({})
        params["layers"][int(layer)][name] = leaf(info)
    return params


def load_params(
    table: tuple[ArrayInfo, ...],
    source: TensorSource,
    dtype: str | np.dtype,
    transform: Callable[[ArrayInfo, np.ndarray], np.ndarray] | None = None,
    on_array: Callable[[ArrayInfo], None] | None = None,
) -> Params:
    """Read every weight of the table as a NumPy array of `dtype` ("float32" or "bfloat16").

    `transform` rearranges what the format stores in another order than we do; `on_array` is told of each one read.
    Raises `ModelError` that lists the missing, unexpected and misshapen tensors, before anything is read.
    """
    _check_complete(table, source)
    wanted = np.dtype(dtype)

    def read(info: ArrayInfo) -> np.ndarray:
        names = info.sources(source.file_format)
        array = source.read(names[0]) if len(names) == 1 else np.stack([source.read(name) for name in names])
        if transform is not None:
            array = transform(info, array)
        # Where weights are computed with on the host, they are there once.
        aligned = empty_aligned(array.shape, wanted)
        aligned[...] = array
        return aligned

    arrays: dict[tuple[str | int, ...], np.ndarray] = {}
    # Dequantising is NumPy on small blocks, which leaves the interpreter free often enough for a few threads to pay.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        for info, array in zip(table, pool.map(read, table)):
            arrays[info.path] = array
            if on_array is not None:
                on_array(info)
    return build_params(table, lambda info: arrays[info.path])


def _check_complete(table: tuple[ArrayInfo, ...], source: TensorSource) -> None:
    """Raise `ModelError` unless the source has exactly the tensors of the table, in their shapes."""
    missing, misshapen = [], []
    expected: set[str] = set()
    for info in table:
        names = info.sources(source.file_format)
        expected.update(names)
        shape = info.shape if len(names) == 1 else info.shape[1:]
        for name in names:
            found = source.shapes.get(name)
            if found is None:
                missing.append(name)
            elif found != shape:
                misshapen.append(f"{name} is {list(found)}, expected {list(shape)}")
    extra = [name for name in source.shapes if name not in expected]
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_MOST_NAMES])}{', …' if len(names) > _MOST_NAMES else ''}"
        for what, names in (("missing", missing), ("of the wrong shape", misshapen), ("unexpected", extra))
        if names
    ]
    if problems:
        raise ModelError(f"the checkpoint's tensors do not fit its configuration; {'; '.join(problems)}")
