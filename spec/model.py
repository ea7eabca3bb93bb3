"""A float64 decoder, one token at a time, that knows nothing of operations (DESIGN L6, L8).

`forward` gets a token, its position, and the K and V of the entries that it may attend to, each with the position at
which its K is encoded *now*. It cannot see how they came to be where they are.

Parameters are a plain dict; weights are stored [out, in] and y = W x:

    {"embed": [V, d], "layers": [layer, ...], "norm": [d], "head": [V, d] unless tie_embeddings}

and a layer has "attn_norm": [d], "q": [Hq*D, d], "k": [Hkv*D, d], "v": [Hkv*D, d], "o": [d, Hq*D], "ffn_norm": [d],
"gate": [f, d], "up": [f, d], "down": [d, f], and where the configuration says so "q_norm", "k_norm": [D], "q_bias",
"k_bias", "v_bias", "o_bias", "sinks": [Hq]; with experts "router": [E, d], "experts_gate", "experts_up": [E, f, d] and
"experts_down": [E, d, f] instead of the dense three, and "router_bias": [E], "experts_gate_bias", "experts_up_bias":
[E, f], "experts_down_bias": [E, d].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spec.operations import Reason, SpecError
from spec.rope import Rotary, encode

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MoE:
    """A sparse feed-forward layer: softmax router, the best `experts_per_token` experts, gated experts."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    #: Renormalise the chosen experts' weights to sum to 1 (which is a softmax over the chosen ones' logits).
    normalize: bool = True
    #: Additive biases on the router and on the experts' three projections (each may be absent, and is 0 then).
    bias: bool = False
    #: GPT-OSS's activation: gate cut above this, up on both sides. None is silu(gate) · up.
    clamp: float | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """What may differ from layer to layer."""

    rotary: Rotary
    #: Sliding window W: the query at position q reads position p iff q - p < W (L6). None reads everything.
    window: int | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A pre-norm decoder with RMSNorm, rotary grouped-query attention and gated SiLU layers."""

    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[Layer, ...]
    max_positions: int
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    #: RMSNorm over head_dim on q and k before rotation.
    qk_norm: bool = False
    #: Additive biases on the q, k, v and o projections (each may be absent from the parameters, and is 0 then).
    attention_bias: bool = False
    #: One learned logit a query head that takes part in the softmax and has no value (L6).
    attention_sinks: bool = False
    moe: MoE | None = None
    name: str = "model"


@dataclass(frozen=True, slots=True)
class Model:
    """A configuration and its parameters, float64. Make one with `Model.of`, which checks and converts."""

    config: ModelConfig
    params: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, config: ModelConfig, params: Mapping[str, Any]) -> Model:
        """Raises SpecError WRONG_PARAMETERS if a parameter is missing, unexpected or of the wrong shape."""
        top, layer = parameter_shapes(config)
        if len(params["layers"]) != len(config.layers):
            raise SpecError(Reason.WRONG_PARAMETERS, f"{len(params['layers'])} layers for {len(config.layers)}")
        checked = _checked({name: value for name, value in params.items() if name != "layers"}, top)
        return cls(config, {**checked, "layers": [_checked(values, layer) for values in params["layers"]]})


@dataclass(frozen=True, slots=True)
class Past:
    """What one token may attend to besides itself, in every layer: r entries in logical order."""

    #: Where each entry's K is encoded now, [r].
    positions: Sequence[int]
    #: One sequence of r arrays [kv_heads, head_dim] a layer.
    k: Sequence[Sequence[np.ndarray]]
    v: Sequence[Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Output:
    """What appending one token gives: its K (encoded at its position) and V in every layer, and its logits."""

    k: tuple[np.ndarray, ...]  # a layer: [kv_heads, head_dim]
    v: tuple[np.ndarray, ...]
    logits: np.ndarray  # [vocab_size]


def forward(model: Model, token: int, position: int, past: Past) -> Output:
    """Run one token through the model. Raises SpecError TOKEN_OUT_OF_VOCABULARY."""
    config, params = model.config, model.params
    if not 0 <= token < config.vocab_size:
        raise SpecError(Reason.TOKEN_OUT_OF_VOCABULARY, f"{token} of {config.vocab_size}")
    hidden = params["embed"][token]
    new_k, new_v = [], []
    for number, (layer, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        # Attention: encode the token at its own position, then read the entries that the layer lets it see.
        q, k, v = project(config, layer, weights, rms_norm(hidden, weights["attn_norm"], config.norm_eps), position)
        positions = [*past.positions, position]
        visible = [i for i, p in enumerate(positions) if reads(layer.window, position, p)]
        all_k, all_v = [*past.k[number], k], [*past.v[number], v]
        mixed = attend(q, [all_k[i] for i in visible], [all_v[i] for i in visible], weights.get("sinks"))
        hidden = hidden + weights["o"] @ mixed + weights.get("o_bias", 0.0)
        # Feed-forward.
        x = rms_norm(hidden, weights["ffn_norm"], config.norm_eps)
        hidden = hidden + (gated_silu(x, weights) if config.moe is None else mixture(x, weights, config.moe))
        new_k.append(k)
        new_v.append(v)
    head = params["embed"] if config.tie_embeddings else params["head"]
    return Output(tuple(new_k), tuple(new_v), head @ rms_norm(hidden, params["norm"], config.norm_eps))


def reads(window: int | None, query_position: int, position: int) -> bool:
    """Whether a layer with this window lets the query read the entry; both positions are those of the moment (L6)."""
    return window is None or query_position - position < window


def project(
    config: ModelConfig, layer: Layer, weights: Mapping[str, np.ndarray], x: np.ndarray, position: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Query [heads, head_dim], and key and value [kv_heads, head_dim] of the normalised hidden state `x`."""
    q, k, v = ((weights[n] @ x + weights.get(f"{n}_bias", 0.0)).reshape(-1, config.head_dim) for n in "qkv")
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"], config.norm_eps)
        k = rms_norm(k, weights["k_norm"], config.norm_eps)
    return encode(layer.rotary, q, position), encode(layer.rotary, k, position), v


