"""How heads, experts and vocabulary are laid over devices (DESIGN R5). What comes out of it is checked by `spec/`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from jax.sharding import PartitionSpec

from akv_jax.config import Layer, ModelConfig, MoE, Rotary
from akv_jax.models.sharding import MODEL, NOTHING, Layout, layout_of
from akv_jax.models.weights.table import ArrayInfo, weight_table

_ = NOTHING


def config(heads: int = 4, kv_heads: int = 2, **features: object) -> ModelConfig:
    sizes = {"vocab_size": 10, "hidden_size": 6, "head_dim": 2, "intermediate_size": 6, "max_positions": 64}
    layers = (Layer(Rotary(2)),)
    return ModelConfig(num_heads=heads, num_kv_heads=kv_heads, layers=layers, **{**sizes, **features})  # type: ignore[arg-type]


def weight(model: ModelConfig, name: str) -> ArrayInfo:
    return next(info for info in weight_table(model) if info.path[-1] == name)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "of_slots", "queries"),
    [
        (4, 2, 1, (0, 1), (0, 1, 2, 3)),
        (8, 4, 2, (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7)),
        # Fewer KV heads than devices: each twice, its query heads dealt out.
        (8, 2, 4, (0, 0, 1, 1), (0, 1, 2, 3, 4, 5, 6, 7)),
        # SmolLM2: two slots a device, one of them empty; a device with nothing; each twice, with two query heads or
        # with one and a zero.
        (9, 3, 2, (0, 1, 2, _), (0, 1, 2, 3, 4, 5, 6, 7, 8, _, _, _)),
        (9, 3, 4, (0, 1, 2, _), (0, 1, 2, 3, 4, 5, 6, 7, 8, _, _, _)),
        (9, 3, 8, (0, 0, 1, 1, 2, 2, _, _), (0, 1, 2, _, 3, 4, 5, _, 6, 7, 8, _, _, _, _, _)),
        # No more copies than query heads.
        (2, 1, 4, (0, 0, _, _), (0, 1, _, _)),
        (4, 1, 3, (0, 0, _), (0, 1, 2, 3, _, _)),
    ],
)
def test_heads(heads: int, kv_heads: int, size: int, of_slots: tuple[int, ...], queries: tuple[int, ...]) -> None:
    layout = layout_of(config(heads, kv_heads), size)
    assert layout.kv_heads == of_slots
    assert layout.query_heads == queries
    assert layout.local.num_kv_heads * size == len(of_slots)
    assert layout.local.num_heads * size == len(queries)


def test_every_query_head_is_somewhere_once_and_beside_its_kv_head() -> None:
    for kv_heads, share, size in itertools.product(range(1, 9), range(1, 6), range(1, 17)):
        layout = layout_of(config(kv_heads * share, kv_heads), size)
        assert sorted(head for head in layout.query_heads if head != NOTHING) == list(range(kv_heads * share))
        # As few KV heads a device as can be: they are what a pool's size is made of.
        assert layout.local.num_kv_heads == -(-kv_heads // size)
        of_slot = layout.local.num_heads // layout.local.num_kv_heads
        for place, head in enumerate(layout.query_heads):
            assert head == NOTHING or head // share == layout.kv_heads[place // of_slot]


def test_weights_are_padded_with_zeros_and_cut() -> None:
    model = config(9, 3, attention_bias=True, attention_sinks=True, vocab_size=10, intermediate_size=6)
    layout = layout_of(model, 4)
    arrays = {
        info.path[-1]: (info, np.arange(1, np.prod(info.shape) + 1, dtype=np.float32).reshape(info.shape))
        for info in weight_table(model)
    }

    def arranged(name: str) -> np.ndarray:
        info, array = arrays[name]
        out = layout.arrange(info, array)
        assert out.shape == layout.shape(info)
        return out

    assert arranged("embed").shape == (12, 6) and not arranged("embed")[10:].any()
    for name in ("q", "q_bias", "sinks", "k", "v_bias", "gate", "head"):
        info, array = arrays[name]
        assert layout.spec(info) == PartitionSpec(MODEL)
        np.testing.assert_array_equal(arranged(name)[: len(array)], array)
        assert len(arranged(name)) > len(array) and not arranged(name)[len(array) :].any()
    for name in ("o", "down"):
        info, array = arrays[name]
        assert layout.spec(info) == PartitionSpec(None, MODEL)
        np.testing.assert_array_equal(arranged(name)[:, : array.shape[1]], array)
    for name in ("attn_norm", "o_bias", "norm"):
        assert layout.spec(arrays[name][0]) == PartitionSpec()
        assert arranged(name) is arrays[name][1]


def test_copies_of_a_kv_head_and_its_dealt_out_query_heads() -> None:
    model = config(3, 1)
    layout = layout_of(model, 2)
    q = np.arange(36, dtype=np.float32).reshape(6, 6)
    np.testing.assert_array_equal(layout.arrange(weight(model, "q"), q), np.concatenate([q, np.zeros((2, 6))]))
    k = q[:2]
    np.testing.assert_array_equal(layout.arrange(weight(model, "k"), k), np.concatenate([k, k]))


def test_what_comes_out_even_is_not_copied() -> None:
    model = config(4, 4)
    q = np.zeros((8, 6), np.float32)
    assert layout_of(model, 2).arrange(weight(model, "q"), q) is q


@pytest.mark.parametrize(("size", "axis"), [(2, 0), (3, 0), (4, None)])
def test_experts_stay_whole_where_their_number_divides(size: int, axis: int | None) -> None:
    model = config(moe=MoE(num_experts=6, experts_per_token=2, intermediate_size=6))
    layout = layout_of(model, size)
    assert layout.split_axis(weight(model, "router")) is None
    gate, down = weight(model, "experts_gate"), weight(model, "experts_down")
    assert (layout.split_axis(gate), layout.split_axis(down)) == ((0, 0) if axis == 0 else (1, 2))
    assert layout.shape(gate) == ((6, 6, 6) if axis == 0 else (6, 8, 6))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 1), (8, 2, 4), (9, 3, 4), (9, 3, 8)])
def test_rows_of_the_pool_and_back(heads: int, kv_heads: int, size: int) -> None:
    layout: Layout = layout_of(config(heads, kv_heads), size)
    rows = np.random.default_rng(0).normal(size=(5, kv_heads * 2)).astype(np.float32)
    there = layout.to_slots(rows)
    assert there.shape == (5, layout.slots * 2)
    np.testing.assert_array_equal(layout.from_slots(there), rows)
