"""What a model is and how the engine runs it, as plain immutable values.

`ModelConfig` names every feature that a decoder may have and nothing of where it came from: a family's file in
`models/` translates a GGUF header or a Hugging Face `config.json` into one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: on_read: the reader turns keys as it reads them. copy: a reposition makes turned copies of the keys.
RepositionMode = Literal["on_read", "copy"]
#: What one executable computes: a whole step, or one layer of it.
CompileUnit = Literal["step", "layer"]
#: drop_aware: what its last user dropped or moved away from goes first (DESIGN C5). lru: the least recently used.
EvictionPolicy = Literal["drop_aware", "lru"]


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """Context extension of RoPE (DESIGN L7). Unused fields of a kind are ignored."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    #: YaRN magnitude put on q and k alike; None means 0.1·ln(factor) + 1.
    attention_factor: float | None = None
    #: YaRN: round the correction range to whole dimensions (Hugging Face `truncate`).
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class Rotary:
    """One layer's rotary function R (DESIGN L7): the first `dim` of each head's dimensions are rotated."""

    dim: int
    base: float = 10_000.0
    style: Literal["half", "interleaved"] = "half"
    scaling: RotaryScaling | None = None


@dataclass(frozen=True, slots=True)
class MoE:
    """A sparse feed-forward layer: softmax router, the best `experts_per_token` experts, gated experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    #: Renormalise the chosen experts' weights to sum to 1 (which is a softmax over the chosen ones' logits).
    normalize: bool = True
    #: Additive biases on the router and on the experts' three projections.
    bias: bool = False
    #: GPT-OSS's activation: gate cut above this, up on both sides. None is silu(gate) · up.
    clamp: float | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from layer to layer."""

    rotary: Rotary
    #: Sliding window W: the query at position q reads position p iff q - p < W (DESIGN L6). None reads everything.
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A pre-norm decoder with RMSNorm, rotary grouped-query attention and gated feed-forward layers."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    #: Largest number of positions (N of DESIGN A7) that the model was trained for.
    max_positions: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    #: RMSNorm over head_dim on q and k before rotation.
    qk_norm: bool = False
    #: Additive biases on the q, k, v and o projections.
    attention_bias: bool = False
    #: One learned logit a query head that takes part in the softmax and has no value (DESIGN L6).
    attention_sinks: bool = False
    moe: MoE | None = None
    name: str = "model"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def largest_window(self) -> int | None:
        """The widest view of any layer; None if some layer reads everything."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else max(w for w in windows if w is not None)


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Prefill and decode on devices of their own (DESIGN R5): how many each has."""

    prefill: int
    decode: int

    @staticmethod
    def parse(text: str) -> Disaggregation:
        """Of "prefill=4,decode=4". ValueError if it is nothing like that."""
        parts = [part.partition("=") for part in text.split(",")]
        counts = {name.strip(): count for name, _, count in parts}
        named = len(parts) == 2 and counts.keys() == {"prefill", "decode"}
        if not named or not all(count.isdecimal() and int(count) for count in counts.values()):
            raise ValueError(f"expected prefill=N,decode=M, each 1 or more, found {text!r}")
        return Disaggregation(int(counts["prefill"]), int(counts["decode"]))

    @property
    def devices(self) -> int:
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and choices of one engine. Pages are tokens (page size 1)."""

    #: N: a request must fit n + 1 <= N positions (DESIGN A7).
    context_length: int
    #: Pages in the KV pool, the scratch page not counted.
    num_pages: int
    max_running_requests: int = 16
    max_queued_requests: int = 256
    #: Most prompt tokens computed in one step, over all requests.
    chunked_prefill_size: int = 256
    #: Attention by name (DESIGN R4), and reposition in copy mode and the experts' grouped product where there are any:
    #: one of `pallas_kernels`, or a module that defines them.
    attention_backend: str = "xla"
    dtype: Literal["float32", "bfloat16"] = "float32"
    #: Of requests that send none; None draws one for each.
    seed: int | None = None
    #: Entries of page lists one step may carry (a limit on sum over segments of their length).
    max_list_entries: int = 1 << 20
    #: Query rows of one attention tile.
    tile: int = 128
    #: How a reposition is carried out (DESIGN C8).
    reposition: RepositionMode = "on_read"
    #: Keep no K and V between requests.
    disable_radix_cache: bool = False
    #: Which unleased pages the cache gives up first.
    eviction: EvictionPolicy = "drop_aware"
    #: Numbers of query rows that get an executable; empty leaves it to `runner.token_buckets`.
    token_buckets: tuple[int, ...] = ()
    #: What one executable computes; None leaves it to `runner.default_compile_unit`.
    compile_unit: CompileUnit | None = None
