"""A real engine whose every page, read, lease and number is held against the specification (DESIGN A4, A6, C1-C7).

`WatchedEngine` stands where the device does (R6) and keeps a *ledger*: what each page of the pool holds, by the meaning
of its entry (the canonical history up to its append), written down from the plans that were run and forgotten when the
page is freed. From it follows, without a look into the tree, what is resident, what had to be computed, what was read
and whether any of it was turned. Tokens are forced, so the answers' logits are the specification's of a known history.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from akv_jax.cache.base import MatchResult
from akv_jax.cache.history import REPOSITION
from akv_jax.cache.pages import SCRATCH_PAGE
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.engine import Engine
from akv_jax.errors import Reason, RequestError
from akv_jax.planning.plan import Segment, StepPlan
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request, Sampling, Usage
from akv_jax.runtime.runner import SamplingPlan, StepResult
from akv_jax.scheduler import Schedule
from spec.model import Model
from spec.operations import Append, Drop, History, Operation, Reposition
from spec.sharing import common_prefix, steps
from spec.state import Query, State, append, apply, run
from spec.visibility import closure

#: Of float32 against the specification's float64.
TOLERANCE = 2e-4


class Oracle:
    """The specification, asked about many histories: what several of them begin with is run once."""

    def __init__(self, model: Model, most: int = 8_000) -> None:
        """Forgets everything when it knows `most` states."""
        self._model, self._most = model, most
        self._forget()

    def _forget(self) -> None:
        self._root: _Known = _Known(State())
        self._count = 0

    def logits(self, history: History) -> np.ndarray:
        """Float64 [appended, vocab]."""
        return np.array([query.logits for query in self.state(history).trajectory])

    def state(self, history: History) -> State:
        """What the history comes to."""
        if self._count > self._most:
            self._forget()
        known = self._root
        for step in steps(history):
            if step not in known.next:
                operation: Operation = Append((step,)) if isinstance(step, int) else step
                known.next[step] = _Known(apply(known.state, operation, self._model))
                self._count += 1
            known = known.next[step]
        return known.state


@dataclass(eq=False)
class _Known:
    state: State
    next: dict[int | Drop | Reposition, _Known] = field(default_factory=dict)


class Content(NamedTuple):
    """What a page holds: the K and V that `name` stands for, K rotated to the position `encoded`."""

    name: Hashable
    encoded: int


def names_of(history: History, salt: str) -> list[Hashable]:
    """By logical index, what K and V at birth follow from: tenant, and the canonical history up to the append."""
    names: list[Hashable] = []
    so_far: Hashable = salt
    for step in steps(history):
        so_far = hash((so_far, step))
        if isinstance(step, int):
            names.append(so_far)
    return names


@dataclass(eq=False)
class Asked:
    """One request as its sender sees it, and what was seen of its computation before its first output token."""

    request: Request
    #: What it will be made to sample.
    forced: tuple[int, ...]
    #: Of the history and what was sampled and computed: positions alone, and names by logical index.
    state: State
    names: list[Hashable]
    #: Sampled so far, and the logits of each.
    logits: list[np.ndarray] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    turned: set[int] = field(default_factory=set)
    forwards: int = 0
    #: Of the latest attempt: what was resident when it began, and what it has to compute.
    resident: frozenset[int] = frozenset()
    meant: frozenset[int] = frozenset()
    #: Missing tokens that the cache knew and the first attempt had to compute; None before that.
    restored: int | None = None
    sequence: object = None
    #: Of the latest attempt: pages of K and V by logical index, as matched or computed; and what its last query read.
    place: dict[int, int] = field(default_factory=dict)
    reading: list[int] | None = None
    #: What its latest step read, which it may hold until its next step has put something in its place.
    held: set[Content] = field(default_factory=set)
    #: "finished", "aborted" or "refused".
    end: str | None = None

    @property
    def history(self) -> History:
        return self.request.operations

    @property
    def salt(self) -> str:
        return self.request.cache_salt

    @property
    def whole(self) -> History:
        """The history with what was sampled and is, or is about to be, computed."""
        return (*self.history, Append(self.forced[: len(self.logits)]))

    @property
    def calculated(self) -> History:
        """The same without the last token sampled, which has no K and V yet."""
        return (*self.history, Append(self.forced[: max(0, len(self.logits) - 1)]))

    @property
    def end_operation(self) -> bool:
        """Whether the prompt ends with a drop or a reposition."""
        return not isinstance(steps(self.history)[-1], int)

    @property
    def wanted(self) -> set[int]:
        last = len(self.state.trajectory) - 1
        return {last} if self.logits else {*self.request.logits_at, last}


class WatchedEngine:
    """Call `ask`, `step` and `abort`; AssertionError says what is wrong, and `drain` that all came to an end."""

    def __init__(self, engine: Engine, oracle: Oracle | None = None) -> None:
        """Without an oracle everything is checked but logits."""
        self.oracle = oracle
        self.asked: dict[str, Asked] = {}
        self.ledger: dict[int, Content] = {}
        #: Everything that was ever computed, for the bounds on what a cache can know: by tenant.
        self.told: list[tuple[str, History]] = []
        #: Everything that was done to it has been checked; False for good after an error.
        self.sound = True
        self.watch(engine)

    def watch(self, engine: Engine) -> None:
        """Take the place of this engine's device, and see what goes by."""
        self.engine = engine
        self.mode = engine.config.reposition
        self.windows = tuple(layer.window for layer in engine.model.config.layers)
        assert None in self.windows, "the ledger expects every view to be read whole in some layer"
        self._schedule: Schedule = Schedule()
        self._jobs: dict[int, Asked] = {}
        self._inner_schedule = engine.scheduler.schedule
        self._inner_match, self._inner_free = engine.cache.match, engine.pool.free
        engine.executor = self
        engine.scheduler.schedule = self._schedule_seen  # type: ignore[method-assign]
        engine.cache.match = self._match_seen  # type: ignore[method-assign]
        engine.pool.free = self._free_seen  # type: ignore[method-assign]

    # -- what a client does ------------------------------------------------------------------------------------------

    def ask(
        self, history: History, forced: tuple[int, ...] = (0,), *, salt: str = "", logits_at: tuple[int, ...] = ()
    ) -> Asked:
        """Send a request that will sample `forced`. It may be refused, if it must be."""
        sampling = Sampling(max_tokens=len(forced), temperature=0.0, ignore_eos=True)
        name = f"r{len(self.asked)}"
        request = Request(name, history, sampling, salt, return_logits=True, logits_at=logits_at)
        asked = Asked(request, forced, run(None, history).state, names_of(history, salt))
        self.sound = False
        self.asked[name] = asked
        before = self.engine.stats()
        try:
            self.engine.submit(request)
        except RequestError as error:
            asked.end = "refused"
            assert error.reason in self._refusals(asked), f"{error.reason} without need"
            # Whoever is refused has touched nothing (A7).
            assert self.engine.stats() == before
        else:
            assert None in self._refusals(asked), "accepted, and can never run"
            job = self.engine.scheduler.waiting[-1]
            assert job.job_id == name
            self._jobs[id(job.timeline)] = asked
        self.check()
        return asked

    def abort(self, asked: Asked) -> None:
        """The client hangs up."""
        self.sound = False
        self.engine.abort(asked.request.request_id)
        asked.end = "aborted"
        if asked.computed:
            self.told.append((asked.salt, asked.calculated))
        self.check()

    def step(self) -> list[Output]:
        """One step of the engine; every output is checked."""
        self.sound = False
        outputs = self.engine.step()
        for output in outputs:
            asked = self.asked[output.request_id]
            asked.outputs.append(output)
            self._check_output(asked, output)
        self.check()
        return outputs

    @property
    def live(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if asked.end is None]

    def drain(self) -> None:
        """Run until all are served: a bound on the steps shows that nobody waits for ever."""
        work = sum(len(asked.state.trajectory) + len(asked.forced) for asked in self.live)
        left = 50 + 4 * work * (1 + len(self.live))
        while self.engine.busy:
            self.step()
            left -= 1
            assert left, "the engine does not come to an end"
        assert not self.live

    # -- what the engine does ----------------------------------------------------------------------------------------

    def _free_seen(self, pages: np.ndarray) -> None:
        self._inner_free(pages)
        for page in pages.tolist():
            self.ledger.pop(page, None)

    def _match_seen(self, timeline: Timeline, salt: str, looked_at: int | None = None) -> MatchResult:
        # Another timeline's match is nobody's admission: a look at the cache by somebody else.
        asked = self._jobs.get(id(timeline))
        cached = {self.ledger[page].name for page in self._cached()}
        match = self._inner_match(timeline, salt, looked_at)
        if asked is not None:
            assert timeline.count == len(asked.names)
            asked.resident = frozenset(i for i, name in enumerate(asked.names) if name in cached)
            shared = [common_prefix(asked.whole, other).tokens for of, other in self._computed() if of == salt]
            assert max(asked.resident, default=-1) < match.known <= max(shared, default=0)
            asked.reading = None
            asked.place = {i: page for i, page in enumerate(match.pages.tolist()) if page >= 0}
            asked.meant = closure(asked.whole, asked.resident, asked.wanted, self.windows)
            if asked.restored is None:
                asked.restored = sum(index < match.known and index not in asked.resident for index in asked.meant)
        return match

    def _computed(self) -> Iterable[tuple[str, History]]:
        running = ((asked.salt, asked.calculated) for asked in self.live if asked.computed)
        return (*self.told, *running)

    def _cached(self) -> list[int]:
        return [page for pages in self.engine.cache.cached_pages() for page in pages.tolist()]

    def _schedule_seen(self) -> Schedule:
        self._schedule = self._inner_schedule()
        for part in self._schedule.parts:
            asked = self.asked[part.job.job_id]
            if part.job.sequence is not asked.sequence:
                asked.sequence = part.job.sequence
                # C6: what is missing and needed, and nothing else.
                assert part.job.sequence is not None
                assert part.job.sequence.compute.tolist() == sorted(asked.meant)
        for job in self._schedule.exhausted:
            # Whoever was accepted gets a first token (A7); after it, the pool may be too small for one more.
            assert self.asked[job.job_id].logits and len(self.engine.scheduler.running) == 1
        return self._schedule

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """`engine.Executor`: the ledger first, then the device, then forced tokens in place of sampled ones."""
        rows: list[tuple[Asked, Query]] = []
        sampled: list[tuple[int, Asked]] = []
        looked_at = 0
        for part in self._schedule.parts:
            asked, indices = self.asked[part.job.job_id], part.placed.indices.tolist()
            rows += [(asked, asked.state.trajectory[index]) for index in indices]
            looked_at += len(part.placed.logits)
            assert part.job.sequence is not None
            if part.job.sequence.remaining == len(indices):
                sampled.append((looked_at - 1, asked))
            if not asked.logits:
                asked.forwards += 1
                asked.computed.update(indices)
            asked.held = set()
        self._write_and_move(plan, rows)
        for segment in plan.segments:
            self._read(segment, rows[segment.start : segment.stop])
        result = self.engine.runner.run(plan, sampling)
        tokens = np.array(result.tokens)
        for row, asked in sampled:
            tokens[row] = token = asked.forced[len(asked.logits)]
            asked.logits.append(result.logits(row))
            asked.state = append(asked.state, token)
            asked.names = names_of(asked.whole, asked.salt)
        return dataclasses.replace(result, tokens=tokens)

    def _write_and_move(self, plan: StepPlan, rows: Sequence[tuple[Asked, Query]]) -> None:
        assert plan.tokens.tolist() == [query.token for _, query in rows]
        assert plan.positions.tolist() == [query.position for _, query in rows]
        for page, (asked, query) in zip(plan.destinations.tolist(), rows, strict=True):
            if page != SCRATCH_PAGE:
                assert page not in self.ledger, f"page {page} is overwritten while in use"
                self.ledger[page] = Content(asked.names[query.index], query.position)
                asked.place[query.index] = page
        moves = plan.moves
        columns = [column.tolist() for column in (moves.source, moves.target, moves.shift)]
        for source, target, shift in zip(*columns, strict=True):
            assert target not in self.ledger, f"page {target} is overwritten while in use"
            content = self.ledger[source]
            self.ledger[target] = content._replace(encoded=content.encoded + shift)
        for part in self._schedule.parts:
            asked = self.asked[part.job.job_id]
            if not asked.logits:
                places = {name: index for index, name in enumerate(asked.names)}
                sources = (page for moved in part.placed.moves for page in moved.source.tolist())
                asked.turned.update(places[self.ledger[page].name] for page in sources)

    def _read(self, segment: Segment, rows: Sequence[tuple[Asked, Query]]) -> None:
        """Every query reads what the specification says, where that is now, and nothing else (L1, R1)."""
        columns = [column.tolist() for column in (segment.pages, segment.positions, segment.shifts)]
        found = []
        for page, position, shift in zip(*columns, strict=True):
            content = self.ledger[page]
            assert content.encoded + shift == position, f"page {page} is read as if at {position - shift}"
            found.append((content.name, position))
        for asked, query in rows:
            meant = [(asked.names[read.index], read.position) for read in query.view]
            assert [entry for entry in found if entry[1] <= query.position] == meant, f"query {query.index}"
            if not asked.logits:
                asked.read.update(read.index for read in query.view)
        asked, query = rows[-1]
        asked.held.update(self.ledger[page] for page in columns[0])
        # What the last token reads every later query reads, unless an operation comes between.
        last = len(asked.names) - 1
        ends = asked.end_operation and not asked.logits
        asked.reading = columns[0] if query.index == last and not ends else None
        if not asked.logits:
            view = zip(query.view, segment.shifts.tolist(), strict=True)
            asked.turned.update(read.index for read, shift in view if shift)

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check_output(self, asked: Asked, output: Output) -> None:
        assert output.error is None and asked.end is None
        sampled = len(asked.logits)
        if output.token_ids:
            assert output.token_ids == asked.forced[sampled - 1 : sampled]
        if output.token_ids and self.oracle is not None:
            before = (*asked.history, Append(asked.forced[: sampled - 1]))
            meant = self.oracle.state(before).trajectory
            close(asked.logits[-1], meant[-1].logits)
            if sampled == 1:
                close(output.next_logits, meant[-1].logits)
            if sampled == 1 and asked.request.logits_at:
                close(output.prompt_logits, np.array([meant[i].logits for i in asked.request.logits_at]))
        keeps = not self.engine.config.disable_radix_cache
        if keeps and sampled == 1 and output.finish_reason is None and self.mode == "on_read":
            # Whoever comes from now on shares what was computed, or somebody else's of the same.
            names = {self.ledger[page].name for page in self._cached()}
            assert names.issuperset(asked.names[entry.index] for entry in asked.state.active[:-1])
        if output.finish_reason is not None:
            asked.end = "finished"
            self.told.append((asked.salt, asked.calculated))
            self._check_length(asked, output)
            assert output.usage is not None
            self._check_usage(asked, output.usage)

    def _check_length(self, asked: Asked, output: Output) -> None:
        """A7: as many tokens as asked for, or as there are positions, or as a pool of its own has pages."""
        assert output.finish_reason == "length"
        room = self.engine.config.context_length - run(None, asked.history).state.n
        if len(asked.logits) < min(len(asked.forced), room):
            # Every page is in use by it: the token that came out last has none.
            held, pages = len(asked.state.active) - 1, self.engine.config.num_pages
            assert held == pages if self.mode == "on_read" else held <= pages < 3 * (held + 1)

    def _check_usage(self, asked: Asked, usage: Usage) -> None:
        """A6, by what was really computed, read and turned."""
        prompt = run(None, asked.history)
        active = {entry.index for entry in prompt.state.active}
        everything = range(len(prompt.queries))
        skipped = {i for i in everything if i not in active and i not in asked.read} - asked.computed
        repos = asked.turned - asked.computed - skipped
        cached = set(everything) - asked.computed - skipped - repos
        told = usage.computed_tokens, usage.drop_skipped_tokens, usage.repos_tokens, usage.cached_tokens
        assert told == tuple(map(len, (asked.computed, skipped, repos, cached)))
        assert usage.prompt_tokens == len(everything)
        assert usage.completion_tokens == len(asked.logits)
        assert (usage.active_tokens, usage.next_position) == (len(active), prompt.state.n)
        assert (usage.forwards, usage.restored_tokens) == (asked.forwards, asked.restored)
        assert usage.segments == sum(not asked.computed.isdisjoint(s.queries) for s in prompt.segments)

    def _refusals(self, asked: Asked) -> tuple[Reason | None, ...]:
        """A7: how the request may end where it is submitted; None is that it is accepted. Positions, then pages."""
        queries, pages = asked.state.trajectory, self.engine.config.num_pages
        if max(query.position for query in queries) + 2 > self.engine.config.context_length:
            return (Reason.CONTEXT_LENGTH_EXCEEDED,)
        used = closure(asked.history, (), asked.wanted, self.windows)
        views = [[read.index for read in queries[index].view] for index in used]
        views.append([entry.index for entry in asked.state.active])
        peak = max(sum(index in used for index in view) for view in views)
        if peak > pages:
            return (Reason.POOL_TOO_SMALL,)
        # An entry has at most a page from birth, a turned copy, and the copy that this one replaces.
        if self.mode == "copy" and 3 * peak > pages:
            return (Reason.POOL_TOO_SMALL, None)
        return (None,)

    def check(self) -> None:
        """After every step: pages (C7), leases (C4), and who is served (R6)."""
        self.engine.check()
        cached = self._cached()
        contents = [self.ledger[page] for page in cached]
        assert len(set(contents)) == len(contents), "two pages of the cache hold the same version"
        stats = self.engine.stats()
        pages = stats.pages_free, stats.pages_cached, stats.pages_leased, stats.pages_private
        assert sum(pages) == self.engine.config.num_pages
        self._check_leases(cached)
        assert stats.pages_leased == int(self._is_leased(cached).sum())
        scheduler = self.engine.scheduler
        waiting, running = [job.arrival for job in scheduler.waiting], [job.arrival for job in scheduler.running]
        assert waiting == sorted(waiting) and max(running, default=-1) < min(waiting, default=1 << 60)
        self.sound = True

    def _is_leased(self, pages: list[int]) -> np.ndarray:
        cache = self.engine.cache
        pages_ = np.array(pages, np.int32)
        return cache.is_leased(pages_) if isinstance(cache, RadixCache) else np.zeros(len(pages), bool)

    def _check_leases(self, cached: list[int]) -> None:
        """C4: leased are pages that some later query of a running request may read, and no others."""
        leased = {page for page, held in zip(cached, self._is_leased(cached).tolist(), strict=True) if held}
        there, meant, read_next = set(cached), set[int](), set[int]()
        coming: set[Content] = set()
        for job in self.engine.scheduler.running:
            asked, sequence, timeline = self.asked[job.job_id], job.sequence, job.timeline
            assert sequence is not None
            epoch = timeline.num_epochs - 1
            if sequence.remaining:
                epoch = timeline.epoch_of(int(sequence.compute[sequence.cursor]))
            lasting = np.flatnonzero(timeline.dropped[: timeline.count] > epoch).tolist()
            meant.update(asked.place.get(index, -1) for index in lasting)
            if self.mode == "copy":
                coming.update(asked.held)
                coming.update(self._coming(asked, sequence.compute[sequence.cursor :].tolist()))
            if asked.logits and asked.reading is not None:
                read_next.update(asked.reading)
        assert read_next & there <= leased, "a page that is read in every step may be evicted"
        if self.mode == "on_read":
            assert leased == meant & there
        else:
            # Besides what was matched or computed, from which copies are made: versions just where they will be read.
            assert {page for page in leased - meant if self.ledger[page] not in coming} == set()

    def _coming(self, asked: Asked, queries: list[int]) -> Iterable[Content]:
        """What these queries, and those of tokens still to be sampled, read."""
        for index in queries:
            yield from (Content(asked.names[r.index], r.position) for r in asked.state.trajectory[index].view)
        yield from (Content(asked.names[entry.index], entry.position) for entry in asked.state.active)

    def check_tree(self) -> None:
        """C1, C2: the path that leads to a page says what the page holds."""
        cache = self.engine.cache
        assert isinstance(cache, RadixCache)
        assert walk(cache) == {page: self.ledger[page] for page in self._cached()}

    # -- from one run to the next ------------------------------------------------------------------------------------

    def restart(self, folder: Path, fresh: Engine) -> None:
        """Stop, store what is cached, and go on with `fresh`, whose device has nothing of before (issue 4, item 8).

        Raises AssertionError if anything that the new pool has room for is lost.
        """
        for asked in self.live:
            self.abort(asked)
        before = Counter(self.ledger[page] for page in self._cached())
        saved = self.engine.save_cache(folder)
        assert saved == before.total()
        pages = np.arange(1, fresh.runner.config.num_pages + 1, dtype=np.int32)
        kept = [(name, np.full_like(rows, 100.0)) for name, rows in fresh.runner.read_pages(pages)]
        fresh.runner.write_pages(pages, kept)
        loaded = fresh.load_cache(folder)
        assert isinstance(fresh.cache, RadixCache)
        self.ledger = walk(fresh.cache)
        assert len(self.ledger) == loaded
        after = Counter(self.ledger.values())
        assert after <= before
        if fresh.config.num_pages >= saved and fresh.config.reposition == self.mode:
            assert after == before
        self.watch(fresh)
        self.check()


