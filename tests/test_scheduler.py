"""The scheduler on a symbolic device: random traffic, tiny pools, aborts, both ways to reposition (DESIGN R6, C7, A10).

The device refuses any query that does not read exactly what `spec/` says (see `planning/symbolic.py`), so what is
checked here is that no page is freed, lent or turned too early, that the books balance after every step, and that
everybody gets through in fair time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from akv_jax.cache.naive import NaiveCache
from akv_jax.config import EngineConfig, RepositionMode
from akv_jax.errors import Reason, RequestError
from akv_jax.planning.planner import assemble
from akv_jax.planning.visibility import Timeline
from akv_jax.scheduler import Job, Schedule, Scheduler
from spec.operations import Append, Drop, History, Reposition
from spec.state import State, append, run
from spec.visibility import closure
from tests.planning.symbolic import Expected, ForgetfulPool, SymbolicDevice
from tests.random_histories import random_history

MODES: tuple[RepositionMode, ...] = ("on_read", "copy")


@dataclass
class Client:
    """One request as its sender sees it."""

    job: Job
    history: History
    outputs: int
    logits_at: tuple[int, ...]
    state: State
    generated: list[int] = field(default_factory=list)
    #: Steps at which it was served, and its chunk in each.
    served: list[tuple[int, int]] = field(default_factory=list)
    sequence: object = None
    #: "finished", "exhausted" or "aborted".
    end: str | None = None


class Simulation:
    """Does what the engine does around the scheduler, on symbols."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), list_capacity: int = 1 << 20, **config: int | str):
        sizes = {"context_length": 200, "num_pages": 1000, "max_running_requests": 8, "chunked_prefill_size": 16}
        self.config = EngineConfig(**{**sizes, **config})  # type: ignore[arg-type]
        self.windows, self.list_capacity = windows, list_capacity
        self.device = SymbolicDevice()
        self.pool = ForgetfulPool(self.config.num_pages, self.device)
        window = None if None in windows else max(w for w in windows if w is not None)
        self.scheduler = Scheduler(
            self.config,
            self.pool,
            NaiveCache(),
            window=window,
            list_capacity=list_capacity,
            logit_rows=self.config.max_running_requests,
        )
        self.clients: dict[str, Client] = {}
        self.steps = 0

    @property
    def live(self) -> list[Client]:
        return [client for client in self.clients.values() if client.end is None]

    def submit(self, history: History, outputs: int = 1, logits_at: tuple[int, ...] = ()) -> Client:
        name = f"request {len(self.clients)}"
        job = self.scheduler.submit(name, Timeline(history), "", logits_at)
        client = Client(job, history, outputs, logits_at, run(None, history).state)
        self.clients[name] = client
        return client

    def finish(self, client: Client, end: str) -> None:
        self.scheduler.finish(client.job)
        client.end = end

    def step(self) -> Schedule:
        """One step, and every check there is."""
        self.steps += 1
        schedule = self.scheduler.schedule()
        self.check_queue()
        self.check_pages()
        for job in schedule.exhausted:
            # Whoever was accepted gets a first token (A7); after it the pool may be too small for one more.
            client = self.clients[job.job_id]
            assert client.generated and len(self.scheduler.running) == 1
            self.finish(client, "exhausted")
        assert schedule.parts or schedule.exhausted or not self.live, "nobody can go on"
        if schedule.parts:
            self.run(schedule)
        return schedule

    def run(self, schedule: Schedule) -> None:
        plan = assemble([part.placed for part in schedule.parts])
        rows, wanted = [], []
        for part in schedule.parts:
            client = self.clients[part.job.job_id]
            self.check_closure(client)
            indices = part.placed.indices.tolist()
            queries = client.state.trajectory
            count = len(queries)
            asked = {count - 1} if client.generated else {*client.logits_at, count - 1}
            wanted += [len(rows) + offset for offset, index in enumerate(indices) if index in asked]
            rows += [Expected(part.job.job_id, queries[index], self.windows) for index in indices]
            client.served.append((self.steps, len(indices)))
        assert plan.logit_rows.tolist() == wanted
        assert len(wanted) <= self.config.max_running_requests
        assert sum(len(segment.pages) for segment in plan.segments) <= self.list_capacity
        assert len(rows) <= max(self.config.chunked_prefill_size, len(schedule.parts))
        assert len({part.job.job_id for part in schedule.parts}) == len(schedule.parts)
        self.device.run(plan, rows, turns_on_read=self.config.reposition == "on_read")
        self.scheduler.advance(schedule)
        self.check_pages()
        for part in schedule.parts:
            self.sample(self.clients[part.job.job_id])

    def sample(self, client: Client) -> None:
        sequence = client.job.sequence
        assert sequence is not None
        if sequence.remaining:
            return
        client.job.decoding = True
        token = len(client.generated) % 64
        client.generated.append(token)
        if len(client.generated) == client.outputs:
            self.finish(client, "finished")
        else:
            sequence.append(token)
            client.state = append(client.state, token)

    def drain(self) -> None:
        """Run until everybody is served; a bound on the steps shows that it ends."""
        work = sum(len(client.state.trajectory) + client.outputs for client in self.live)
        limit = self.steps + 100 + 4 * work * (1 + len(self.live))
        while self.live:
            self.step()
            assert self.steps < limit, "the queue does not get shorter"
        assert self.pool.num_free == self.pool.num_pages and not self.device.pages

    def check_queue(self) -> None:
        """First come, first served: nobody runs who came after somebody that waits."""
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert [job.arrival for job in waiting] == sorted(job.arrival for job in waiting)
        assert not running or not waiting or max(j.arrival for j in running) < waiting[0].arrival
        assert len(running) <= self.config.max_running_requests

    def check_pages(self) -> None:
        """C7, and nothing stays behind that no request has."""
        private = [job.sequence.private_pages() for job in self.scheduler.running if job.sequence is not None]
        self.pool.check(private, [])

    def check_closure(self, client: Client) -> None:
        """C6, each time a job is admitted: it computes what the specification says and nothing else."""
        sequence = client.job.sequence
        if sequence is client.sequence:
            return
        client.sequence = sequence
        assert sequence is not None
        history = (*client.history, Append(tuple(client.generated)))
        last = len(client.state.trajectory) - 1
        wanted = {last} if client.generated else {*client.logits_at, last}
        assert sequence.compute.tolist() == sorted(closure(history, (), wanted, self.windows))


