"""Sampling against its definition in NumPy (DESIGN R7, A10)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from akv_jax.runtime.runner import empty_sampling
from akv_jax.runtime.sampling import Adjustment, Sampled, SamplingBatch, sample

ROWS, VOCABULARY = 512, 24


@functools.cache
def compiled() -> Any:
    return jax.jit(sample)


def draw(logits: np.ndarray, adjustment: Adjustment | None = None, **fields: Any) -> Sampled:
    """`fields` are one value for all rows or one a row; by default each row has its own seed, and temperature 1."""
    rows = len(logits)
    batch = empty_sampling(rows)
    batch.temperature[:] = 1.0
    batch.seed[:, 1] = np.arange(rows)
    for name, value in fields.items():
        old = getattr(batch, name)
        batch = batch._replace(**{name: np.broadcast_to(value, old.shape).astype(old.dtype)})
    extra = () if adjustment is None else (adjustment,)
    return jax.device_get(compiled()(logits.astype(np.float32), batch, *extra))


def tokens_of(logits: np.ndarray, draws: int = 1, **fields: Any) -> np.ndarray:
    """Int [draws · ROWS]: one distribution, many seeds and steps."""
    spread = np.broadcast_to(logits, (ROWS, VOCABULARY))
    return np.concatenate([draw(spread, step=step, **fields).tokens for step in range(draws)])


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """Float64 [V], by definition, ties at every threshold kept."""
    scores = logits.astype(np.float64) / temperature
    if top_k:
        scores = np.where(scores >= np.sort(scores)[-top_k:][0], scores, -np.inf)
    probabilities = softmax(scores)
    # The smallest set of the likeliest tokens whose mass reaches top_p.
    if top_p < 1:
        kept = [p for p in probabilities if probabilities[probabilities > p].sum() < top_p]
        probabilities = np.where(probabilities >= min(kept), probabilities, 0)
    probabilities = np.where(probabilities >= min_p * probabilities.max(), probabilities, 0)
    return probabilities / probabilities.sum()


#: Probabilities 2^-1, 2^-2, …: the mass of the first n is far from any top_p below.
STEEP = -np.log(2) * np.arange(VOCABULARY)
TIED = np.array([3.0, 1.0, 3.0, 2.0, 2.0, 2.0, *np.full(VOCABULARY - 6, -2.0)])
FLAT = np.random.default_rng(0).normal(size=VOCABULARY)

FILTERS = [
    ({"top_k": 1}, STEEP),
    ({"top_k": 3}, STEEP),
    ({"top_k": 3}, TIED),
    ({"top_k": 1000}, TIED),
    ({"top_p": 0.8}, STEEP),
    ({"top_p": 0.45}, STEEP),
    ({"top_p": 1e-6}, TIED),
    ({"top_p": 0.9}, TIED),
    ({"min_p": 0.2}, STEEP),
    ({"min_p": 1.0}, TIED),
    ({"min_p": 0.3}, TIED),
    ({"top_k": 4, "top_p": 0.9}, STEEP),
    ({"top_k": 5, "top_p": 0.7, "min_p": 0.3, "temperature": 2.0}, TIED),
    ({"temperature": 0.5, "top_p": 0.9}, FLAT),
    ({"temperature": 3.0}, FLAT),
]


@pytest.mark.parametrize(("fields", "logits"), FILTERS)
def test_the_distribution_is_the_defined_one(fields: dict[str, Any], logits: np.ndarray) -> None:
    """Exactly the tokens that may be drawn are, each as often as it should be (chi-square at 1 in 100,000)."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **fields}
    meant = distribution(logits, **settings)
    # A random order, so that no threshold falls on the place instead of the value.
    order = np.random.default_rng(1).permutation(VOCABULARY)
    tokens = order[tokens_of(logits[order], draws=8, **settings)]
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(meant))
    likely = meant * len(tokens) > 10
    assert counts[likely].all()
    statistic = ((counts - meant * len(tokens))[likely] ** 2 / (meant * len(tokens))[likely]).sum()
    assert statistic < chi_square_limit(int(likely.sum()))


def chi_square_limit(cells: int) -> float:
    """The 1 - 1e-5 quantile, by Wilson and Hilferty's approximation (4.26 is the normal one's)."""
    freedom = max(cells - 1, 1)
    return freedom * (1 - 2 / (9 * freedom) + 4.26 * np.sqrt(2 / (9 * freedom))) ** 3


def test_the_statistic_can_fail() -> None:
    """A temperature that is wrong by a fifth is found."""
    meant = distribution(FLAT, 1.2, 0, 1.0, 0.0)
    tokens = tokens_of(FLAT, draws=8)
    counts = np.bincount(tokens, minlength=VOCABULARY)
    assert ((counts - meant * len(tokens)) ** 2 / (meant * len(tokens))).sum() > chi_square_limit(VOCABULARY)


def test_greedy_is_the_largest_logit_and_the_first_of_several() -> None:
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCABULARY))
    logits[0, [5, 9]] = 10
    tokens = draw(logits, temperature=0.0).tokens
    assert tokens.tolist() == logits.astype(np.float32).argmax(axis=1).tolist()
    assert tokens[0] == 5


def test_greedy_ignores_filters_and_seeds() -> None:
    logits = np.random.default_rng(2).normal(size=(ROWS, VOCABULARY))
    tokens = draw(logits, temperature=0.0, top_k=2, top_p=0.1, min_p=0.5, seed=77).tokens
    assert tokens.tolist() == logits.astype(np.float32).argmax(axis=1).tolist()


