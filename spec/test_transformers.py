"""The float64 decoder against Hugging Face transformers' own modules, with edits by hand on their cache (DESIGN L2-L8).

Theirs run in float64 but for norms and angles, which they compute in float32 whatever is asked. Skipped without torch
and transformers.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spec.model import Layer, Model, ModelConfig, MoE, attend, random_params
from spec.operations import Append, Drop, Reposition
from spec.rope import Rotary, RotaryScaling
from spec.state import run
from spec.varieties import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = tuple(int(t) for t in np.random.default_rng(3).integers(0, 64, 40))


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"intermediate_size": 48, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512}
SIZES |= {
    "attn_implementation": "eager",
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "experts_implementation": "eager",
}

LLAMA3 = RotaryScaling("llama3", factor=8.0, original_context=64)
YARN = RotaryScaling("yarn", factor=8.0, original_context=64, beta_fast=8.0)
GPT_OSS_ROTARY = Rotary(8, 500.0, scaling=replace(YARN, truncate=False))
THEIR_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
THEIR_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0}
THEIR_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 8.0}
THEIR_YARN |= {"rope_theta": 500.0}


def full(**rotary: Any) -> tuple[Layer, ...]:
    return (Layer(Rotary(**{"dim": 8, **rotary})),) * 2


def plain(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


TRANSFORMERS = {
    "llama": (tiny("ours", *full()), "Llama", {"rope_parameters": plain(10_000.0)}),
    "llama3": (tiny("ours", *full(base=500.0, scaling=LLAMA3)), "Llama", {"rope_parameters": THEIR_LLAMA3}),
    "yarn": (tiny("ours", *full(base=500.0, scaling=YARN)), "Llama", {"rope_parameters": THEIR_YARN}),
    "biases": (
        tiny("ours", *full(), attention_bias=True),
        "Llama",
        {"rope_parameters": plain(10_000.0), "attention_bias": True},
    ),
    "qwen3": (tiny("ours", *full(base=1e6), qk_norm=True), "Qwen3", {"rope_parameters": plain(1e6)}),
    "windows": (
        tiny("ours", Layer(Rotary(8), window=5), Layer(Rotary(8)), qk_norm=True),
        "Qwen3",
        {
            "rope_parameters": plain(10_000.0),
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "window_everywhere": (
        tiny("ours", *(Layer(Rotary(8), window=4),) * 2),
        "Mistral",
        {"rope_parameters": plain(10_000.0), "sliding_window": 4},
    ),
    "moe": (
        tiny("ours", *full(), qk_norm=True, moe=MoE(6, 2, 24)),
        "Qwen3Moe",
        {
            "rope_parameters": plain(10_000.0),
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "moe_unnormalized": (
        tiny("ours", *full(), qk_norm=True, moe=MoE(6, 3, 24, normalize=False)),
        "Qwen3Moe",
        {
            "rope_parameters": plain(10_000.0),
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
    "gpt_oss": (
        tiny(
            "ours",
            Layer(GPT_OSS_ROTARY, window=5),
            Layer(GPT_OSS_ROTARY),
            attention_bias=True,
            attention_sinks=True,
            moe=MoE(6, 3, 48, bias=True, clamp=1.5),
        ),
        "GptOss",
        {
            "rope_parameters": {**THEIR_YARN, "truncate": False},
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
        },
    ),
    "partial_interleaved": (
        tiny("ours", *full(style="interleaved"), head_dim=16),
        "Glm",
        {"rope_parameters": plain(10_000.0, partial_rotary_factor=0.5), "head_dim": 16, "attention_bias": False},
    ),
    "partial_half": (
        tiny("ours", *full(), head_dim=16, qk_norm=True),
        "Glm4Moe",
        {
            "rope_parameters": plain(10_000.0, partial_rotary_factor=0.5),
            "head_dim": 16,
            "use_qk_norm": True,
            "first_k_dense_replace": 2,
        },
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_appends_alone_are_the_ordinary_transformer(name: str) -> None:
    """L8: a history of appends alone is the ordinary transformer: transformers' own modules give the same logits."""
    config, family, settings = TRANSFORMERS[name]
    params = random_params(config, seed=11)
    theirs = their_model(config, family, settings, params)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0].numpy()
    ours = run(Model.of(config, params), (Append(TOKENS),)).logits
    np.testing.assert_allclose(ours, expected, atol=2e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # past_key_values gets a new name
@pytest.mark.parametrize("name", ["llama", "llama3", "yarn", "qwen3", "partial_interleaved"])
def test_drop_and_reposition_by_hand_on_their_cache(name: str) -> None:
    """L2, L3: drop and reposition done by hand on transformers' own KV cache, with its own rotation, agree."""
    config, family, settings = TRANSFORMERS[name]
    params = random_params(config, seed=12)
    theirs = their_model(config, family, settings, params)
    first, second, third = TOKENS[:14], TOKENS[14:20], TOKENS[20:26]
    # In the language: 14 tokens; drop some, no reposition; 6 tokens; drop more, reposition; 6 tokens.
    history = (
        *(Append(first), Drop(frozenset({2, 3, 4, 9}))),
        *(Append(second), Drop(frozenset({0, 7, 15})), Reposition(), Append(third)),
    )
    cache = transformers.DynamicCache(config=theirs.config)
    logits = []

    def feed(tokens: tuple[int, ...], position: int) -> None:
        for i, token in enumerate(tokens):
            ids, positions = torch.tensor([[token]]), torch.tensor([[position + i]])
            logits.append(theirs(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[0, -1])

    def keep(kept: list[int]) -> None:
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]

    def turn(keys: Any, positions: list[int]) -> Any:
        """Their rotation by each of these many positions, without their magnitude."""
        rotary = theirs.model.rotary_emb
        cos, sin = (t / rotary.attention_scaling for t in rotary(keys, torch.tensor([positions])))
        return sys.modules[type(theirs).__module__].apply_rotary_pos_emb(keys, keys, cos.double(), sin.double())[1]

    with torch.no_grad():
        feed(first, 0)
        kept = [i for i in range(14) if i not in {2, 3, 4, 9}]
        keep(kept)
        feed(second, 14)
        indices = kept + list(range(14, 20))
        survivors = [i for i in indices if i not in {0, 7, 15}]
        keep([indices.index(i) for i in survivors])
        for layer in cache.layers:
            layer.keys = turn(layer.keys, [place - i for place, i in enumerate(survivors)])
        feed(third, len(survivors))
    ours = run(Model.of(config, params), history).logits
    np.testing.assert_allclose(ours, torch.stack(logits).numpy(), atol=2e-5)


def test_sinks_are_those_of_gpt_oss() -> None:
    """L6: attention with sinks is that of transformers' GPT-OSS."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    generator = np.random.default_rng(5)
    q, k, v = (
        generator.standard_normal((4, 8)),
        generator.standard_normal((9, 2, 8)),
        generator.standard_normal((9, 2, 8)),
    )
    module = torch.nn.Module()
    module.num_key_value_groups, module.sinks = 2, torch.tensor(generator.standard_normal(4))
    theirs, _ = eager_attention_forward(
        module.eval(),
        torch.tensor(q)[None, :, None],
        torch.tensor(k).transpose(0, 1)[None],
        torch.tensor(v).transpose(0, 1)[None],
        None,
        scaling=8**-0.5,
    )
    ours = attend(q, list(k), list(v), module.sinks.numpy())
    np.testing.assert_allclose(ours, theirs.reshape(-1).numpy(), atol=1e-12)


def their_model(config: ModelConfig, family: str, settings: dict[str, Any], params: dict[str, Any]) -> Any:
    """Transformers' model of a family with our parameters in it."""
    their_config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(their_config).double().eval()
    names = set(model.state_dict())
    state = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["norm"]}
    state["lm_head.weight"] = params["head"]
    for i, weights in enumerate(params["layers"]):
        state |= {f"model.layers.{i}.{name}": value for name, value in their_layer(weights, names, i).items()}
    model.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=True)
    return model


