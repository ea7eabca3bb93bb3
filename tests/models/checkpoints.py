"""Tiny models on disk: the same random weights written as GGUF and as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from akv_jax.config import ModelConfig
from akv_jax.models.weights.table import Params, build_params, weight_table

#: A vocabulary of GPT-2's byte characters and a few control tokens.
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = [*CONTROL, *BYTES, "he", "ll", "hell", "Ġw"]
MERGES = ["h e", "l l", "he ll", "Ġ w"]
#: Multiples of 32, so that the rows divide into quantisation blocks; 259 does not divide anything.
HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def random_params(config: ModelConfig, seed: int = 0) -> Params:
    """Float32 weights that bfloat16 holds exactly, so that any float format may store them."""
    rng = np.random.default_rng(seed)

    def leaf(info: Any) -> np.ndarray:
        values = rng.standard_normal(info.shape, dtype=np.float32)
        return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)

    return build_params(weight_table(config), leaf)


def array_of(params: Params, path: tuple[str | int, ...]) -> np.ndarray:
    node: Any = params
    for part in path:
        node = node[part]
    return node


def write_hf(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    shards: int = 1,
    **files: Mapping[str, Any] | str,
) -> Path:
    """A model directory; `files` are further ones, by stem: an object is written as .json, a string as .jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(VOCABULARY)}, _pairs()))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    tokenizer.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        if isinstance(content, str):
            (folder / f"{stem}.jinja").write_text(content)
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names, weight_map = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _pairs() -> list[tuple[str, str]]:
    return [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]


def hf_tensors(config: ModelConfig, params: Params, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The params under their Hugging Face names; stacked experts one by one."""
    tensors: dict[str, np.ndarray] = {}
    for info in weight_table(config):
        array = array_of(params, info.path).astype(dtype)
        tensors |= {info.hf[0]: array} if len(info.hf) == 1 else dict(zip(info.hf, array))
    return tensors


def gguf_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row i of a head's first half moves to 2i, of the second to 2i + 1."""
    head_dim = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weight[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weight[head * head_dim + head_dim // 2 + i]
    return out


def gguf_tensors(config: ModelConfig, params: Params) -> dict[str, np.ndarray]:
    """The params under their GGUF names, q and k in GGUF's order."""
    tensors = {}
    for info in weight_table(config):
        array = array_of(params, info.path)
        if info.path[-1] in ("q", "q_bias"):
            array = gguf_order(array, config.num_heads)
        if info.path[-1] in ("k", "k_bias"):
            array = gguf_order(array, config.num_kv_heads)
        tensors[info.gguf] = array
    return tensors


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    extra: Callable[[gguf.GGUFWriter], None] | None = None,
    architecture: str = "llama",
) -> Path:
    """A GGUF file of the tensors, each quantised to its entry in `kinds` (float32 without one)."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.layers[0].rotary.dim)
    writer.add_rope_freq_base(config.layers[0].rotary.base)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(VOCABULARY) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    if extra is not None:
        extra(writer)
    for name, array in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