def walk(cache: RadixCache) -> dict[int, Content]:
    """What every cached page must hold, by the paths of the tree alone."""
    contents: dict[int, Content] = {}
    for salt, root in cache.roots().items():
        # A node, the name of the path to it, its tokens' number, which of them are active, and the next position.
        stack: list[tuple[Any, Hashable, int, frozenset[int], int]] = [(root, salt, 0, frozenset(), 0)]
        while stack:
            node, name, count, active, n = stack.pop()
            if node.dropped is not None:
                gone = frozenset(node.dropped.tolist())
                assert gone and gone <= active, "a drop names what it newly deactivates"
                active, name = active - gone, hash((name, Drop(gone)))
            elif node.edge == REPOSITION:
                assert n != len(active), "a reposition that does nothing is none"
                n, name = len(active), hash((name, Reposition()))
            active = active | frozenset(range(count, count + len(node.tokens)))
            for offset, token in enumerate(node.tokens.tolist()):
                name = hash((name, token))
                for shift, pages in node.versions.items():
                    if pages[offset] >= 0:
                        assert int(pages[offset]) not in contents
                        contents[int(pages[offset])] = Content(name, n + offset + shift)
            below = count + len(node.tokens), active, n + len(node.tokens)
            stack += [(child, name, *below) for child in node.children.values()]
    return contents


def close(actual: Any, expected: Any) -> None:
    """Logits: float32 against the specification's."""
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)