def test_rows_keep_their_own_settings() -> None:
    """Greedy, cut and free rows side by side."""
    logits = np.broadcast_to(FLAT, (ROWS, VOCABULARY))
    kind = np.arange(ROWS) % 4
    tokens = draw(
        logits,
        temperature=np.where(kind == 0, 0.0, 1.0),
        top_k=np.where(kind == 1, 2, 0),
        top_p=np.where(kind == 2, 0.5, 1),
    ).tokens
    assert set(tokens[kind == 0]) == {int(FLAT.argmax())}
    assert set(tokens[kind == 1]) == {*np.argsort(FLAT)[-2:].tolist()}
    assert set(tokens[kind == 2]) == {*np.flatnonzero(distribution(FLAT, 1.0, 0, 0.5, 0.0)).tolist()}
    assert len(set(tokens[kind == 3])) > 10
    # What each row gets alone it gets here too.
    assert tokens[kind == 3].tolist() == draw(logits).tokens[kind == 3].tolist()


def test_a_token_depends_on_seed_and_step_alone() -> None:
    """R7: not on the row, the neighbours or the size of the batch."""
    generator = np.random.default_rng(3)
    logits = np.broadcast_to(FLAT, (ROWS, VOCABULARY))
    seed = generator.integers(2**32, size=(ROWS, 2), dtype=np.uint64).astype(np.uint32)
    step = generator.integers(1000, size=ROWS)
    tokens = draw(logits, seed=seed, step=step).tokens
    order = generator.permutation(ROWS)
    assert draw(logits[order], seed=seed[order], step=step[order]).tokens.tolist() == tokens[order].tolist()
    assert draw(logits[:3], seed=seed[:3], step=step[:3]).tokens.tolist() == tokens[:3].tolist()
    neighbours = generator.normal(size=(ROWS, VOCABULARY))
    neighbours[7] = FLAT
    cut = np.where(np.arange(ROWS) == 7, 0, 1)
    assert draw(neighbours, seed=seed, step=step, top_k=cut).tokens[7] == tokens[7]


def test_other_steps_and_seeds_give_other_tokens() -> None:
    """R7: all 64 bits of the seed count."""
    logits = np.zeros((ROWS, VOCABULARY))
    same = draw(logits, seed=5).tokens
    assert len(set(same)) == 1
    assert len(set(draw(logits, seed=5, step=np.arange(ROWS)).tokens)) == VOCABULARY
    high, low = (np.zeros((ROWS, 2), np.uint32) for _ in range(2))
    high[:, 0] = low[:, 1] = np.arange(ROWS)
    assert len(set(draw(logits, seed=high).tokens)) == len(set(draw(logits, seed=low).tokens)) == VOCABULARY


def test_logprobs_are_the_models_own() -> None:
    """A10: before temperature, filters, penalties and bias."""
    generator = np.random.default_rng(4)
    logits = generator.normal(size=(ROWS, VOCABULARY)).astype(np.float32) * 2
    out = draw(logits, adjustment(bias=generator.normal(size=(ROWS, VOCABULARY))), temperature=0.7, want_top=True)
    meant = np.log(softmax(logits.astype(np.float64)))
    np.testing.assert_allclose(out.logprobs, np.take_along_axis(meant, out.tokens[:, None], 1)[:, 0], atol=1e-5)
    np.testing.assert_allclose(out.top_logprobs, -np.sort(-meant, axis=1)[:, :20], atol=1e-5)
    assert out.top_ids.tolist() == np.argsort(-logits, axis=1, kind="stable")[:, :20].tolist()


def adjustment(**fields: Any) -> Adjustment:
    shape = ROWS, VOCABULARY
    nothing = {"bias": np.zeros(shape), "seen": np.zeros(shape, bool), "repetition": np.ones(ROWS)}
    values = {**nothing, **fields}
    return Adjustment(values["bias"].astype(np.float32), values["seen"], values["repetition"].astype(np.float32))


def test_penalties_and_bias_by_definition() -> None:
    """Repetition divides positive logits of seen tokens and multiplies the others, then the bias is added."""
    generator = np.random.default_rng(5)
    # In half of the rows no logit is above zero.
    logits = generator.normal(size=(ROWS, VOCABULARY)) * 3 - np.where(np.arange(ROWS) % 2, 12, 0)[:, None]
    seen = generator.random((ROWS, VOCABULARY)) < 0.5
    repetition, bias = generator.uniform(0.5, 2, ROWS), generator.normal(size=(ROWS, VOCABULARY))
    changed = np.where(seen, np.where(logits > 0, logits / repetition[:, None], logits * repetition[:, None]), logits)
    out = draw(logits, adjustment(seen=seen, repetition=repetition, bias=bias), temperature=0.0)
    assert out.tokens.tolist() == (changed + bias).argmax(axis=1).tolist()
    assert out.tokens.tolist() != logits.argmax(axis=1).tolist()


def test_a_bias_of_a_hundred_decides() -> None:
    """OpenAI's logit_bias: 100 forces a token and -100 forbids one, at any temperature."""
    bias = np.zeros((ROWS, VOCABULARY))
    bias[: ROWS // 2, 3] = 100
    bias[ROWS // 2 :, int(STEEP.argmax())] = -100
    tokens = draw(np.broadcast_to(STEEP, (ROWS, VOCABULARY)), adjustment(bias=bias)).tokens
    assert set(tokens[: ROWS // 2]) == {3}
    assert int(STEEP.argmax()) not in tokens[ROWS // 2 :]


def test_padding_rows_are_harmless() -> None:
    """Zeros in every field, as the runner pads with: finite and in the vocabulary."""
    zeros = SamplingBatch(*(np.zeros_like(field) for field in empty_sampling(ROWS)))
    out = jax.device_get(compiled()(np.zeros((ROWS, VOCABULARY), np.float32), zeros))
    assert set(out.tokens) == {0} and np.isfinite(out.logprobs).all()