def attend(
    q: np.ndarray, keys: Sequence[np.ndarray], values: Sequence[np.ndarray], sinks: np.ndarray | None
) -> np.ndarray:
    """Softmax attention of one query: q [heads, head_dim], each key and value [kv_heads, head_dim] -> [heads*head_dim].

    Query head h reads KV head h // (heads / kv_heads). A sink is one more score, whose share of the softmax is lost.
    """
    heads, head_dim = q.shape
    group = heads // keys[0].shape[0]
    k = np.repeat(np.stack(keys), group, axis=1)  # [entries, heads, head_dim]
    v = np.repeat(np.stack(values), group, axis=1)
    scores = np.einsum("hd,ehd->eh", q, k) / np.sqrt(head_dim)
    if sinks is not None:
        scores = np.concatenate([scores, sinks[None]])
    weights = softmax(scores)[: len(keys)]
    return np.einsum("eh,ehd->hd", weights, v).reshape(-1)


def gated_silu(x: np.ndarray, weights: Mapping[str, np.ndarray]) -> np.ndarray:
    """The dense feed-forward layer: down(silu(gate x) * up x)."""
    return weights["down"] @ (silu(weights["gate"] @ x) * (weights["up"] @ x))


def mixture(x: np.ndarray, weights: Mapping[str, np.ndarray], moe: MoE) -> np.ndarray:
    """The sparse one: the likeliest experts, weighted by their probabilities among *all* experts."""
    probabilities = softmax(weights["router"] @ x + weights.get("router_bias", 0.0))
    chosen = np.argsort(-probabilities, kind="stable")[: moe.experts_per_token]
    shares = probabilities[chosen]
    if moe.normalize:
        shares = shares / shares.sum()

    def project(name: str, expert: int, x: np.ndarray) -> np.ndarray:
        bias = weights[f"experts_{name}_bias"][expert] if f"experts_{name}_bias" in weights else 0.0
        return weights[f"experts_{name}"][expert] @ x + bias

    def run(expert: int) -> np.ndarray:
        gate, up = project("gate", expert, x), project("up", expert, x)
        hidden = silu(gate) * up if moe.clamp is None else clamped_glu(gate, up, moe.clamp)
        return project("down", expert, hidden)

    return np.sum([share * run(expert) for share, expert in zip(shares, chosen, strict=True)], axis=0)


