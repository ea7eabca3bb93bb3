"""The table of weights: every leaf once, with a logical axis for each dimension."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from akv_jax.config import MoE
from akv_jax.models.llama import config_from_hf
from akv_jax.models.weights.table import build_params, load_params, weight_table
from tests.models import checkpoints as tiny

DENSE = config_from_hf(tiny.HF_CONFIG)
EVERYTHING = replace(
    DENSE,
    moe=MoE(num_experts=3, experts_per_token=2, intermediate_size=32, bias=True),
    qk_norm=True,
    attention_bias=True,
    attention_sinks=True,
)


@pytest.mark.parametrize("config", [DENSE, replace(DENSE, tie_embeddings=True), EVERYTHING])
def test_names_are_unique_and_axes_match_shapes(config):
    table = weight_table(config)
    for names in ([i.path for i in table], [i.gguf for i in table], [name for i in table for name in i.hf]):
        assert len(set(names)) == len(names)
    sizes = {
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "kv_heads": config.num_kv_heads * config.head_dim,
        "experts": 3,
    }
    for info in table:
        assert len(info.axes) == len(info.shape)
        for axis, size in zip(info.axes, info.shape):
            assert sizes.get(axis, size) == size, info


def test_tree_has_the_shapes_that_the_forward_pass_expects():
    params = build_params(weight_table(EVERYTHING), lambda info: info.shape)
    assert set(params) == {"embed", "layers", "norm", "head"}
    assert params["layers"][1] == {
        "attn_norm": (64,),
        "q": (64, 64),
        "k": (32, 64),
        "v": (32, 64),
        "o": (64, 64),
        "q_bias": (64,),
        "k_bias": (32,),
        "v_bias": (32,),
        "o_bias": (64,),
        "q_norm": (16,),
        "k_norm": (16,),
        "sinks": (4,),
        "ffn_norm": (64,),
        "router": (3, 64),
        "experts_gate": (3, 32, 64),
        "experts_up": (3, 32, 64),
        "experts_down": (3, 64, 32),
        "router_bias": (3,),
        "experts_gate_bias": (3, 32),
        "experts_up_bias": (3, 32),
        "experts_down_bias": (3, 64),
    }
    assert set(build_params(weight_table(DENSE), lambda info: 0)["layers"][0]) >= {"gate", "up", "down"}


class InMemory:
    """Tensors under their Hugging Face names."""

    file_format = "hf"

    def __init__(self, tensors):
        self.tensors = tensors
        self.shapes = {name: array.shape for name, array in tensors.items()}

    def read(self, name):
        return self.tensors[name]


def test_experts_are_stacked_and_every_array_is_reported():
    params = tiny.random_params(EVERYTHING)
    seen = []
    table = weight_table(EVERYTHING)
    source = InMemory(tiny.hf_tensors(EVERYTHING, params))
    loaded = load_params(table, source, "float32", on_array=lambda info: seen.append(info.name))
    assert seen == [info.name for info in table] and "layers.1.experts_up" in seen
    for info in table:
        np.testing.assert_array_equal(tiny.array_of(loaded, info.path), tiny.array_of(params, info.path))
