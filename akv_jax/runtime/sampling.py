"""Choosing the next token of every row (DESIGN R7): random numbers depend on (seed, step) alone.

Order: repetition penalty, bias (logit_bias, presence and frequency penalties, masks), temperature, top-k, top-p over
what top-k left, min-p; then the largest of logits + Gumbel noise. Nothing is sorted: a threshold on the probabilities
is found bit by bit, so equal probabilities at the threshold all stay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

#: Most alternatives a request may ask to see (OpenAI's limit).
MAX_TOP_LOGPROBS = 20


class SamplingBatch(NamedTuple):
    """One entry a row, NumPy or JAX, all [S]; `seed` is uint32 [S, 2].

    Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep everything.
    """

    temperature: Any
    top_p: Any
    top_k: Any
    min_p: Any
    seed: Any
    step: Any
    #: bool []: whether any row wants `Sampled.top_ids`.
    want_top: Any


class Adjustment(NamedTuple):
    """Changes to the logits, for steps in which any row has some: float32 [S, V], bool [S, V], float32 [S]."""

    bias: Any
    #: Tokens of the prompt or the output, which the repetition penalty divides (or, below zero, multiplies).
    seen: Any
    repetition: Any


class Sampled(NamedTuple):
    """int32 [S]; float32 [S] log-probability of the token; int32 and float32 [S, 20], likeliest first.

    Log-probabilities are the model's own (DESIGN A10). `top_*` are zeros unless `want_top`.
    """

    tokens: Array
    logprobs: Array
    top_ids: Array
    top_logprobs: Array


def sample(logits: Array, batch: SamplingBatch, adjustment: Adjustment | None = None) -> Sampled:
    """Choose a token for every row of float32 logits [S, V]."""
    scores = logits if adjustment is None else _adjust(logits, adjustment)
    greedy = jnp.argmax(scores, axis=-1)
    temperature = jnp.asarray(batch.temperature)
    tokens = lax.cond(jnp.any(temperature > 0), lambda: _draw(scores, batch, greedy), lambda: greedy).astype(jnp.int32)
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - normalizer
    # A tiny test vocabulary may have fewer tokens than can be asked for.
    width = min(MAX_TOP_LOGPROBS, logits.shape[-1])
    empty = (jnp.zeros((len(logits), width), jnp.float32), jnp.zeros((len(logits), width), jnp.int32))
    top, ids = lax.cond(batch.want_top, lambda: tuple(lax.top_k(logits, width)), lambda: empty)
    return Sampled(tokens, chosen, ids, top - normalizer[:, None])


def _adjust(logits: Array, adjustment: Adjustment) -> Array:
    penalty = jnp.where(adjustment.seen, jnp.asarray(adjustment.repetition)[:, None], 1.0)
    return jnp.where(logits > 0, logits / penalty, logits * penalty) + adjustment.bias


def _draw(scores: Array, batch: SamplingBatch, greedy: Array) -> Array:
    temperature = jnp.asarray(batch.temperature)
    scaled = scores / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    top_k, top_p, min_p = (jnp.asarray(a) for a in (batch.top_k, batch.top_p, batch.min_p))
    cut = (top_k > 0) | (top_p < 1) | (min_p > 0)
    kept = lax.cond(jnp.any(cut), lambda: _keep(scaled, top_k, top_p, min_p), lambda: scaled)
    keys = jax.random.wrap_key_data(jnp.asarray(batch.seed), impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in)(keys, batch.step)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, scores.shape[-1:]))(keys)
    return jnp.where(temperature > 0, jnp.argmax(kept + noise, axis=-1), greedy)


def _keep(scaled: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Scores with everything outside top-k, top-p and min-p at -inf."""
    order = _ordered(scaled)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, scaled.shape[-1]), scaled.shape[-1])
    floor = _threshold(order, jnp.ones_like(scaled), count.astype(jnp.float32))
    kept = jnp.where(order >= floor[:, None], scaled, -jnp.inf)
    probabilities = jax.nn.softmax(kept, axis=-1)
    # A target of the whole mass may be missed by a rounding; top_p 1 keeps everything by itself.
    floor = jnp.where(top_p < 1, _threshold(order, probabilities, top_p), 0)
    kept = jnp.where(order >= floor[:, None], kept, -jnp.inf)
    return jnp.where(probabilities >= min_p[:, None] * probabilities.max(axis=-1, keepdims=True), kept, -jnp.inf)


def _ordered(values: Array) -> Array:
    """uint32 keys in the order of float32 values."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(order: Array, weights: Array, target: Array) -> Array:
    """The largest uint32 key [S] such that the weights [S, V] of all keys not below it sum to at least `target` [S]."""

    def bit(index: Array, floor: Array) -> Array:
        higher = floor | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        mass = jnp.where(order >= higher[:, None], weights, 0).sum(axis=-1)
        return jnp.where(mass >= target, higher, floor)

    return lax.fori_loop(0, 32, bit, jnp.zeros(order.shape[0], jnp.uint32))