def clamped_glu(gate: np.ndarray, up: np.ndarray, limit: float) -> np.ndarray:
    """GPT-OSS's activation: (up + 1) · gate · sigmoid(1.702 · gate), with gate at most `limit` and |up| at most too."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> np.ndarray:
    """Over the first axis."""
    e = np.exp(x - x.max(axis=0))
    return e / e.sum(axis=0)


def parameter_shapes(config: ModelConfig) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The shapes of the parameters outside the layers, and of those of one layer."""
    d, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    top: dict[str, Shape] = {"embed": (config.vocab_size, d), "norm": (d,)}
    if not config.tie_embeddings:
        top["head"] = (config.vocab_size, d)
    layer: dict[str, Shape] = {
        "attn_norm": (d,),
        "q": (q, d),
        "k": (kv, d),
        "v": (kv, d),
        "o": (d, q),
        "ffn_norm": (d,),
    }
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.attention_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,), "o_bias": (d,)}
    if config.attention_sinks:
        layer |= {"sinks": (config.num_heads,)}
    if config.moe is None:
        f = config.intermediate_size
        layer |= {"gate": (f, d), "up": (f, d), "down": (d, f)}
    else:
        e, f = config.moe.num_experts, config.moe.intermediate_size
        layer |= {"router": (e, d), "experts_gate": (e, f, d), "experts_up": (e, f, d), "experts_down": (e, d, f)}
        if config.moe.bias:
            layer |= {"router_bias": (e,), "experts_gate_bias": (e, f), "experts_up_bias": (e, f)}
            layer |= {"experts_down_bias": (e, d)}
    return top, layer


def random_params(config: ModelConfig, seed: int) -> dict[str, Any]:
    """Random float64 parameters under which every feature matters and logits are about 1 in size."""
    generator = np.random.default_rng(seed)

    def draw(name: str, shape: Shape) -> np.ndarray:
        noise = generator.standard_normal(shape)
        if name.endswith("norm"):
            return 1 + 0.2 * noise
        if name.endswith("bias"):
            return 0.5 * noise
        if name == "sinks" or (name == "embed" and not config.tie_embeddings):
            return noise
        return noise / np.sqrt(shape[-1])

    top, layer = parameter_shapes(config)
    params: dict[str, Any] = {name: draw(name, shape) for name, shape in top.items()}
    return {**params, "layers": [{name: draw(name, shape) for name, shape in layer.items()} for _ in config.layers]}


def _checked(values: Mapping[str, Any], shapes: Mapping[str, Shape]) -> dict[str, np.ndarray]:
    arrays = {name: np.asarray(value, dtype=np.float64) for name, value in values.items()}
    for name, shape in shapes.items():
        if name not in arrays and not name.endswith("bias"):
            raise SpecError(Reason.WRONG_PARAMETERS, f"{name} is missing")
        if name in arrays and arrays[name].shape != shape:
            raise SpecError(Reason.WRONG_PARAMETERS, f"{name} is {arrays[name].shape}, not {shape}")
    for name in arrays.keys() - shapes.keys():
        raise SpecError(Reason.WRONG_PARAMETERS, f"{name} has no place in this configuration")
    return arrays
