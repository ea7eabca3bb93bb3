"""What each operation may change and what it may not (DESIGN L1-L6), on random histories and every variety of model."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.model import Model
from spec.operations import Append, Drop, History, Reposition, canonical
from spec.rope import rotate
from spec.state import Entry, State, apply, run
from spec.strategies import histories
from spec.varieties import varieties
from spec.visibility import reads_in_layer

names = st.sampled_from(sorted(varieties()))
few = settings(max_examples=40, deadline=None)


@few
@given(names, histories(), st.integers(0, 63))
def test_append(models: dict[str, Model], name: str, history: History, token: int) -> None:
    """L1: a new token is encoded at n, attends to every active entry and itself, and n grows by one."""
    before = run(models[name], history).state
    after = apply(before, Append((token,)), models[name])
    query = after.trajectory[-1]
    assert (query.index, query.position, after.n) == (len(before.trajectory), before.n, before.n + 1)
    assert [(r.index, r.position) for r in query.view] == [(e.index, e.position) for e in after.active]
    assert all(new is old for new, old in zip(after.active[:-1], before.active, strict=True))
    assert after.active[-1].position == after.active[-1].birth == before.n


@few
@given(names, histories(), st.data())
def test_drop(models: dict[str, Model], name: str, history: History, data: st.DataObject) -> None:
    """L2: a drop leaves the order, positions, K and V of the others, and n, as they are."""
    before = run(models[name], history).state
    dropped = data.draw(st.frozensets(st.integers(0, len(before.trajectory) - 1)))
    after = apply(before, Drop(dropped), models[name])
    assert after.n == before.n
    others = [entry for entry in before.active if entry.index not in dropped]
    assert all(new is old for new, old in zip(after.active, others, strict=True))


@few
@given(names, histories())
def test_reposition(models: dict[str, Model], name: str, history: History) -> None:
    """L3: a reposition gives the r survivors, in logical order, positions 0..r-1, rotates their K, keeps their V, and
    makes n = r."""
    model = models[name]
    before = run(model, history).state
    after = apply(before, Reposition(), model)
    assert [e.position for e in after.active] == list(range(len(before.active)))
    assert after.n == len(before.active)
    for old, new in zip(before.active, after.active, strict=True):
        assert (new.index, new.token, new.birth) == (old.index, old.token, old.birth)
        assert new.v is old.v
        for layer, old_k, new_k in zip(model.config.layers, old.k, new.k, strict=True):
            undone = rotate(layer.rotary, old_k, -old.position)
            np.testing.assert_allclose(new_k, rotate(layer.rotary, undone, new.position), atol=1e-12)


@few
@given(names, histories(), histories())
def test_what_comes_later_changes_nothing_computed_before(
    models: dict[str, Model], name: str, first: History, second: History
) -> None:
    """L4: a later history may change only where an entry's K is encoded and whether it is attended."""
    model = models[name]
    start = run(model, first)
    late = run(model, first + second)
    np.testing.assert_array_equal(late.logits[: len(start.logits)], start.logits)
    assert late.queries[: len(start.queries)] == start.queries
    born = {entry.index: entry for entry in _births(first + second, model)}
    for entry in late.state.active:
        birth = born[entry.index]
        np.testing.assert_array_equal(entry.v, birth.v)
        for layer, k, birth_k in zip(model.config.layers, entry.k, birth.k, strict=True):
            np.testing.assert_allclose(k, rotate(layer.rotary, birth_k, entry.position - birth.position), atol=1e-11)


def _births(history: History, model: Model) -> list[Entry]:
    """Every entry ever, as it was right after its own append."""
    state, entries = State(), []
    for operation in history:
        for piece in [Append((t,)) for t in operation.tokens] if isinstance(operation, Append) else [operation]:
            state = apply(state, piece, model)
            if isinstance(piece, Append):
                entries.append(state.active[-1])
    return entries


