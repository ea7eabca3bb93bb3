"""Hugging Face directories of the Llama family."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from akv_jax.config import Rotary, RotaryScaling
from akv_jax.models.llama import config_from_hf
from akv_jax.models.load import load_model
from akv_jax.models.rope import inverse_frequencies, magnitude
from akv_jax.models.weights.errors import ModelError
from akv_jax.models.weights.table import weight_table
from tests.models import checkpoints as tiny

CONFIG = replace(config_from_hf(tiny.HF_CONFIG), name="tiny")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def load(folder: Path, dtype: str = "float32"):
    return load_model(folder, dtype, folder.parent, progress=False)  # type: ignore[arg-type]


def write(folder: Path, dtype=np.float32, shards: int = 1, files=None, **changes) -> Path:
    raw = tiny.HF_CONFIG | changes
    config = config_from_hf(tiny.HF_CONFIG | {k: v for k, v in changes.items() if k != "model_type"})
    tensors = tiny.hf_tensors(config, tiny.random_params(config), dtype)
    return tiny.write_hf(folder / "tiny", raw, tensors, shards, **(files or {}))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_come_back(tmp_path, shards, stored, dtype):
    """The random weights fit bfloat16, so every way through it is exact."""
    model = load(write(tmp_path, stored, shards), dtype)
    assert model.config == CONFIG
    expected = tiny.random_params(CONFIG)
    for info in weight_table(CONFIG):
        array = tiny.array_of(model.params, info.path)
        assert array.dtype.name == dtype and array.flags.c_contiguous
        np.testing.assert_array_equal(array.astype(np.float32), tiny.array_of(expected, info.path))


def test_float32_is_rounded_to_the_nearest_bfloat16(tmp_path):
    exact = np.full((96, 64), 1 + 3 * 2.0**-9, np.float32)
    tensors = tiny.hf_tensors(CONFIG, tiny.random_params(CONFIG)) | {"model.layers.0.mlp.up_proj.weight": exact}
    model = load(tiny.write_hf(tmp_path / "tiny", tiny.HF_CONFIG, tensors), "bfloat16")
    assert np.unique(model.params["layers"][0]["up"].astype(np.float32)) == 1 + 2.0**-7


def test_tied_and_biased(tmp_path):
    model = load(write(tmp_path, tie_word_embeddings=True, attention_bias=True))
    assert "head" not in model.params and model.config.tie_embeddings
    expected = tiny.random_params(model.config)["layers"][1]
    for name, size in (("q_bias", 64), ("k_bias", 32), ("v_bias", 32), ("o_bias", 64)):
        assert model.params["layers"][1][name].shape == (size,)
        np.testing.assert_array_equal(model.params["layers"][1][name], expected[name])


def test_redundant_tensors_are_left_out(tmp_path):
    folder = write(tmp_path, tie_word_embeddings=True)
    config = config_from_hf(tiny.HF_CONFIG | {"tie_word_embeddings": True})
    tensors = tiny.hf_tensors(config, tiny.random_params(config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    tiny.write_hf(folder, tiny.HF_CONFIG | {"tie_word_embeddings": True}, tensors)
    assert "head" not in load(folder).params


def test_tokens_and_template(tmp_path):
    files = {
        "generation_config": {"eos_token_id": [2, 5]},
        "tokenizer_config": {
            "bos_token": {"content": "<|im_start|>"},
            "eos_token": "<|im_end|>",
            "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}],
        },
    }
    model = load(write(tmp_path, files=files))
    # The declared ones first, then those that end a turn in any vocabulary.
    assert model.eos_token_ids == (2, 5, 0)
    assert (model.bos_token, model.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id) == (1, 2)
    assert model.chat_template == "yes"
    assert model.name == "tiny" == model.config.name
    files["chat_template"] = "from the file"
    assert load(write(tmp_path, files=files)).chat_template == "from the file"


def test_no_special_tokens_declared(tmp_path):
    model = load(write(tmp_path, eos_token_id=7))
    assert model.eos_token_ids == (7, 2, 0)
    assert model.bos_token == "" and model.chat_template is None


def test_a_snapshot_in_the_hub_cache_has_the_models_name(tmp_path):
    blobs = write(tmp_path)
    folder = tmp_path / "models--acme--Tiny-1B" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        os.symlink(file, folder / file.name)
    assert load(folder).name == "Tiny-1B"


def test_mistral_windows_apply_to_every_layer():
    config = config_from_hf(tiny.HF_CONFIG | {"model_type": "mistral", "sliding_window": 32})
    assert [layer.window for layer in config.layers] == [32, 32]
    assert config_from_hf(tiny.HF_CONFIG | {"model_type": "mistral", "sliding_window": None}).largest_window is None


# --- rotary scaling -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_in_both_spellings(tmp_path, field):
    scaling = LLAMA3 | ({"rope_theta": 500000.0} if field == "rope_parameters" else {})
    model = load(write(tmp_path, **{field: scaling, "rope_theta": 500000.0}))
    expected = RotaryScaling("llama3", 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0)
    assert model.config.layers[0].rotary == Rotary(16, 500000.0, scaling=expected)


SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn_attention": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": 0.75,
        "beta_fast": 16.0,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 0.707,
        "mscale_all_dim": 1.3,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_agree_with_transformers(name):
    pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    raw = tiny.HF_CONFIG | {"rope_parameters": SCALINGS[name] | {"rope_theta": 5000.0}, "head_dim": 64}
    raw.pop("rope_theta")
    theirs = llama.LlamaRotaryEmbedding(llama.LlamaConfig(**raw))
    ours = config_from_hf(raw).layers[0].rotary
    np.testing.assert_allclose(inverse_frequencies(ours), theirs.inv_freq.numpy(), rtol=1e-6)
    assert magnitude(ours) == pytest.approx(theirs.attention_scaling, rel=1e-6)


def test_yarn_extends_the_positions():
    raw = tiny.HF_CONFIG | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    config = config_from_hf(raw)
    assert config.max_positions == 2048
    assert config.layers[0].rotary.scaling == RotaryScaling("yarn", 4.0, original_context=512)


# --- what must be refused -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu' or 'swish'"),
        ({"mlp_bias": True}, "mlp_bias is True, expected False"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2', expected a positive integer"),
        ({"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic', expected default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "the factor of rope_type linear is None, expected a number"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 needs low_freq_factor and high_freq_factor"),
    ],
)
def test_config_errors_name_the_field(changes, message):
    with pytest.raises(ModelError, match=message):
        config_from_hf(tiny.HF_CONFIG | changes)


def test_other_models_and_quantised_ones_are_refused(tmp_path):
    with pytest.raises(ModelError, match="model_type is 'gemma3', expected one of llama, mistral"):
        load(write(tmp_path, model_type="gemma3"))
    with pytest.raises(ModelError, match=r"quantised weights \(fp8\) are not read"):
        load(write(tmp_path, quantization_config={"quant_method": "fp8"}))


def test_missing_and_damaged_files(tmp_path):
    for name, message in (
        ("config.json", "has no config.json"),
        ("model.safetensors", "neither model.safetensors nor model.safetensors.index.json"),
        ("tokenizer.json", "has no tokenizer.json"),
    ):
        folder = write(tmp_path)
        (folder / name).unlink()
        with pytest.raises(ModelError, match=message):
            load(folder)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        folder = write(tmp_path)
        (folder / name).write_bytes(b"{]")
        with pytest.raises(ModelError, match=name):
            load(folder)
        (folder / "tokenizer_config.json").unlink(missing_ok=True)


def test_shards_that_do_not_keep_the_index(tmp_path):
    folder = write(tmp_path, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.nothing.weight"] = "model-00001-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model\.nothing\.weight"):
        load(folder)
    folder = write(tmp_path / "second", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002"):
        load(folder)


def test_quantised_tensors_are_refused(tmp_path):
    tensors = tiny.hf_tensors(CONFIG, tiny.random_params(CONFIG))
    tensors["model.norm.weight"] = np.ones(64, np.int8)
    folder = tiny.write_hf(tmp_path / "tiny", tiny.HF_CONFIG, tensors)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I8, expected one of BF16, F16, F32, F64"):
        load(folder)
