"""Which weights these are, by content."""

from __future__ import annotations

import copy

import jax.numpy as jnp
import numpy as np
import pytest

from akv_jax.models.llama import config_from_hf
from akv_jax.models.load import load_model
from akv_jax.models.weights.digest import weights_digest
from tests.models.checkpoints import HF_CONFIG, hf_tensors, random_params, write_hf


@pytest.fixture
def params():
    return random_params(config_from_hf(HF_CONFIG))


def test_the_path_and_the_container_do_not_matter(params, tmp_path) -> None:
    tensors = hf_tensors(config_from_hf(HF_CONFIG), params)
    digests = {
        weights_digest(load_model(write_hf(tmp_path / name, HF_CONFIG, tensors), "float32", tmp_path, False).params)
        for name in ("one", "other")
    }
    assert len(digests) == 1


def test_jax_arrays_are_the_same_weights(params) -> None:
    changed = {**params, "embed": jnp.asarray(params["embed"])}
    assert weights_digest(changed) == weights_digest(params)


def test_every_bit_counts(params) -> None:
    """Two files of the same size with one weight different are different models."""
    seen = {weights_digest(params)}
    for layer in range(len(params["layers"])):
        changed = copy.deepcopy(params)
        changed["layers"][layer]["q"].view(np.uint8).reshape(-1)[-1] ^= 1
        seen.add(weights_digest(changed))
    assert len(seen) == 1 + len(params["layers"])


def test_dtype_shape_and_place_count(params) -> None:
    layers = params["layers"]
    variants = [
        {**params, "embed": params["embed"].astype(jnp.bfloat16)},
        {**params, "embed": params["embed"].reshape(-1, 2)},
        {**params, "layers": layers[::-1]},
    ]
    assert len({weights_digest(variant) for variant in [params, *variants]}) == 4
