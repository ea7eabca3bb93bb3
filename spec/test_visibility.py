"""What must be computed, and how usage counts it (DESIGN C6, A6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec.model import Model
from spec.operations import Append, Drop, History, Reason, Reposition, SpecError
from spec.state import Entry, State, apply, run
from spec.strategies import histories
from spec.varieties import varieties
from spec.visibility import closure, usage

R = Reposition()
AB, C, D = Append((1, 2)), Append((3,)), Append((4,))
ABC, DE = Append((1, 2, 3)), Append((4, 5))


def drop(*indices: int) -> Drop:
    return Drop(frozenset(indices))


@pytest.mark.parametrize(
    ("history", "resident", "expected"),
    [
        ((ABC, DE), {0, 1, 2, 3, 4}, {4}),
        ((ABC, DE), {0, 1, 2}, {3, 4}),
        ((AB, drop(1), C), set(), {0, 2}),  # B is dropped before anything that is needed reads it
        ((ABC, drop(1), D), set(), {0, 1, 2, 3}),  # C is computed, and C read B
        ((ABC, drop(1), D), {0, 2}, {3}),  # B is gone, and nothing that is computed read it
        ((ABC, drop(1), D), {0}, {1, 2, 3}),
        ((AB, drop(0), C, drop(1), D), {2}, {3}),
        ((AB, drop(0), C, drop(1), D), set(), {0, 1, 2, 3}),  # D -> C -> B -> A
        ((ABC, drop(2)), {0, 1}, {2}),  # the last one appended, though it has been dropped
        ((ABC, drop(0, 1, 2)), set(), {0, 1, 2}),
        ((), set(), set()),
    ],
)
def test_closure(history: History, resident: set[int], expected: set[int]) -> None:
    """C6: computed is what is active and missing, the last token appended, and again and again every missing entry that
    one of these reads when it is computed; and nothing else."""
    assert closure(history, resident) == expected


def test_closure_of_wanted_logits() -> None:
    """C6: a resident entry is computed only for its logits, with what it read and is missing."""
    history = (ABC, drop(0, 1), DE)
    assert closure(history, {2, 3, 4}) == {4}
    assert closure(history, {2, 3, 4}, wanted=[2]) == {0, 1, 2}
    assert closure(history, {0, 1, 2, 3, 4}, wanted=[2, 3]) == {2, 3}
    with pytest.raises(SpecError) as refused:
        closure(history, (), wanted=[5])
    assert refused.value.reason == Reason.NOT_YET_APPENDED


def test_closure_in_windows() -> None:
    """C6, L6: an entry is needed if a query reads it in any layer, with the positions of the time of that query."""
    six = Append(tuple(range(6)))
    history = (six, drop(0, 1, 2, 3), D)  # entries 4@4, 5@5, 6@6
    assert closure(history, {4}, windows=(None, 2)) == {0, 1, 2, 3, 5, 6}
    assert closure(history, {4}, windows=(1, 2)) == {5, 6}
    assert closure(history, {0, 4}, windows=(3, 3)) == {1, 2, 3, 5, 6}
    # 0 is dropped late, and only a reposition brings it into the window of token 6.
    assert closure((six, drop(1, 2, 3, 4, 5), D, drop(0)), (), windows=(2,)) == {6}
    assert closure((six, drop(1, 2, 3, 4, 5), R, D, drop(0)), (), windows=(2,)) == {0, 6}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(varieties())), histories(min_tokens=2), st.data())
def test_closure_is_enough_and_no_more(
    models: dict[str, Model], name: str, history: History, data: st.DataObject
) -> None:
    """C6: with the rest of the KV destroyed, what is computed is enough for every active entry and the wanted logits;
    without any one of them it is not."""
    model = models[name]
    windows = [layer.window for layer in model.config.layers]
    true = run(model, history)
    tokens = st.integers(0, len(true.queries) - 1)
    resident = data.draw(st.frozensets(tokens), label="resident")
    wanted = data.draw(st.frozensets(tokens, min_size=1, max_size=2), label="wanted")
    computed = closure(history, resident, wanted, windows)
    assert _comes_out_right(model, history, true.state, resident, computed, wanted)
    for index in computed:
        assert not _comes_out_right(model, history, true.state, resident, computed - {index}, wanted)


def _comes_out_right(
    model: Model, history: History, true: State, resident: frozenset[int], computed: frozenset[int], wanted: frozenset
) -> bool:
    """Replay with NaN in place of all KV that is neither resident nor computed, and compare what was to come out.

    By token, not by layer: one that cannot be computed in every layer is not computed, though its K and V of the first
    layers would be right.
    """
    clean, state = State(), State()
    for operation in history:
        for piece in [Append((t,)) for t in operation.tokens] if isinstance(operation, Append) else [operation]:
            clean, state = apply(clean, piece, model), apply(state, piece, model)
            if isinstance(piece, Append):
                logits = state.trajectory[-1].logits
                assert logits is not None
                possible = computed if np.isfinite(logits).all() else frozenset[int]()
                entry = _after_its_append(clean.active[-1], state.active[-1], resident, possible)
                state = State((*state.active[:-1], entry), state.n, state.trajectory)
    right_kv = all(
        np.allclose(entry.v, correct.v, atol=1e-9) and np.allclose(entry.k, correct.k, atol=1e-9)
        for entry, correct in zip(state.active, true.active, strict=True)
    )
    right_logits = all(
        index in computed and np.allclose(state.trajectory[index].logits, true.trajectory[index].logits, atol=1e-9)
        for index in wanted
    )
    return right_kv and right_logits


def _after_its_append(clean: Entry, own: Entry, resident: frozenset[int], computed: frozenset[int]) -> Entry:
    if clean.index in resident:
        return clean
    if own.index in computed:
        return own
    nothing = tuple(np.full_like(k, np.nan) for k in own.k)
    return Entry(own.index, own.token, own.position, own.birth, nothing, nothing)


@pytest.mark.parametrize(
    ("history", "resident", "computed", "drop_skipped", "repos", "cached"),
    [
        ((ABC, DE), set(), {0, 1, 2, 3, 4}, set(), set(), set()),
        ((ABC, DE), {0, 1, 2, 3, 4}, {4}, set(), set(), {0, 1, 2, 3}),
        ((ABC, drop(1), DE), {0, 1, 2, 3, 4}, {4}, {1}, set(), {0, 2, 3}),
        ((ABC, drop(1), R, DE), {0, 1, 2, 3, 4}, {4}, {1}, {2}, {0, 3}),
        ((ABC, drop(1), R, DE), {0, 1}, {2, 3, 4}, set(), set(), {0, 1}),  # C is restored, and reads the dropped B
        ((AB, drop(1), C), set(), {0, 2}, {1}, set(), set()),
        ((ABC, drop(0), R, DE, drop(3, 4), R), {0, 1, 2, 3}, {4}, {0}, {1, 2}, {3}),
    ],
)
def test_usage(
    history: History, resident: set[int], computed: set[int], drop_skipped: set[int], repos: set[int], cached: set[int]
) -> None:
    """A6: a prompt token is computed, else dropped and read by no query, else read with a shift, else cached."""
    counted = usage(history, resident)
    assert counted.computed == computed
    assert counted.drop_skipped == drop_skipped
    assert counted.repos == repos
    assert counted.cached == cached


@given(histories(max_operations=12), st.frozensets(st.integers(0, 60)), st.sampled_from([(None,), (3,), (None, 2)]))
def test_usage_is_a_partition(history: History, resident: frozenset[int], windows: tuple[int | None, ...]) -> None:
    """A6: the four kinds of prompt token sum to the number of prompt tokens."""
    counted = usage(history, resident, windows)
    kinds = [*counted.computed, *counted.drop_skipped, *counted.repos, *counted.cached]
    assert sorted(kinds) == list(range(len(run(None, history).queries)))


@given(histories(max_operations=12))
def test_a_request_computes_the_last_token_even_if_all_is_resident(history: History) -> None:
    """C6, A6: when everything is resident only the last token is computed."""
    appended = len(run(None, history).queries)
    assert closure(history, range(appended)) == {appended - 1}
