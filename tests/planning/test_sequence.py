"""One request's chunks on a symbolic device, and how many pages they need (DESIGN R1, C6-C8, A7)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from akv_jax.cache.base import MatchResult
from akv_jax.cache.pages import PageError
from akv_jax.config import RepositionMode
from akv_jax.planning.peak import most_pages, peak_pages
from akv_jax.planning.planner import assemble
from akv_jax.planning.restore import compute_set
from akv_jax.planning.sequence import Chunk, Sequence
from akv_jax.planning.usage import num_segments
from akv_jax.planning.visibility import Timeline
from spec.operations import Append, Drop, History, Reposition
from spec.state import append, run
from spec.visibility import closure
from tests.planning.symbolic import Content, Expected, ForgetfulPool, SymbolicDevice
from tests.random_histories import random_history

MODES: tuple[RepositionMode, ...] = ("on_read", "copy")


def random_windows(generator: np.random.Generator) -> tuple[int | None, ...]:
    """Of each layer; where all have one, and a small one, what is active need not be resident."""
    if generator.random() < 0.4:
        return (None,)
    return tuple(generator.integers(1, 5, size=generator.integers(1, 3)).tolist())


def widest(windows: tuple[int | None, ...]) -> int | None:
    return None if None in windows else max(w for w in windows if w is not None)


class Player:
    """Computes one request on a symbolic device, then generates."""

    def __init__(
        self,
        history: History,
        mode: RepositionMode,
        *,
        num_pages: int = 1000,
        windows: tuple[int | None, ...] = (None,),
        resident: dict[int, int] | None = None,
        wanted: tuple[int, ...] = (),
    ) -> None:
        """`resident`: the position at which each token at hand is encoded, by logical index."""
        self.mode, self.windows, self.wanted = mode, windows, wanted
        self.device = SymbolicDevice()
        self.pool = ForgetfulPool(num_pages, self.device)
        self.state = run(None, history).state
        self.resident = resident or {}
        timeline = Timeline(history)
        pages, encoded = np.full(timeline.count, -1, np.int32), timeline.birth[: timeline.count].copy()
        # A cache's pages, here beyond the pool.
        for page, (index, position) in enumerate(self.resident.items(), start=num_pages + 1):
            pages[index], encoded[index] = page, position
            self.device.pages[page] = Content("me", index, position)
        self.cached = dict(self.device.pages)
        match = MatchResult(pages, encoded, 0)
        self.sequence = Sequence(timeline, match, window=widest(windows), mode=mode, logits_at=wanted)
        self.computed: list[int] = []
        self.most_held = 0

    def step(self, size: int) -> Chunk:
        chunk = self.sequence.next_chunk(size)
        placed = self.sequence.place(chunk, self.pool.allocate(chunk.pages_needed))
        rows = [Expected("me", self.state.trajectory[i], self.windows) for i in placed.indices.tolist()]
        plan = assemble([placed])
        assert chunk.entries >= sum(len(segment.pages) for segment in plan.segments)
        assert chunk.logits == len(plan.logit_rows)
        self.computed += placed.indices.tolist()
        self.check_pages()
        self.device.run(plan, rows, turns_on_read=self.mode == "on_read")
        assert self.cached.items() <= self.device.pages.items(), "a cached page was written to"
        self.most_held = max(self.most_held, self.pool.num_pages - self.pool.num_free)
        released = self.sequence.advance(chunk)
        own = np.concatenate([released.births, released.versions, released.useless])
        self.pool.free(own[own >= 0])
        self.check_pages()
        return chunk

    def check_pages(self) -> None:
        self.pool.check([self.sequence.private_pages()], [])

    def prefill(self, sizes: Iterator[int]) -> None:
        while self.sequence.remaining:
            self.step(next(sizes))

    def generate(self, token: int) -> None:
        self.sequence.append(token)
        self.state = append(self.state, token)
        self.computed.clear()
        self.step(1)
        assert self.computed == [len(self.state.trajectory) - 1]


def forever(sizes: list[int]) -> Iterator[int]:
    while True:
        yield from sizes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", MODES)
def test_every_query_reads_exactly_its_view(mode: RepositionMode, seed: int) -> None:
    """R1, C6: any chunks, windows, anything resident at any rotation, both ways to reposition; and generated tokens."""
    generator = np.random.default_rng(seed)
    for _ in range(60):
        history, windows = random_history(generator, max_operations=20, max_run=5), random_windows(generator)
        births = [query.position for query in run(None, history).queries]
        share = generator.choice([0.0, 0.3, 0.6])
        resident = {i: position for i, position in enumerate(births) if generator.random() < share}
        if mode == "copy":
            # A derived version may be all that is left of a token.
            resident = {i: int(generator.integers(position + 1)) for i, position in resident.items()}
        wanted = tuple(generator.integers(len(births), size=generator.integers(3)).tolist())
        player = Player(history, mode, windows=windows, resident=resident, wanted=wanted)
        player.prefill(forever(generator.integers(1, 13, size=4).tolist()))
        assert player.computed == sorted(closure(history, resident, {*wanted, len(births) - 1}, windows))
        for token in (5, 6, 7):
            player.generate(token)
        player.pool.free(player.sequence.private_pages())
        assert player.pool.num_free == player.pool.num_pages


@pytest.mark.parametrize("mode", MODES)
def test_one_forward_however_many_boundaries(mode: RepositionMode) -> None:
    """R2: a chunk larger than the prompt is one pass, with a segment for every epoch that computes."""
    generator = np.random.default_rng(1)
    for _ in range(40):
        history = random_history(generator, max_operations=20)
        player = Player(history, mode)
        player.step(10_000)
        assert player.sequence.remaining == 0 and player.sequence.forwards == 1
        needed = closure(history, ())
        assert num_segments(player.sequence.timeline, player.sequence.compute) == sum(
            bool(needed & {*s.queries}) for s in run(None, history).segments
        )


def held_by_definition(
    history: History, mode: RepositionMode, windows: tuple[int | None, ...], free: frozenset[int] = frozenset()
) -> int:
    """The most pages held at once when queries run one at a time: each active token's that is not `free`, and its
    turned copies in copy mode, where a copy is made for the first query that needs it and its forerunner goes after
    that query."""
    result = run(None, history)
    computed = closure(history, (), None, windows)
    moments = [[tuple(read) for read in result.queries[index].view] for index in sorted(computed)]
    moments.append([(e.index, e.position, e.position - e.birth) for e in result.state.active])
    most, copies = 0, dict[int, int]()
    for view in moments:
        active = {index for index, _, _ in view if index in computed}
        copies = {index: position for index, position in copies.items() if index in active}
        made = {i: p for i, p, shift in view if i in active and shift and copies.get(i) != p} if mode == "copy" else {}
        most = max(most, len(active - free) + len(copies) + len(made))
        copies |= made
    return most


def peak(
    history: History,
    mode: RepositionMode,
    windows: tuple[int | None, ...] = (None,),
    free: frozenset[int] = frozenset(),
) -> int:
    timeline = Timeline(history)
    used, others = np.zeros((2, timeline.count), bool)
    used[compute_set(timeline, used, np.array([timeline.count - 1]), widest(windows))] = True
    others[list(free)] = True
    return peak_pages(timeline, used, mode, others)


@pytest.mark.parametrize("mode", MODES)
def test_the_peak_is_what_a_careful_pass_holds(mode: RepositionMode) -> None:
    """A7: the pool must hold the fullest moment, and nothing more than it."""
    generator = np.random.default_rng(2)
    for _ in range(150):
        history, windows = random_history(generator, max_operations=14), random_windows(generator)
        held = held_by_definition(history, mode, windows)
        assert peak(history, mode, windows) == held <= most_pages(Timeline(history), mode), (history, windows)
        free = frozenset(np.flatnonzero(generator.random(Timeline(history).count) < 0.5).tolist())
        assert peak(history, mode, windows, free) == held_by_definition(history, mode, windows, free)


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_of_the_peak_is_enough(mode: RepositionMode) -> None:
    """A7: one query at a time gets through, and does not with a page less than it ever held."""
    generator = np.random.default_rng(3)
    for _ in range(30):
        history, windows = random_history(generator, max_operations=14), random_windows(generator)
        player = Player(history, mode, windows=windows, num_pages=peak(history, mode, windows))
        player.prefill(forever([1]))
        if player.most_held > 1:
            with pytest.raises(PageError):
                Player(history, mode, windows=windows, num_pages=player.most_held - 1).prefill(forever([1]))


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_page_goes_back_after_its_last_reader(mode: RepositionMode) -> None:
    """C4: not before the last query that reads it has run, and not later."""
    history = (Append((1, 2, 3, 4)), Drop(frozenset({0, 1})), Append((5, 6)))
    player = Player(history, mode, wanted=(3,))
    player.step(3)
    assert player.pool.num_free == 1000 - 3
    # Token 3 reads 0 and 1; the next query does not.
    player.step(1)
    assert player.pool.num_free == 1000 - 2
    player.step(2)
    assert player.pool.num_free == 1000 - 4


def test_a_copy_takes_a_page_and_leaves_its_source() -> None:
    """C2, C8: two survivors move by one; the second reposition replaces their copies."""
    history = (Append((1, 2, 3)), Drop(frozenset({0})), Reposition(), Append((4,)))
    player = Player(history, "copy", wanted=(2,))
    player.step(3)
    assert player.step(1).pages_needed == 1 + 2
    assert player.most_held == 3 + 2
    # Token 3, and the copies of tokens 1 and 2: nothing will be rotated from their births any more.
    assert player.pool.num_pages - player.pool.num_free == 1 + 2


def test_a_resident_token_computed_for_its_logits_keeps_its_page() -> None:
    """C6: its K and V are discarded, so it takes no page."""
    player = Player((Append((1, 2, 3)),), "on_read", resident={0: 0, 1: 1, 2: 2})
    assert player.step(5).pages_needed == 0
    assert player.computed == [2]


def test_what_has_not_run_is_not_offered() -> None:
    """C7: a request that is retracted after its chunk was placed has pages with nothing in them; none may be kept."""
    history = (Append((1, 2, 3)), Drop(frozenset({0})), Reposition(), Append((4,)))
    player = Player(history, "copy", wanted=(2,))
    sequence = player.sequence
    player.step(3)
    chunk = sequence.next_chunk(1)
    sequence.place(chunk, player.pool.allocate(chunk.pages_needed))
    assert (sequence.birth_pages() >= 0).tolist() == [False, True, True, False]
    assert (sequence.version_pages()[0] < 0).all()
    assert len(sequence.private_pages()) == 3 + 2
    sequence.advance(chunk)
    pages, positions = sequence.version_pages()
    assert (pages >= 0).tolist() == [False, True, True, False] and positions[1:3].tolist() == [0, 1]
