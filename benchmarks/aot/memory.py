"""What a model takes of each device, by arithmetic from its shapes alone: docs/aot.md has the same with numbers.

Nothing here looks at what a compiler says; the gate compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from akv_jax.config import ModelConfig

#: Bytes of an element of weights and pool (bfloat16) and of the residual stream and the experts' results (float32).
_HALF, _FULL = 2, 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes a device."""

    weights: int
    #: Of one page, all layers.
    page: int
    #: Arguments beside weights and pool: page lists and rotary tables.
    lists: int
    #: What a step needs at its largest moment.
    temporaries: int

    def largest_pool(self, budget: int) -> int:
        """Pages that fit into `budget` bytes beside everything else."""
        return (budget - self.weights - self.lists - self.temporaries) // self.page


def estimate(
    model: ModelConfig, devices: int, rows: int, list_entries: int, positions: int, logit_rows: int
) -> Estimate:
    """For a step of that many query rows with page lists of `list_entries`, over `devices` that divide everything.

    Rotary tables have `positions` rows; logits of `logit_rows` rows are returned.
    """
    assert model.moe is not None
    moe, layers = model.moe, model.num_layers
    heads, kv_heads = model.num_heads * model.head_dim // devices, model.num_kv_heads * model.head_dim // devices
    d, f, experts = model.hidden_size, moe.intermediate_size, moe.num_experts // devices
    attention = d * (2 * heads + 2 * kv_heads)
    router = d * moe.num_experts
    weights = layers * (attention + router + experts * 3 * d * f) + 2 * model.vocab_size // devices * d
    # Biases and norms come to less than 0.1 %.
    # Cosines and sines of half as many pairs of dimensions.
    rotary = sum(rotary.dim for rotary in {layer.rotary for layer in model.layers})
    copies = rows * moe.experts_per_token
    # The largest moment is between the experts' first two products and their activation: gate and up in float32, the
    # rows that went in, and two streams of float32 with a bfloat16 one; or when the last product is gathered and mixed.
    first = copies * (2 * f * _FULL + d * _HALF)
    second = copies * (f * _HALF + 2 * d * _FULL)
    streams = rows * d * (2 * _FULL + _HALF)
    logits = logit_rows * model.vocab_size * _FULL * 2
    return Estimate(
        weights=_HALF * weights,
        page=2 * layers * kv_heads * _HALF,
        lists=4 * 4 * list_entries + rotary * positions * _FULL,
        temporaries=max(first, second) + streams + logits,
    )


def billions(count: float) -> str:
    """Bytes in GB (1e9)."""
    return f"{count / 1e9:.2f}"
