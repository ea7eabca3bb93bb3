"""The engine in its thread: several callers, callers that go away, failures, and the end (DESIGN §5, C7)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import structlog

from akv_jax.async_engine import AsyncEngine
from akv_jax.engine import Engine
from akv_jax.errors import Reason, RequestError
from akv_jax.planning.plan import StepPlan
from akv_jax.request import Output, Request, Sampling
from akv_jax.runtime.runner import SamplingPlan, StepResult
from spec.operations import Append
from tests.shared_engines import PAGES, shared
from tests.tiny_engine import generated, run

T = TypeVar("T")
#: Seconds after which something that should have happened is taken to hang.
PATIENCE = 60


def request(name: str, max_tokens: int = 5, length: int = 6) -> Request:
    return Request(name, (Append(tuple(range(length))),), Sampling(max_tokens=max_tokens, temperature=1.0, seed=4))


@contextlib.contextmanager
def started(make_engine: Callable[[], Engine] | None = None) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(make_engine or shared().engine)
    engine.start()
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


def play(scene: Coroutine[Any, Any, T]) -> T:
    """Run to the end, or fail."""

    async def patiently() -> T:
        return await asyncio.wait_for(scene, PATIENCE)

    return asyncio.run(patiently())


async def all_of(engine: AsyncEngine, one: Request) -> list[Output]:
    return [output async for output in engine.generate(one)]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.005)


async def refused(work: Awaitable[Any]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await work
    return caught.value


class Stumbling:
    """An executor that fails at its n-th step."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._executor, self._left = engine.executor, steps

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("the device is lost")
        return self._executor.run(plan, sampling)


def stumbling(steps: int) -> Callable[[], Engine]:
    def make() -> Engine:
        engine = shared().engine()
        engine.executor = Stumbling(engine, steps)
        return engine

    return make


def test_concurrent_callers_get_what_they_would_alone() -> None:
    """A4: interleaved as they may be."""
    requests = [request("one", 20), request("two", 9, length=40), request("three", 1)]

    async def scene(engine: AsyncEngine) -> list[list[Output]]:
        return await asyncio.gather(*(all_of(engine, one) for one in requests))

    with started() as engine:
        outputs = play(scene(engine))
    for one, mine in zip(requests, outputs, strict=True):
        alone = run(shared().engine(), [one])[one.request_id]
        assert generated(mine) == generated(alone)
        assert [output.finish_reason for output in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].usage is not None


def test_closing_the_iterator_aborts() -> None:
    """C7: the pages are back, and others go on."""

    async def scene(engine: AsyncEngine) -> None:
        left, stays = engine.generate(request("left", 100)), engine.generate(request("stays", 100))
        await anext(left)
        await anext(stays)
        assert (await engine.stats()).num_running == 2
        await left.aclose()
        stats = await engine.stats()
        assert (stats.num_running, stats.requests_aborted_total) == (1, 1)
        await engine.check()
        assert len([output async for output in stays]) == 99
        stats = await engine.stats()
        assert (stats.num_running, stats.requests_aborted_total, stats.pages_free) == (0, 1, PAGES)

    with started() as engine:
        play(scene(engine))


def test_a_caller_cancelled_at_any_moment() -> None:
    """C7: in the middle of submitting as well; the engine lives on."""

    async def scene(engine: AsyncEngine) -> None:
        for moment in range(25):
            task = asyncio.ensure_future(all_of(engine, request(f"r{moment}", 100)))
            for _ in range(moment % 5):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001 * (moment // 5))
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_free) == (0, 0, PAGES)
        assert len(await all_of(engine, request("after", 3))) == 3

    with started() as engine:
        play(scene(engine))


def test_a_refusal_is_the_callers_alone() -> None:
    """A3: and the request's name is free again."""

    async def scene(engine: AsyncEngine) -> None:
        error = await refused(all_of(engine, Request("same", (Append((1, 999)),))))
        assert (error.reason, error.param) == (Reason.INVALID_REQUEST, "operations")
        assert len(await all_of(engine, request("same", 2))) == 2

    with started() as engine:
        play(scene(engine))


def test_a_flush_leaves_running_requests_alone() -> None:
    """A8: nothing is cached here, so nothing is freed."""

    async def scene(engine: AsyncEngine) -> None:
        stream = engine.generate(request("r", 30))
        await anext(stream)
        assert await engine.flush_cache() == 0
        assert len([output async for output in stream]) == 29

    with started() as engine:
        play(scene(engine))