def random_simulation(generator: np.random.Generator, mode: RepositionMode) -> Simulation:
    windows = [(None,), (None, 3), (2,), (5, 1)][generator.integers(4)]
    return Simulation(
        windows,
        reposition=mode,
        num_pages=int(generator.integers(20, 90)),
        max_running_requests=int(generator.integers(1, 7)),
        chunked_prefill_size=int(generator.choice([1, 3, 8, 32, 200])),
    )


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 500))])
@pytest.mark.parametrize("mode", MODES)
def test_random_traffic(mode: RepositionMode, seed: int) -> None:
    """C7, C6, C4, R1: whatever comes, every query reads its view, the books balance and everybody is served."""
    generator = np.random.default_rng(seed)
    simulation = random_simulation(generator, mode)
    for _ in range(250):
        if generator.random() < 0.12:
            history = random_history(generator)
            count = len(run(None, history).queries)
            wanted = tuple(generator.integers(count, size=int(generator.integers(3))).tolist())
            try:
                simulation.submit(history, int(generator.choice([1, 2, 5, 30])), wanted)
            except RequestError as error:
                assert error.reason is Reason.POOL_TOO_SMALL
        if simulation.live and generator.random() < 0.02:
            simulation.finish(simulation.live[int(generator.integers(len(simulation.live)))], "aborted")
        simulation.step()
    simulation.drain()
    assert {client.end for client in simulation.clients.values()} <= {"finished", "exhausted", "aborted"}
    for client in simulation.clients.values():
        assert client.end != "finished" or len(client.generated) == client.outputs


def test_the_traffic_above_does_retract_and_exhaust() -> None:
    """The random traffic meets what it is meant to meet."""
    retracted, ends = 0, list[str | None]()
    for seed in range(5):
        generator = np.random.default_rng(seed)
        simulation = Simulation(num_pages=30, chunked_prefill_size=8, reposition="on_read")
        for _ in range(8):
            history = random_history(generator, max_operations=5)
            if len(run(None, history).queries) < 25:
                simulation.submit(history, 20)
        simulation.drain()
        retracted += simulation.scheduler.preemptions
        ends += [client.end for client in simulation.clients.values()]
    assert retracted > 5
    assert "exhausted" in ends and "finished" in ends


@pytest.mark.parametrize("chunk", [4, 16])
def test_a_short_request_waits_for_chunks_not_for_a_prompt(chunk: int) -> None:
    """A10: its first token is there after two steps of a prompt that takes twenty."""
    simulation = Simulation(chunked_prefill_size=chunk)
    long = simulation.submit((Append((1,) * chunk * 20),))
    simulation.step()
    short = simulation.submit((Append((2,) * chunk),))
    simulation.step()
    simulation.step()
    assert short.end == "finished" and long.end is None
    simulation.drain()


def test_a_stream_of_short_requests_does_not_starve_a_long_one() -> None:
    """A10: prompts take turns, even where more comes than can be served."""
    simulation = Simulation(chunked_prefill_size=8, max_running_requests=4)
    long = simulation.submit((Append((1,) * 80),))
    while long.end is None and simulation.steps < 100:
        simulation.submit((Append((2,) * 8),))
        simulation.step()
    assert long.end == "finished"
    assert simulation.steps <= 10 * 4
    simulation.drain()


