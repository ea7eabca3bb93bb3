"""The two models that the target serves, as shapes only: no weights are ever made for them here."""

from __future__ import annotations

from akv_jax.config import Layer, ModelConfig, MoE, Rotary, RotaryScaling

QWEN3_30B_A3B = ModelConfig(
    name="Qwen3-30B-A3B",
    vocab_size=151_936,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    layers=(Layer(Rotary(128, 1e6)),) * 48,
    max_positions=40_960,
    norm_eps=1e-6,
    qk_norm=True,
    moe=MoE(num_experts=128, experts_per_token=8, intermediate_size=768),
)

_YARN = RotaryScaling("yarn", factor=32.0, original_context=4096, truncate=False)
_GPT_OSS_ROTARY = Rotary(64, 150_000.0, scaling=_YARN)

GPT_OSS_120B = ModelConfig(
    name="GPT-OSS-120B",
    vocab_size=201_088,
    hidden_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=2880,
    layers=(Layer(_GPT_OSS_ROTARY, window=128), Layer(_GPT_OSS_ROTARY)) * 18,
    max_positions=131_072,
    attention_bias=True,
    attention_sinks=True,
    moe=MoE(num_experts=128, experts_per_token=4, intermediate_size=2880, bias=True, clamp=7.0),
)

MODELS = {"qwen3-30b-a3b": QWEN3_30B_A3B, "gpt-oss-120b": GPT_OSS_120B}
