"""Everything that clients, neighbours and memory can do to the cache, in any order, against one that knows nothing.

Hypothesis plays episodes of thirty rules: new conversations, next turns, branches, drops, repositions, other tenants,
hang-ups, evictions, flushes, steps with anything in flight, in pools down to a handful of pages. After every step
`WatchedEngine` holds logits against the specification run from the history alone (A4), and pages, leases, the tree,
what was computed and the usage numbers against what was really done (A6, C1-C7).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from akv_jax.config import RepositionMode
from spec.operations import Append, Drop, History, Operation, Reposition, canonical
from tests.episodes import play
from tests.two_layers import CHUNK, MODES, PAGES, RUNNING, oracle, warm
from tests.watched_engine import Asked, WatchedEngine

#: The specification's time grows with it.
LONGEST = 50

#: Few of them, so that conversations happen to begin alike, and to go on alike after a branch.
tokens = st.integers(1, 6).flatmap(lambda size: st.lists(st.integers(0, 1), min_size=size, max_size=size)).map(tuple)
replies = st.integers(1, 9).map(lambda size: (1, 0, 1, 1, 1, 0, 0, 1, 0)[:size])
places = st.integers(0, LONGEST)
#: A stretch of tokens, or a few: numbers are taken modulo what there is.
drops = st.one_of(
    # Many begin alike: what tells two drops apart may be their end alone.
    st.tuples(st.one_of(st.sampled_from([0, 5]), places), st.sampled_from([1, 3, 5, 7, 10])).map(
        lambda drop: range(drop[0], drop[0] + drop[1])
    ),
    st.lists(places, min_size=1, max_size=3),
)
looks = st.one_of(st.just([]), st.lists(places, max_size=2))
#: Tokens, or none: the history then ends with an operation.
some = st.one_of(st.just(()), tokens)
#: Steps of the engine before the next thing happens.
few = st.integers(0, 4)


class Further(NamedTuple):
    """What follows an edit: tokens, the reply that is forced, steps, and tokens whose logits are looked at."""

    tokens: tuple[int, ...]
    reply: tuple[int, ...]
    steps: int
    at: list[int]


further = st.builds(Further, some, replies, few, looks)
salts = st.sampled_from(["", "", "other"])

#: What conversations begin with; they begin alike.
START = (0, 1, 1, 0, 0, 1, 0, 1)
BEGINNINGS: tuple[History, ...] = (
    (Append(START[:3]),),
    (Append(START),),
    (Append((*START, 1, 1)), Drop(frozenset(range(2, 7))), Append((0, 0, 1))),
    (Append((*START, 1, 1)), Drop(frozenset(range(2, 7))), Reposition(), Append((0, 0, 1))),
    # What is dropped last must be computed again for whoever branches off before it.
    (Append(START), Drop(frozenset(range(5))), Append(START[:6]), Drop(frozenset(range(5, 13))), Append((1,))),
    (Append(START * 2), Drop(frozenset(range(7))), Append(START), Drop(frozenset(range(7, 15))), Reposition()),
)

Told = tuple[str, History]


class Agents(RuleBasedStateMachine):
    """See the module. Histories in `told` include what the request was made to sample."""

    told: Bundle[Told] = Bundle("told")

    def __init__(self, mode: RepositionMode) -> None:
        super().__init__()
        self.mode: RepositionMode = mode
        self.watched: WatchedEngine
        #: It takes as long as twenty steps.
        self.restarts = 0
        self.folder = tempfile.TemporaryDirectory()

    @initialize(
        target=told,
        pages=st.sampled_from([7, 9, 10, 11, 12, 14, 16, 17, 18, 19, 20, 22, 24, 28, 32, 36, PAGES]),
        chunk=st.sampled_from([1, 3, 8, CHUNK]),
        running=st.sampled_from([1, 2, 4, RUNNING]),
    )
    def start(self, pages: int, chunk: int, running: int) -> Any:
        self.settings = {"num_pages": pages, "chunked_prefill_size": chunk, "max_running_requests": running}
        engine = warm(self.mode).engine(disable_radix_cache=False, **self.settings)
        self.watched = WatchedEngine(engine, oracle())
        return multiple(*(("", history) for history in BEGINNINGS))

    # -- requests ----------------------------------------------------------------------------------------------------

    @rule(target=told, history=st.sampled_from(BEGINNINGS), tokens=tokens, reply=replies, salt=salts, steps=few)
    def new(self, history: History, tokens: tuple[int, ...], reply: tuple[int, ...], salt: str, steps: int) -> Any:
        return self.ask((salt, history), (Append(tokens),), reply, steps)

    @rule(target=told, before=told, tokens=tokens, reply=replies, steps=few)
    def next_turn(self, before: Told, tokens: tuple[int, ...], reply: tuple[int, ...], steps: int) -> Any:
        return self.ask(before, (Append(tokens),), reply, steps)

    @rule(target=told, before=told, cut=st.integers(0, 9), tokens=tokens, reply=replies, steps=few)
    def branch(self, before: Told, cut: int, tokens: tuple[int, ...], reply: tuple[int, ...], steps: int) -> Any:
        salt, history = before[0], canonical(before[1])
        kept = list(history[: 1 + cut % len(history)])
        if isinstance(kept[-1], Append):
            kept[-1] = Append(kept[-1].tokens[: 1 + cut % len(kept[-1].tokens)])
        return self.ask((salt, tuple(kept)), (Append(tokens),), reply, steps)

    @rule(target=told, before=told, gone=drops, more=further)
    def drop(self, before: Told, gone: list[int], more: Further) -> Any:
        return self.ask(before, (dropping(before[1], gone), Append(more.tokens)), more.reply, more.steps, more.at)

    @rule(target=told, before=told, gone=drops, more=further)
    def reposition(self, before: Told, gone: list[int], more: Further) -> Any:
        edits = (dropping(before[1], gone), Reposition(), Append(more.tokens))
        return self.ask(before, edits, more.reply, more.steps, more.at)

    @rule(crowd=st.lists(st.tuples(told, st.one_of(st.none(), drops), tokens), min_size=2, max_size=4))
    def crowd(self, crowd: list[tuple[Told, list[int] | None, tuple[int, ...]]]) -> None:
        """Several at once that have much to say, a step after one another: more than the pool may hold."""
        for before, gone, tokens in crowd:
            edits = () if gone is None else (dropping(before[1], gone), Reposition())
            self.ask(before, (*edits, Append(tokens)), (0, 1, 1) * 4, 1)
        for _ in range(8):
            self.watched.step()

    @rule(before=told, reply=replies, steps=few, at=looks)
    def again(self, before: Told, reply: tuple[int, ...], steps: int, at: list[int]) -> None:
        """The same once more."""
        self.ask(before, (), reply, steps, at)

    @rule(before=told, tokens=tokens, steps=st.integers(0, 9))
    def hang_up(self, before: Told, tokens: tuple[int, ...], steps: int) -> None:
        """A next turn whose sender does not wait for its end."""
        known = len(self.watched.asked)
        self.ask(before, (Append(tokens),), (1, 1, 0) * 3, steps)
        for asked in list(self.watched.asked.values())[known:]:
            if asked.end is None:
                event(f"hung up while {stage(asked)}")
                self.watched.abort(asked)

    @rule(before=told, reply=replies, steps=few)
    def other_tenant(self, before: Told, reply: tuple[int, ...], steps: int) -> None:
        """The same from somebody who must not profit from it."""
        self.ask(("" if before[0] else "other", before[1]), (), reply, steps)

    def ask(
        self, before: Told, more: History, reply: tuple[int, ...], steps: int, at: list[int] | tuple[()] = ()
    ) -> Any:
        salt, history = before[0], (*before[1], *more)
        count = count_of(history)
        if count > LONGEST:
            return multiple()
        asked = self.watched.ask(history, reply, salt=salt, logits_at=tuple(look % count for look in at))
        for _ in range(steps):
            self.watched.step()
        return multiple() if asked.end == "refused" else (salt, (*history, Append(reply)))

    # -- what happens to them ----------------------------------------------------------------------------------------

    @precondition(lambda self: self.watched.live)
    @rule(steps=st.sampled_from([1, 2, 4, 8, 1000]))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if not self.watched.live:
                return
            self.watched.step()

    @precondition(lambda self: self.watched.live)
    @rule(which=places)
    def abort(self, which: int) -> None:
        live = self.watched.live
        asked = live[which % len(live)]
        event(f"aborted while {stage(asked)}")
        self.watched.abort(asked)

    @rule(count=st.integers(1, 20))
    def evict(self, count: int) -> None:
        able = self.watched.engine.cache.evictable()
        assert self.watched.engine.cache.evict(count) == min(count, able)
        self.watched.check()

    @rule()
    def flush(self) -> None:
        able = self.watched.engine.cache.evictable()
        assert self.watched.engine.flush_cache() == able
        self.watched.check()

    @precondition(lambda self: self.restarts < 2)
    @rule(pages=st.sampled_from([None, 16, 24, PAGES]), other_mode=st.booleans(), before=told, reply=replies)
    def restart(self, pages: int | None, other_mode: bool, before: Told, reply: tuple[int, ...]) -> None:
        """From disk, perhaps with another pool, perhaps with the other way to reposition; somebody goes on at once."""
        self.restarts += 1
        if pages is not None:
            self.settings["num_pages"] = pages
        if other_mode:
            self.mode = MODES[self.mode == "on_read"]
        fresh = warm(self.mode).engine(disable_radix_cache=False, **self.settings)
        self.watched.restart(Path(self.folder.name), fresh)
        self.ask(before, (), reply, 2)

    @invariant()
    def tree(self) -> None:
        if hasattr(self, "watched"):
            self.watched.check_tree()

    def teardown(self) -> None:
        self.folder.cleanup()
        if not hasattr(self, "watched") or not self.watched.sound:
            return
        self.watched.drain()
        engine = self.watched.engine
        assert engine.cache.leased() == 0
        engine.flush_cache()
        assert engine.stats().pages_free == engine.config.num_pages and not self.watched.ledger


def count_of(history: History) -> int:
    return sum(len(operation.tokens) for operation in history if isinstance(operation, Append))


def dropping(history: History, places: list[int]) -> Operation:
    count = count_of(history)
    return Drop(frozenset(place % count for place in places))


def stage(asked: Asked) -> str:
    """How far it has come."""
    if asked.logits:
        return "decoding"
    return "between chunks" if asked.computed else "queued"


@pytest.mark.parametrize("mode", MODES)
def test_episodes(mode: RepositionMode) -> None:
    """A4, A6, A7, C1-C7: the same seventy-five episodes every time."""
    play(lambda: Agents(mode), 75, 30, derandomize=True)


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_many_episodes(mode: RepositionMode) -> None:
    """The same, new ones every time."""
    play(lambda: Agents(mode), 2_500, 30, derandomize=False)
