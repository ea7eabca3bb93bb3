"""GGUF files, written with the `gguf` package and read back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from akv_jax.config import MoE, Rotary, RotaryScaling
from akv_jax.models.llama import config_from_hf
from akv_jax.models.load import load_model
from akv_jax.models.rope import inverse_frequencies
from akv_jax.models.weights.errors import ModelError
from akv_jax.models.weights.gguf import GgufFile
from akv_jax.models.weights.table import weight_table
from tests.models import checkpoints as tiny

Kind = gguf.GGMLQuantizationType
CONFIG = replace(config_from_hf(tiny.HF_CONFIG), name="tiny")


def load(path: Path, dtype: str = "float32"):
    return load_model(path, dtype, path.parent, progress=False)  # type: ignore[arg-type]


def write(folder: Path, config=CONFIG, extra: Callable[[gguf.GGUFWriter], None] | None = None, **more) -> Path:
    tensors = tiny.gguf_tensors(config, tiny.random_params(config)) | more.pop("tensors", {})
    return tiny.write_gguf(folder / "tiny.gguf", config, tensors, extra=extra, **more)


@pytest.mark.parametrize(
    "features",
    [{}, {"tie_embeddings": True}, {"attention_bias": True}, {"num_kv_heads": 1}],
    ids=["untied", "tied", "bias", "one_kv_head"],
)
def test_weights_and_config_come_back(tmp_path, features):
    config = replace(CONFIG, **features)
    model = load(write(tmp_path, config))
    assert model.config == config
    expected = tiny.random_params(config)
    for info in weight_table(config):
        np.testing.assert_array_equal(tiny.array_of(model.params, info.path), tiny.array_of(expected, info.path))
    assert ("head" in model.params) == (not config.tie_embeddings)


def test_gguf_and_hugging_face_give_the_same_model(tmp_path):
    params = tiny.random_params(CONFIG)
    from_gguf = load(write(tmp_path))
    from_hf = load(tiny.write_hf(tmp_path / "tiny", tiny.HF_CONFIG, tiny.hf_tensors(CONFIG, params)))
    assert from_gguf.config == from_hf.config
    for info in weight_table(CONFIG):
        first, second = (tiny.array_of(model.params, info.path) for model in (from_gguf, from_hf))
        np.testing.assert_array_equal(first, second, err_msg=info.name)
    text = "hell world 12<|im_end|>"
    assert from_gguf.tokenizer.encode(text) == from_hf.tokenizer.encode(text)


def test_partial_rotary_moves_only_the_rotated_rows(tmp_path):
    config = replace(CONFIG, layers=tuple(replace(x, rotary=replace(x.rotary, dim=8)) for x in CONFIG.layers))
    weight = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    model = load(write(tmp_path, config, tensors={"blk.0.attn_q.weight": weight}))
    head = [0, 2, 4, 6, 1, 3, 5, 7, *range(8, 16)]
    rows = [16 * h + row for h in range(4) for row in head]
    np.testing.assert_array_equal(model.params["layers"][0]["q"], weight[rows])


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_1, Kind.Q8_0])
def test_quantised_weights(tmp_path, kind):
    """Only `down` is quantised: its rows stay in place, so the `gguf` package's own round trip is the answer."""
    expected = tiny.random_params(CONFIG)["layers"][1]["down"]
    path = write(tmp_path, kinds={"blk.1.ffn_down.weight": kind})
    rounded = gguf.dequantize(gguf.quantize(expected, kind), kind)
    np.testing.assert_array_equal(load(path).params["layers"][1]["down"], rounded)


