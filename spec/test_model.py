"""The float64 decoder by itself: its parts by hand, and its parameters (DESIGN L6, L8)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spec.model import Layer, Model, MoE, attend, mixture, random_params, softmax
from spec.operations import Append, Reason, SpecError
from spec.rope import Rotary
from spec.state import run
from spec.varieties import tiny


def test_attention_by_hand() -> None:
    """L6: by hand: two query heads share a KV head, and a sink takes its share of the softmax and gives nothing."""
    q = np.array([[2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]])
    keys = [np.array([[1.0, 0.0, 0.0, 0.0]]), np.array([[0.0, 1.0, 0.0, 0.0]])]
    values = [np.array([[1.0, 0.0, 0.0, 3.0]]), np.array([[0.0, 1.0, 0.0, 5.0]])]
    e = np.e  # scores are 1 and 0, or 0 and 1
    first = [e / (e + 1), 1 / (e + 1), 0, (3 * e + 5) / (e + 1)]
    second = [1 / (e + 1), e / (e + 1), 0, (3 + 5 * e) / (e + 1)]
    np.testing.assert_allclose(attend(q, keys, values, None), first + second, rtol=1e-14)
    shares = np.repeat([(e + 1) / (e + 1 + e**2), (e + 1) / (e + 1 + 1)], 4)  # sinks of 2 and 0
    np.testing.assert_allclose(
        attend(q, keys, values, np.array([2.0, 0.0])), np.array(first + second) * shares, rtol=1e-14
    )


def test_experts_by_hand() -> None:
    """L8: by hand: of three experts the two likeliest are mixed by their probabilities among all, or renormalised."""
    up = np.array([[[1.0]], [[10.0]], [[100.0]]])
    one = np.ones((3, 1, 1))
    weights = {"router": np.log([[1.0], [3.0], [4.0]]), "experts_gate": one, "experts_up": up, "experts_down": one}
    x = np.array([1.0])
    silu = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(mixture(x, weights, MoE(3, 2, 1, normalize=False)), silu * (30 + 400) / 8, rtol=1e-14)
    np.testing.assert_allclose(mixture(x, weights, MoE(3, 2, 1)), silu * (30 + 400) / 7, rtol=1e-14)


def test_clamped_experts_by_hand() -> None:
    """L8: by hand: GPT-OSS's activation cuts gate above and up on both sides, and every projection has its bias."""
    one = np.ones((2, 1, 1))
    biases = {
        "experts_gate_bias": [[0.0], [9.0]],
        "experts_up_bias": [[-9.0], [1.0]],
        "experts_down_bias": [[0.5], [2]],
    }
    weights = {"router": one[:, 0], "experts_gate": one, "experts_up": one, "experts_down": one}
    weights |= {name: np.array(bias) for name, bias in biases.items()} | {"router_bias": np.log([1.0, 3.0])}
    # Gates are 1 and 10, ups -8 and 2: with a limit of 4, 1 and 4, -4 and 2.
    first, second = (-4 + 1) * 1 / (1 + np.exp(-1.702)) + 0.5, (2 + 1) * 4 / (1 + np.exp(-1.702 * 4)) + 2
    mixed = mixture(np.array([1.0]), weights, MoE(2, 2, 1, bias=True, clamp=4.0))
    np.testing.assert_allclose(mixed, [(first + 3 * second) / 4], rtol=1e-14)


def test_softmax_of_large_scores() -> None:
    np.testing.assert_allclose(softmax(np.array([1e4, 1e4])), [0.5, 0.5])


def test_every_feature_matters(models: dict[str, Model]) -> None:
    """A variety whose feature changed nothing would test nothing: its logits are not those of the plain model."""
    plain = models["half"]
    history = (Append(tuple(range(12))),)
    for name in ("qk_norm", "sinks", "biases"):
        kept = [{n: w[n] for n in plain.params["layers"][0]} for w in models[name].params["layers"]]
        without = Model.of(plain.config, {**models[name].params, "layers": kept})
        assert np.abs(run(models[name], history).logits - run(without, history).logits).max() > 1e-2


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"norm": np.ones(31)}, "norm is (31,), not (32,)"),
        ({"head": None}, "head is missing"),
        ({"lm_head": np.ones(3)}, "lm_head has no place"),
    ],
)
def test_parameters_must_fit(change: dict[str, Any], where: str) -> None:
    config = tiny("plain", Layer(Rotary(8)))
    changed = {**random_params(config, 0), **change}
    with pytest.raises(SpecError, match=where.replace("(", r"\(").replace(")", r"\)")) as refused:
        Model.of(config, {name: value for name, value in changed.items() if value is not None})
    assert refused.value.reason == Reason.WRONG_PARAMETERS


@pytest.mark.parametrize("token", [-1, 64])
def test_token_out_of_vocabulary(models: dict[str, Model], token: int) -> None:
    with pytest.raises(SpecError) as refused:
        run(models["half"], (Append((token,)),))
    assert refused.value.reason == Reason.TOKEN_OUT_OF_VOCABULARY