def their_layer(weights: dict[str, np.ndarray], names: set[str], layer: int) -> dict[str, np.ndarray]:
    """Our names to theirs. GLM and the experts keep gate and up in one array."""
    result = {"input_layernorm.weight": weights["attn_norm"], "post_attention_layernorm.weight": weights["ffn_norm"]}
    result |= {f"self_attn.{n}_proj.weight": weights[n] for n in "qkvo"}
    result |= {f"self_attn.{n}_proj.bias": weights[f"{n}_bias"] for n in "qkvo" if f"{n}_bias" in weights}
    result |= {f"self_attn.{n}.weight": weights[n] for n in ("q_norm", "k_norm") if n in weights}
    if "sinks" in weights:
        return result | _of_gpt_oss(weights)
    if "router" in weights:
        both = np.concatenate([weights["experts_gate"], weights["experts_up"]], axis=1)
        return result | {
            "mlp.gate.weight": weights["router"],
            "mlp.experts.gate_up_proj": both,
            "mlp.experts.down_proj": weights["experts_down"],
        }
    result["mlp.down_proj.weight"] = weights["down"]
    if f"model.layers.{layer}.mlp.gate_up_proj.weight" in names:
        return result | {"mlp.gate_up_proj.weight": np.concatenate([weights["gate"], weights["up"]])}
    return result | {"mlp.gate_proj.weight": weights["gate"], "mlp.up_proj.weight": weights["up"]}


def _of_gpt_oss(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Theirs are [experts, in, out], gate and up alternating."""

    def alternating(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])

    both = alternating(weights["experts_gate"], weights["experts_up"])
    return {
        "self_attn.sinks": weights["sinks"],
        "mlp.router.weight": weights["router"],
        "mlp.router.bias": weights["router_bias"],
        "mlp.experts.gate_up_proj": both.swapaxes(1, 2),
        "mlp.experts.gate_up_proj_bias": alternating(weights["experts_gate_bias"], weights["experts_up_bias"]),
        "mlp.experts.down_proj": weights["experts_down"].swapaxes(1, 2),
        "mlp.experts.down_proj_bias": weights["experts_down_bias"],
    }