def test_reader_agrees_with_the_gguf_package(tmp_path):
    """K-quants can only be read by the package, so their blocks are random bytes (with finite scales)."""
    rng = np.random.default_rng(1)

    def blocks(writer: gguf.GGUFWriter) -> None:
        for kind in (Kind.Q4_K, Kind.Q6_K, Kind.Q2_K, Kind.IQ4_XS):
            raw = rng.integers(0, 60, (4, 2 * gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
            writer.add_tensor(f"raw.{kind.name}", raw, raw_dtype=kind)
        writer.add_array("test.integers", [1, 2, 3])
        writer.add_array("test.strings", ["ä", "", "日本"])
        writer.add_bool("test.flag", True)
        writer.add_float64("test.double", 0.1)

    path = write(tmp_path, extra=blocks)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert set(ours.metadata) == {name for name in theirs.fields if not name.startswith("GGUF.")}
    for key, value in ours.metadata.items():
        value = value.tolist() if isinstance(value, np.ndarray) else value
        assert value == theirs.fields[key].contents(), key
    assert len(ours.shapes) == len(theirs.tensors)
    for tensor in theirs.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), expected, err_msg=tensor.name)


def test_mixture_of_experts(tmp_path):
    """Mixtral's files say `llama` and stack the experts."""
    config = replace(CONFIG, moe=MoE(num_experts=3, experts_per_token=2, intermediate_size=96))

    def experts(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(3)
        writer.add_expert_used_count(2)

    model = load(write(tmp_path, config, extra=experts))
    assert model.config == config
    expected = tiny.random_params(config)["layers"][1]
    for name in ("router", "experts_gate", "experts_up", "experts_down"):
        np.testing.assert_array_equal(model.params["layers"][1][name], expected[name])


def test_bfloat16(tmp_path):
    model = load(write(tmp_path), "bfloat16")
    expected = tiny.random_params(CONFIG)
    for info in weight_table(CONFIG):
        array = tiny.array_of(model.params, info.path)
        assert array.dtype.name == "bfloat16" and array.shape == info.shape
        np.testing.assert_array_equal(array.astype(np.float32), tiny.array_of(expected, info.path))


# --- rotary scaling -------------------------------------------------------------------------------------------------


def llama3_factors(scaling: RotaryScaling) -> np.ndarray:
    """As llama.cpp's converter computes them, frequency by frequency."""
    factors = []
    for i in range(8):
        wavelength = 2 * math.pi * 500000.0 ** (2 * i / 16)
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_context / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            turns = scaling.original_context / wavelength
            span = scaling.high_freq_factor - scaling.low_freq_factor
            smooth = (turns - scaling.low_freq_factor) / span
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_factors(tmp_path, factor):
    layer = replace(CONFIG.layers[0], rotary=Rotary(16, 500000.0))
    config = replace(CONFIG, layers=(layer,) * 2)
    scaling = RotaryScaling("llama3", factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    factors = llama3_factors(scaling)
    assert 1.0 < factors[4] < factor, "the case must have a frequency that is interpolated"
    model = load(write(tmp_path, config, tensors={"rope_freqs.weight": factors}))
    assert model.config.layers[0].rotary.scaling == scaling
    plain, scaled = (inverse_frequencies(Rotary(16, 500000.0, scaling=each)) for each in (None, scaling))
    np.testing.assert_allclose(plain / scaled, factors, rtol=1e-6)


def test_other_frequency_factors_are_refused(tmp_path):
    path = write(tmp_path, tensors={"rope_freqs.weight": np.linspace(1, 5, 8, dtype=np.float32)})
    with pytest.raises(ModelError, match=r"rope_freqs\.weight are not those of Llama 3"):
        load(path)


def test_linear_and_yarn_scaling(tmp_path):
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(512)

    model = load(write(tmp_path, extra=linear))
    assert model.config.layers[0].rotary.scaling == RotaryScaling("linear", 4.0)
    assert model.config.max_positions == 512
    model = load(write(tmp_path, extra=yarn))
    assert model.config.layers[1].rotary.scaling == RotaryScaling("yarn", 4.0, original_context=512)
    assert model.config.max_positions == 2048


def test_unknown_scaling_is_refused(tmp_path):
    path = write(tmp_path, extra=lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE))
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.type is 'longrope', expected none, linear or yarn"):
        load(path)


# --- what must be refused -------------------------------------------------------------------------------------------


def test_missing_extra_and_misshapen_tensors(tmp_path):
    tensors = tiny.gguf_tensors(CONFIG, tiny.random_params(CONFIG))
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_k.weight"][:16]
    tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)
    path = tiny.write_gguf(tmp_path / "bad.gguf", CONFIG, tensors)
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "1 missing: blk.1.ffn_up.weight" in message
    assert "1 of the wrong shape: blk.0.attn_k.weight is [16, 64], expected [32, 64]" in message
    assert "1 unexpected: blk.0.attn_q_norm.weight" in message


