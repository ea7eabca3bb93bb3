"""SmolLM2 as it is loaded, and what it says with these weights in another implementation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from akv_jax.config import Layer, ModelConfig, Rotary
from akv_jax.models.llama import config_from_hf
from akv_jax.models.load import load_model
from akv_jax.models.weights.table import weight_table
from benchmarks.transformers_model import llama_in_transformers
from tests.models import checkpoints as tiny


def test_smollm2(smollm2):
    assert smollm2.config == ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        layers=(Layer(Rotary(64, 100_000.0)),) * 30,
        max_positions=8192,
        norm_eps=1e-5,
        tie_embeddings=True,
        name="SmolLM2-135M-Instruct",
    )
    assert smollm2.name == "SmolLM2-135M-Instruct"
    assert smollm2.eos_token_ids == (2, 0)
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.chat_template is not None and "<|im_start|>" in smollm2.chat_template
    assert len(smollm2.params["layers"]) == 30 and "head" not in smollm2.params
    for info in weight_table(smollm2.config):
        array = tiny.array_of(smollm2.params, info.path)
        assert array.shape == info.shape and array.dtype == np.float32, info.name
        # Nothing outside may change it: it is ours, and not a view of the file.
        assert array.flags.owndata or array.base.flags.owndata, info.name


def test_smollm2_answers_in_transformers(smollm2):
    """Its known greedy reply, from our weights in transformers' Llama: rows of q and k are where they belong."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = llama_in_transformers(smollm2)
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    reply = "The capital of France is Paris.<|im_end|>"
    start = len(smollm2.tokenizer.encode(prompt))
    ids = smollm2.tokenizer.encode(prompt + reply)
    with torch.no_grad():
        best = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
    assert best[start - 1 : -1] == ids[start:]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Llama-3.2-1B-Instruct"),
        ("tinyllama-1.1b-chat-v1.0.f16.gguf", "tinyllama-1.1b-chat-v1.0"),
        ("model-IQ4_XS.gguf", "model"),
        ("plain.gguf", "plain"),
    ],
)
def test_name_of_a_gguf_file(tmp_path, file, name):
    config = replace(config_from_hf(tiny.HF_CONFIG), num_kv_heads=1)
    path: Path = tiny.write_gguf(tmp_path / file, config, tiny.gguf_tensors(config, tiny.random_params(config)))
    model = load_model(path, "float32", tmp_path, progress=False)
    assert model.name == name == model.config.name
    assert model.source == str(path)


def test_progress_is_shown_where_asked_for(tmp_path, capfd):
    config = config_from_hf(tiny.HF_CONFIG)
    path = tiny.write_gguf(tmp_path / "tiny.gguf", config, tiny.gguf_tensors(config, tiny.random_params(config)))
    load_model(path, "float32", tmp_path, progress=False)
    assert capfd.readouterr() == ("", "")
    load_model(path, "float32", tmp_path, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "Loading tiny (float32)" in err and "21/21" in err
