"""The next turn against the specification: what is found, restored and moved back counts as computed anew.

`spec/test_conformance.py` keeps nothing between requests. Here the radix cache is on, with the real runner on one
device, or on four that compute prompts and four that generate (DESIGN R5): conversations that begin alike are served
together, and then again with what was said, edits and more tokens, in pools that may not hold them all. Every logit
that is asked for, and those of all that is generated, within the tolerance there; C7 after every step.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from akv_jax.config import Disaggregation, RepositionMode
from akv_jax.engine import ServingEngine
from akv_jax.request import Output, Request, Sampling
from spec.model import Model, random_params
from spec.operations import Append, Drop, History, Operation, Reposition
from spec.state import State, apply, run
from spec.test_conformance import appended, check_generated, check_logits, edited, most_pages
from spec.test_conformance_sharded import configs
from spec.visibility import closure
from tests import tiny_engine
from tests.tiny_engine import TinyEngine, TinySides

#: Conversations of one example, examples of one case.
TOGETHER, EXAMPLES, LONG_EXAMPLES = 2, 5, 60
#: Every prompt begins with it.
BEGINNING = Append(tuple(range(9)))
FOUR_AND_FOUR = Disaggregation(prefill=4, decode=4)


class Case(NamedTuple):
    """A variety, how it repositions, and whether prefill and decode are apart."""

    name: str
    mode: RepositionMode
    split: Disaggregation | None = None

    def __str__(self) -> str:
        return f"{self.name}-{self.mode}" + (f"-{self.split.prefill}+{self.split.decode}" if self.split else "")


CASES = [Case("window_and_full", "on_read"), Case("window_and_full", "copy")]
CASES += [Case("even", "on_read", FOUR_AND_FOUR), Case("even", "copy", FOUR_AND_FOUR)]
LONG_CASES = [
    *CASES,
    *(Case("everything", mode, split) for mode in ("on_read", "copy") for split in (None, FOUR_AND_FOUR)),
    Case("uneven", "copy", FOUR_AND_FOUR),
]


@dataclass(frozen=True)
class Turn:
    """What follows a reply: tokens dropped (numbers are taken modulo what there is), maybe a reposition, new tokens.

    `again` names tokens from before whose logits are asked for once more.
    """

    gone: frozenset[int]
    reposition: bool
    tokens: tuple[int, ...]
    again: frozenset[int]
    outputs: int

    def after(self, history: History) -> History:
        """What it adds to a history."""
        count = appended(history)
        edits: list[Operation] = [Drop(frozenset(index % count for index in self.gone))] if self.gone else []
        return (*edits, *([Reposition()] * self.reposition), Append(self.tokens))


@dataclass(frozen=True)
class Conversation:
    first: History
    outputs: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Asked:
    """One request: what was `known` when its conversation's last turn ended, what follows, and what is looked at.

    `state` is the specification's of all that is known.
    """

    known: History
    state: State
    more: History
    looked_at: tuple[int, ...]
    outputs: int

    @property
    def history(self) -> History:
        return (*self.known, *self.more)


PLACES = st.integers(0, 100)
TURNS = st.builds(
    Turn,
    gone=st.frozensets(PLACES, max_size=4) | st.builds(lambda a, size: frozenset(range(a, a + size)), PLACES, PLACES),
    reposition=st.booleans(),
    tokens=st.binary(min_size=1, max_size=12).map(lambda raw: tuple(byte % 64 for byte in raw)),
    again=st.just(frozenset()) | st.frozensets(PLACES, max_size=2),
    outputs=st.integers(1, 6),
)
CONVERSATIONS = st.builds(
    Conversation,
    first=edited().map(lambda history: (BEGINNING, *history)),
    outputs=st.integers(2, 6),
    turns=st.lists(TURNS, min_size=2, max_size=2).map(tuple),
)


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest) -> Iterator[dict[Case, Future[TinyEngine]]]:
    """A warm engine of each case that this session tests, compiled one after another while others are tested."""
    items = [i for i in request.session.items if isinstance(i, pytest.Function) and i.path == request.path]
    wanted: list[Any] = list(dict.fromkeys(item.callspec.params["case"] for item in items))
    with tiny_engine.quick_compiles(), ThreadPoolExecutor(max_workers=1) as pool:
        yield {case: pool.submit(_warm, case) for case in wanted}
        pool.shutdown(cancel_futures=True)


def _warm(case: Case) -> TinyEngine:
    config = configs()[case.name]
    params, options = random_params(config, seed=7), dict[str, Any](reposition=case.mode)
    if case.split is None:
        made = TinyEngine(config, params, **options)
    else:
        made = TinySides(config, params, case.split, **options)
    # A second token: pages move.
    tiny_engine.run(made.engine(), [tiny_engine.score("first", (Append((0,)),), max_tokens=2)])
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_next_turns(engines, case: Case) -> None:
    """R2, R5: the engine computes what the spec says, whatever it still has of earlier turns."""
    _conforms(engines[case].result(), case, EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("case", LONG_CASES, ids=str)
def test_next_turns_long(engines, case: Case) -> None:
    """Many more of them."""
    _conforms(engines[case].result(), case, LONG_EXAMPLES)


def _conforms(tiny: TinyEngine, case: Case, examples: int) -> None:
    config = configs()[case.name]
    model = Model.of(config, random_params(config, seed=7))
    reused = returned = 0

    @settings(
        max_examples=examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(
        conversations=st.tuples(*[CONVERSATIONS] * TOGETHER),
        chunk=st.integers(16, tiny_engine.ROWS),
        ample=st.booleans() | st.just(True),
        spare=st.integers(0, 20),
    )
    def conversations_conform(conversations: tuple[Conversation, ...], chunk: int, ample: bool, spare: int) -> None:
        nonlocal reused, returned
        needed = max(_most_ever(conversation, case.mode) for conversation in conversations)
        pages = 1024 if ample else needed + spare
        engine = tiny.engine(disable_radix_cache=False, num_pages=pages, chunked_prefill_size=chunk)
        asked = [_first(conversation) for conversation in conversations]
        for turns in (*zip(*(conversation.turns for conversation in conversations), strict=True), None):
            states = _check_turn(engine, model, asked, ample)
            if turns is not None:
                asked = [_next(turn, one, state) for turn, one, state in zip(turns, asked, states, strict=True)]
        stats = engine.stats()
        event(f"evicted: {any(stats.evicted_pages_total.values())}, retractions: {min(stats.preemptions_total, 2)}")
        reused += stats.prefix_cache_hits_exact_total + stats.prefix_cache_hits_rotated_total
        returned += stats.pages_to_prefill_total
        tiny_engine.empty(engine)

    conversations_conform()
    assert reused > 0 and (returned > 0) == (case.split is not None)


def _first(conversation: Conversation) -> Asked:
    everything = tuple(range(appended(conversation.first)))
    return Asked((), State(), conversation.first, everything, conversation.outputs)


def _next(turn: Turn, before: Asked, state: State) -> Asked:
    """The turn after a request that came to this state, which has what was said."""
    count = len(before.state.trajectory) + appended(before.more)
    known = (*before.history, Append(tuple(query.token for query in state.trajectory[count:])))
    more, count = turn.after(known), len(state.trajectory)
    # The last token said has been sampled, and never computed.
    looked_at = {count - 1, *(index % count for index in turn.again), *range(count, count + len(turn.tokens))}
    return Asked(known, state, more, tuple(sorted(looked_at)), turn.outputs)


def _most_ever(conversation: Conversation, mode: RepositionMode) -> int:
    """Pages with which the last turn, and so each one before it, can be served alone from nothing."""
    history, outputs = conversation.first, conversation.outputs
    for turn in conversation.turns:
        history, outputs = (*history, Append((0,) * outputs)), turn.outputs
        history = (*history, *turn.after(history))
    whole = (*history, Append((0,) * outputs))
    # A copy beside each entry that its view has turned.
    return most_pages(whole, run(None, whole), mode) * (2 if mode == "copy" else 1)


def _check_turn(engine: ServingEngine, model: Model, asked: list[Asked], ample: bool) -> list[State]:
    """Serve them together and check all that comes out; what the specification says they came to."""
    requests = [
        Request(
            str(number),
            one.history,
            Sampling(one.outputs, 0.0, ignore_eos=True, logprobs=True, top_logprobs=20),
            logits_at=one.looked_at,
            return_logits=True,
        )
        for number, one in enumerate(asked)
    ]
    outputs = tiny_engine.serve(engine, requests)
    states: list[State] = []
    for number, one in enumerate(asked):
        own = outputs[str(number)]
        assert all(output.error is None for output in own)
        tokens = tiny_engine.generated(own)
        assert len(tokens) == one.outputs
        prompt = functools.reduce(lambda state, operation: apply(state, operation, model), one.more, one.state)
        state = apply(prompt, Append(tokens), model)
        logits, count = np.array([query.logits for query in state.trajectory]), len(prompt.trajectory)
        check_logits(own, one.looked_at, logits[:count])
        check_generated(own, logits[count - 1 :], greedy=True)
        _check_usage(own[-1], model, one, prompt, ample)
        states.append(state)
    return states


def _check_usage(last: Output, model: Model, one: Asked, prompt: State, ample: bool) -> None:
    """A6; and where nothing is evicted, no more is computed than if all that its turn before computed were there."""
    used = last.usage
    assert used is not None
    count = len(prompt.trajectory)
    kinds = used.computed_tokens, used.drop_skipped_tokens, used.repos_tokens, used.cached_tokens
    assert sum(kinds) == used.prompt_tokens == count
    assert (used.active_tokens, used.next_position) == (len(prompt.active), prompt.n)
    windows = [layer.window for layer in model.config.layers]
    resident = closure(one.known, (), windows=windows) if one.known and ample else frozenset[int]()
    assert used.computed_tokens <= len(closure(one.history, resident, {*one.looked_at, count - 1}, windows))