@few
@given(names, histories())
def test_histories_with_one_canonical_form_are_the_same(models: dict[str, Model], name: str, history: History) -> None:
    """L5: a history and its canonical form mean the same, to the last bit."""
    raw, plain = run(models[name], history), run(models[name], canonical(history))
    np.testing.assert_array_equal(raw.logits, plain.logits)
    assert raw.segments == plain.segments
    assert raw.state.n == plain.state.n
    for a, b in zip(raw.state.active, plain.state.active, strict=True):
        assert (a.index, a.position, a.birth) == (b.index, b.position, b.birth)
        np.testing.assert_array_equal(a.k, b.k)


@given(histories(max_operations=12))
def test_positions_grow_with_logical_index_and_stay_below_n(history: History) -> None:
    """L1, L2, L3: positions grow strictly with the logical index, stay below n, and never exceed the birth position."""
    state = run(None, history).state
    positions = [entry.position for entry in state.active]
    assert positions == sorted(set(positions))
    assert all(position < state.n for position in positions)
    assert all(entry.position <= entry.birth <= entry.index for entry in state.active)
    assert state.n <= len(state.trajectory)


@given(histories(max_operations=12))
def test_segments_partition_the_trajectory(history: History) -> None:
    """R1: segments hold every query once and in order; within one, each sees what the one before it saw, and itself."""
    result = run(None, history)
    assert [i for segment in result.segments for i in segment.queries] == list(range(len(result.queries)))
    for segment in result.segments:
        before = len(segment.view) - len(segment.queries)
        for k, index in enumerate(segment.queries):
            assert result.queries[index].view == segment.view[: before + k + 1]
    effective = [i for i, op in enumerate(canonical(history)) if isinstance(op, Append)]
    assert len(result.segments) == len(effective), "one segment for each append of the canonical form"


def test_reposition_brings_an_entry_back_into_a_window(models: dict[str, Model]) -> None:
    """L6: a window layer reads p from q iff q - p < W, with the positions of that time: a reposition may bring an entry
    back into the window, so its K and V are kept as long as it is active."""
    model = models["window_everywhere"]  # windows of 6 and 3
    ten, gap, more = Append(tuple(range(10))), frozenset(range(1, 9)), Append((42,))
    far, far_dropped = (ten, Drop(gap), more), (ten, Drop(gap | {0}), more)
    assert [r.index for r in reads_in_layer(run(None, far).queries[-1], 6)] == [9, 10]
    np.testing.assert_array_equal(run(model, far).logits[-1], run(model, far_dropped).logits[-1])
    near, near_dropped = ((*h[:2], Reposition(), more) for h in (far, far_dropped))
    assert [r.index for r in reads_in_layer(run(None, near).queries[-1], 3)] == [0, 9, 10]
    assert np.abs(run(model, near).logits[-1] - run(model, near_dropped).logits[-1]).max() > 1e-3


def test_a_window_reaches_exactly_so_far(models: dict[str, Model]) -> None:
    """L6: with a window of W a query sees itself and the W - 1 positions before it, dropped or not."""
    result = run(None, (Append(tuple(range(6))), Drop(frozenset({4})), Append((6,))))
    assert [r.index for r in reads_in_layer(result.queries[-1], 3)] == [5, 6]
    assert [r.index for r in reads_in_layer(result.queries[-1], 1)] == [6]
    assert len(reads_in_layer(result.queries[-1], None)) == 6


def test_sinks_are_no_entries(models: dict[str, Model]) -> None:
    """L6: attention sinks are logits of the heads and not entries: dropping everything leaves them at work."""
    model = models["sinks"]
    silent = {**model.params, "layers": [{**w, "sinks": np.full(4, -np.inf)} for w in model.params["layers"]]}
    without = Model.of(model.config, silent)
    history = (Append((1, 2)), Drop(frozenset({0, 1})), Append((3,)))
    assert len(run(model, history).state.active) == 1
    assert np.abs(run(model, history).logits[-1] - run(without, history).logits[-1]).max() > 1e-3
