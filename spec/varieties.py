"""Tiny configurations, one for each way in which attention may differ. What holds must hold for all of them."""

from __future__ import annotations

from spec.model import Layer, ModelConfig, MoE
from spec.rope import Rotary, RotaryScaling

HALF = Rotary(dim=8, base=10_000.0)
#: Small originals, so that within a hundred positions every branch of a scaling is taken.
LINEAR = Rotary(dim=8, base=100.0, scaling=RotaryScaling("linear", factor=4.0))
LLAMA3 = Rotary(dim=16, base=500.0, scaling=RotaryScaling("llama3", factor=8.0, original_context=64))
YARN = Rotary(dim=16, base=500.0, scaling=RotaryScaling("yarn", factor=8.0, original_context=64, beta_fast=8.0))


def tiny(name: str, *layers: Layer, head_dim: int = 8, **features: object) -> ModelConfig:
    """Four query heads, two KV heads, 64 tokens; `features` are fields of ModelConfig."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    return ModelConfig(name=name, layers=layers, head_dim=head_dim, max_positions=512, **{**sizes, **features})  # type: ignore[arg-type]


def varieties() -> dict[str, ModelConfig]:
    """Every variety by name."""
    full, interleaved = Layer(HALF), Layer(Rotary(dim=8, style="interleaved"))
    configs = [
        tiny("half", full, full),
        tiny("one_kv_head", full, full, num_kv_heads=1, tie_embeddings=True),
        tiny("interleaved", interleaved, interleaved),
        tiny("partial", full, full, head_dim=16),
        tiny("partial_interleaved", interleaved, interleaved, head_dim=16),
        tiny("linear", Layer(LINEAR), Layer(LINEAR)),
        tiny("llama3", Layer(LLAMA3), Layer(LLAMA3), head_dim=16),
        tiny("yarn", Layer(YARN), Layer(YARN), head_dim=16),
        tiny("qk_norm", full, full, qk_norm=True),
        tiny("window_and_full", Layer(HALF, window=5), full, Layer(HALF, window=5)),
        tiny("window_everywhere", Layer(HALF, window=6), Layer(HALF, window=3)),
        tiny("sinks", full, full, attention_sinks=True),
        tiny("sinks_and_window", Layer(YARN, window=4), Layer(YARN), head_dim=16, attention_sinks=True),
        tiny("biases", full, full, attention_bias=True),
        tiny("moe", full, full, moe=MoE(num_experts=6, experts_per_token=2, intermediate_size=24)),
        tiny("moe_unnormalized", full, full, moe=MoE(4, 2, 24, normalize=False)),
        # Cut where a few of a hundred values are.
        tiny("moe_clamped", full, full, moe=MoE(6, 3, 24, bias=True, clamp=1.5)),
        tiny("base_per_layer", Layer(Rotary(dim=8, base=100.0), window=8), Layer(Rotary(dim=8, base=1e6))),
        tiny(
            "everything",
            Layer(Rotary(dim=8, base=100.0, scaling=YARN.scaling), window=4),
            Layer(Rotary(dim=16, base=1000.0, style="interleaved", scaling=LLAMA3.scaling)),
            head_dim=16,
            qk_norm=True,
            attention_bias=True,
            attention_sinks=True,
            moe=MoE(num_experts=4, experts_per_token=2, intermediate_size=24),
        ),
    ]
    return {config.name: config for config in configs}
