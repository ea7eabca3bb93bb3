"""Sorting rows by expert (`models/experts.py`); what comes of it the conformance test checks."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from akv_jax.models.experts import _sorted_places


@pytest.mark.parametrize("count", [1, 5, 32])
def test_places_are_those_of_a_stable_sort(count: int) -> None:
    generator = np.random.default_rng(count)
    for groups in (generator.integers(0, count + 1, 200), np.zeros(200, int), np.full(200, count)):
        place, sizes = jax.jit(_sorted_places, static_argnums=1)(groups.astype(np.int32), count)
        assert np.argsort(groups, kind="stable").tolist() == np.argsort(place).tolist()
        assert sorted(np.asarray(place).tolist()) == list(range(200))
        assert np.asarray(sizes).tolist() == np.bincount(groups, minlength=count + 1)[:count].tolist()