def test_decoding_goes_on_beside_a_long_prompt() -> None:
    """A10: a token in every step."""
    simulation = Simulation(chunked_prefill_size=8)
    talker = simulation.submit((Append((1, 2)),), outputs=12)
    simulation.step()
    simulation.submit((Append((1,) * 100),))
    for _ in range(11):
        simulation.step()
    assert talker.end == "finished" and len(talker.served) == 12
    simulation.drain()


def test_a_chunk_goes_to_several_prompts() -> None:
    """R2: what the first prompt leaves of a step, the next one gets."""
    simulation = Simulation(chunked_prefill_size=10)
    one, other = simulation.submit((Append((1,) * 7),)), simulation.submit((Append((1,) * 7),))
    simulation.step()
    assert (one.served, other.served) == ([(1, 7)], [(1, 3)])
    simulation.drain()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 7, 30, 1000])
def test_as_few_steps_as_chunks(mode: RepositionMode, chunk: int) -> None:
    """C6: ceil(computed / chunk) forwards, however many boundaries."""
    generator = np.random.default_rng(5)
    for _ in range(10):
        history = random_history(generator, max_operations=20)
        simulation = Simulation(chunked_prefill_size=chunk, reposition=mode)
        simulation.submit(history)
        simulation.drain()
        assert simulation.steps == -(-len(closure(history, ())) // chunk)


def agent(turns: int, length: int, *, reposition: bool) -> History:
    """Each turn drops the one before the last, and moves the rest together."""
    history: list[Append | Drop | Reposition] = []
    for turn in range(turns):
        history.append(Append(tuple((turn + i) % 64 for i in range(length))))
        if turn >= 1:
            history.append(Drop(frozenset(range((turn - 1) * length, turn * length))))
            history += [Reposition()] * reposition
    return tuple(history)


@pytest.mark.parametrize(("mode", "pages"), [("on_read", 40), ("copy", 60)])
def test_a_long_run_with_a_small_active_set_fits_a_small_pool(mode: RepositionMode, pages: int) -> None:
    """A7: passes are split at boundaries, and dropped pages freed as their last reader finishes."""
    history = agent(40, 20, reposition=True)
    simulation = Simulation(num_pages=pages, reposition=mode, chunked_prefill_size=256)
    client = simulation.submit(history, logits_at=tuple(range(800)))
    simulation.drain()
    assert client.end == "finished" and simulation.scheduler.preemptions == 0
    with pytest.raises(RequestError) as caught:
        Simulation(num_pages=pages - 1, reposition=mode).submit(history, logits_at=tuple(range(800)))
    assert caught.value.reason is Reason.POOL_TOO_SMALL


def test_more_logits_than_rows_take_more_steps() -> None:
    """Every token's logits of everybody, with fewer rows than tokens."""
    simulation = Simulation(chunked_prefill_size=64, max_running_requests=5)
    for _ in range(5):
        simulation.submit((Append((1,) * 9),), 3, tuple(range(9)))
    simulation.drain()
    assert {client.end for client in simulation.clients.values()} == {"finished"}


def test_page_lists_longer_than_a_step_carries_wait() -> None:
    """R3: the sum of page lists is limited; nobody is retracted for it."""
    simulation = Simulation(list_capacity=60, chunked_prefill_size=40, max_running_requests=4)
    for _ in range(4):
        simulation.submit(agent(4, 10, reposition=True), 10)
    simulation.drain()
    assert simulation.scheduler.preemptions == 0


def test_a_full_queue_refuses() -> None:
    """A7's kin: QUEUE_FULL, and accepted requests are served."""
    simulation = Simulation(max_queued_requests=3)
    for _ in range(3):
        simulation.submit((Append((1, 2)),))
    with pytest.raises(RequestError) as caught:
        simulation.submit((Append((1, 2)),))
    assert caught.value.reason is Reason.QUEUE_FULL
    simulation.drain()


def test_a_retracted_request_keeps_its_place() -> None:
    """The newest gives way, and comes back before anybody who came later."""
    simulation = Simulation(num_pages=24, chunked_prefill_size=8)
    clients = [simulation.submit((Append((1,) * 8),), 14) for _ in range(4)]
    finished: list[Client] = []
    while simulation.live:
        simulation.step()
        finished += [c for c in clients if c.end and c not in finished]
    assert simulation.scheduler.preemptions > 0
    assert finished == clients


def test_a_retracted_request_waits_for_what_it_needs_by_now() -> None:
    """R6: what it has said since it was first looked at needs pages too."""
    simulation = Simulation(num_pages=40, chunked_prefill_size=32)
    scheduler = simulation.scheduler
    grown = simulation.submit((Append((1,) * 20),), 15).job
    assert not grown.demand.fits(19, scheduler.cache, "") and grown.demand.fits(20, scheduler.cache, "")
    for token in range(10):
        grown.timeline.append(token)
    grown.decoding = True
    scheduler.waiting.remove(grown)
    scheduler.requeue(grown)
    assert not grown.demand.fits(29, scheduler.cache, "") and grown.demand.fits(30, scheduler.cache, "")