def test_other_architectures_are_refused(tmp_path):
    path = write(tmp_path, architecture="qwen2")
    with pytest.raises(ModelError, match=r"general\.architecture is 'qwen2', expected one of llama"):
        load(path)


def test_per_layer_head_counts_are_refused(tmp_path):
    def varying(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_head_count_kv([2, 1])

    with pytest.raises(ModelError, match=r"llama\.attention\.head_count_kv is \[2, 1\], expected one value"):
        load(write(tmp_path, extra=varying))


def test_header_errors_name_the_key(tmp_path):
    def without(key: str, value=None) -> Callable[[gguf.GGUFWriter], None]:
        def change(writer: gguf.GGUFWriter) -> None:
            writer.kv_data[0].pop(f"llama.{key}")
            if value is not None:
                writer.add_key_value(f"llama.{key}", value, gguf.GGUFValueType.UINT32)

        return change

    with pytest.raises(ModelError, match=r"llama\.attention\.head_count is 0, expected an integer of at least 1"):
        load(write(tmp_path, extra=without("attention.head_count", 0)))
    with pytest.raises(ModelError, match=r"llama\.embedding_length is None, expected an integer"):
        load(write(tmp_path, extra=without("embedding_length")))
    with pytest.raises(ModelError, match=r"layer_norm_rms_epsilon is None, expected a number"):
        load(write(tmp_path, extra=without("attention.layer_norm_rms_epsilon")))


def test_damaged_files_are_named(tmp_path):
    whole = write(tmp_path).read_bytes()
    header = whole.index(b"token_embd.weight")
    for end in (0, 3, 10, 24, 40, 1000, header, header + 30, len(whole) - 40_000):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            load(cut)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + whole)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load(other)
    huge = tmp_path / "huge.gguf"
    huge.write_bytes(whole[:24] + b"\xff" * 8 + whole[32:])
    with pytest.raises(ModelError, match="damaged or cut off"):
        load(huge)
    with pytest.raises(ModelError, match="does not exist"):
        load(tmp_path / "none.gguf")


# --- against transformers -------------------------------------------------------------------------------------------


def test_transformers_reads_the_same_weights(tmp_path):
    """Transformers' own GGUF loader is an independent reading of q's and k's order."""
    pytest.importorskip("torch")
    reader = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")
    transformers = pytest.importorskip("transformers")
    path = write(tmp_path, kinds={"blk.0.attn_q.weight": Kind.Q4_1, "blk.0.attn_k.weight": Kind.Q8_0})
    names = dict.fromkeys(name for info in weight_table(CONFIG) for name in info.hf)
    skeleton = SimpleNamespace(
        config=transformers.LlamaConfig(num_hidden_layers=2), state_dict=lambda: names, named_children=list
    )
    theirs = reader.load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)["tensors"]
    ours = load(path).params
    for info in weight_table(CONFIG):
        np.testing.assert_array_equal(tiny.array_of(ours, info.path), theirs[info.hf[0]].numpy(), err_msg=info.name)


def test_what_is_no_file_is_explained() -> None:
    with pytest.raises(ModelError, match="/dev/null is no file that can be mapped"):
        GgufFile(Path("/dev/null"))