def test_a_failure_reaches_everybody_who_waits() -> None:
    """An error, never a hang: those in the middle, those who come later, and whoever asks for numbers."""

    async def scene(engine: AsyncEngine) -> None:
        waiting = [asyncio.ensure_future(all_of(engine, request(name, 1000))) for name in ("one", "two")]
        for task in waiting:
            assert (await refused(task)).reason is Reason.SHUTTING_DOWN
        assert (await refused(all_of(engine, request("late")))).status == 503
        assert (await refused(engine.stats())).reason is Reason.SHUTTING_DOWN
        assert not engine.ready
        assert isinstance(engine.failure, RuntimeError) and "device is lost" in str(engine.failure)

    with started(stumbling(5)) as engine:
        play(scene(engine))


def test_a_failure_to_start_is_told() -> None:
    def make() -> Engine:
        raise OSError("no such model")

    engine = AsyncEngine(make)
    engine.start()
    with pytest.raises(OSError, match="no such model"):
        engine.wait_ready()
    assert not engine.ready
    assert play(refused(all_of(engine, request("r")))).reason is Reason.SHUTTING_DOWN
    engine.stop()


def test_a_clean_stop_is_finished_when_nobody_waits_any_more() -> None:
    """What a request that is cut off has computed is cached by then, and nobody leases it (C4)."""
    seen: list[tuple[int, bool]] = []
    cut: list[bool] = []

    def finish(engine: Engine) -> None:
        time.sleep(0.3)
        engine.check()
        stats = engine.stats()
        assert (stats.num_running, stats.pages_leased, stats.pages_private) == (0, 0, 0)
        seen.append((stats.pages_cached, bool(cut)))

    async def scene(engine: AsyncEngine) -> None:
        stream = engine.generate(request("r", 1000, length=40))
        await anext(stream)
        stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop))
        with contextlib.suppress(RequestError):
            async for _ in stream:
                pass
        cut.append(True)
        await stopping

    engine = AsyncEngine(lambda: shared().engine(disable_radix_cache=False), finish=finish)
    engine.start()
    engine.wait_ready()
    play(scene(engine))
    engine.wait_finished()
    ((cached, answered),) = seen
    assert cached >= 40 and answered


def test_a_failed_engine_is_not_finished() -> None:
    """Its state is not to be trusted; and what goes wrong in finishing a good one holds nobody up."""

    def finish(engine: Engine) -> None:
        raise ValueError(f"called with {engine}")

    engine = AsyncEngine(stumbling(0), finish=lambda _: pytest.fail("finished after a failure"))
    engine.start()
    engine.wait_ready()
    play(refused(all_of(engine, request("r"))))
    engine.wait_finished()
    assert isinstance(engine.failure, RuntimeError)
    engine = AsyncEngine(shared().engine, finish=finish)
    engine.start()
    engine.wait_ready()
    with structlog.testing.capture_logs() as logs:
        engine.stop()
        engine.wait_finished()
    assert engine.failure is None and [entry["log_level"] for entry in logs] == ["error"]


def test_before_it_is_ready() -> None:
    """Whoever comes early is refused what needs the model, and nothing hangs at the end."""
    engine = AsyncEngine(shared().engine)
    assert not engine.ready
    with pytest.raises(RequestError, match="still loading"):
        _ = engine.config
    engine.start()
    engine.wait_ready()
    assert engine.ready and engine.config.num_pages == PAGES and engine.model.config.vocab_size == 64
    engine.stop()
    assert not engine.ready


def test_stop_lets_running_requests_end() -> None:
    """SIGTERM drains: no new ones, the old ones to their last token."""

    async def scene(engine: AsyncEngine) -> None:
        stream = engine.generate(request("r", 60))
        outputs = [await anext(stream)]
        stopping = asyncio.ensure_future(asyncio.to_thread(engine.stop, PATIENCE))
        await until(lambda: _true_when(engine, "late"))
        outputs += [output async for output in stream]
        assert len(outputs) == 60 and outputs[-1].finish_reason == "length"
        await stopping
        assert not engine.ready

    with started() as engine:
        play(scene(engine))


async def _true_when(engine: AsyncEngine, name: str) -> bool:
    """Whether new requests are refused by now."""
    try:
        await all_of(engine, request(name, 1))
    except RequestError as error:
        assert error.reason is Reason.SHUTTING_DOWN
        return True
    return False


def test_stop_without_patience_ends_open_streams_with_an_error() -> None:
    async def scene(engine: AsyncEngine) -> None:
        stream = engine.generate(request("r", 100))
        await anext(stream)
        await asyncio.to_thread(engine.stop, 0)

        async def rest() -> list[Output]:
            return [output async for output in stream]

        error = await refused(rest())
        assert error.reason is Reason.SHUTTING_DOWN

    with started() as engine:
        play(scene(engine))


def test_after_stop_everything_is_refused() -> None:
    with started() as engine:
        engine.stop()
        assert play(refused(all_of(engine, request("r")))).reason is Reason.SHUTTING_DOWN
        assert play(refused(engine.stats())).reason is Reason.SHUTTING_DOWN
        assert play(refused(engine.check())).reason is Reason.SHUTTING_DOWN
