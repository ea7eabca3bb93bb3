"""Runs an engine in a thread of its own and gives asyncio callers a stream of outputs for each request."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog

from akv_jax.cache.inspection import TreeView
from akv_jax.config import EngineConfig
from akv_jax.engine import ServingEngine
from akv_jax.errors import Reason, RequestError
from akv_jax.models.load import LoadedModel
from akv_jax.request import Output, Request
from akv_jax.runtime.placement import Placement
from akv_jax.runtime.runner import Progress
from akv_jax.stats import EngineStats
from akv_jax.works import compile_history

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class _Subscriber:
    """Hands outputs from the engine's thread to one asyncio task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.outputs: asyncio.Queue[Output] = asyncio.Queue()

    def send(self, output: Output) -> None:
        # The client's loop may be gone, and the client with it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.outputs.put_nowait, output)


@dataclass(frozen=True, slots=True)
class _Call:
    """Something to do in the engine's thread, between two steps."""

    function: Callable[[ServingEngine], Any]
    future: Future[Any]

    def run(self, engine: ServingEngine) -> None:
        if not self.future.set_running_or_notify_cancel():
            # The caller has gone away meanwhile.
            return
        try:
            self.future.set_result(self.function(engine))
        except BaseException as error:
            self.future.set_exception(error)

    def refuse(self, error: Exception) -> None:
        # Two threads may refuse the same call.
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


class AsyncEngine:
    """Everything the engine does happens in one thread, between two steps or in one."""

    def __init__(
        self,
        make_engine: Callable[[], ServingEngine],
        progress: Progress = lambda *_: None,
        finish: Callable[[ServingEngine], None] = lambda _: None,
    ) -> None:
        """`make_engine` is called in the engine's thread, so that loading does not hold up the server's start, and so
        is `finish`, after a clean stop and when nobody waits for an answer any more."""
        self._make_engine, self._progress, self._finish = make_engine, progress, finish
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._subscribers: dict[str, _Subscriber] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._engine: ServingEngine | None = None
        self._loaded, self._failed = threading.Event(), threading.Event()
        self._draining = self._finishing = False
        #: True once warm-up is over, until `stop`.
        self.ready = False
        self._ended: RequestError | None = None
        #: Why the engine could not start, or died.
        self.failure: BaseException | None = None

    @property
    def model(self) -> LoadedModel:
        return self._require().model

    @property
    def config(self) -> EngineConfig:
        return self._require().config

    @property
    def placements(self) -> tuple[Placement, ...]:
        """See `ServingEngine.placements`."""
        return self._require().placements

    def start(self) -> None:
        """Load, warm up and run, in the background."""
        self._thread.start()

    def wait_ready(self) -> None:
        """Block until warm-up is over; raises what went wrong if it did."""
        self._loaded.wait()
        if self.failure is not None:
            raise self.failure

    def fail(self, error: BaseException) -> None:
        """It cannot go on, as somebody else has found out; its own thread may be waiting for ever."""
        if self.failure is None:
            self.failure = error
        self.ready = False
        self._leave_nobody_waiting()
        self._loaded.set()
        self._failed.set()

    def wait_failed(self) -> None:
        """Block until it has failed, which may never be."""
        self._failed.wait()

    def stop(self, drain_seconds: float = 0.0) -> None:
        """Refuse new requests, let running ones go on for that long, then end the thread."""
        self._draining = True
        waiting = threading.Event()
        for _ in range(int(drain_seconds * 20)):
            if not self._subscribers or not self._thread.is_alive():
                break
            waiting.wait(0.05)
        self.ready = False
        self._calls.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def wait_finished(self) -> None:
        """Block until a clean stop is over, however long `finish` takes; give up on a thread that does not stop."""
        self._thread.join(timeout=30)
        if self._finishing:
            self._thread.join()
        elif self._thread.is_alive():
            _log.error("the engine does not stop: what it has cached is not stored")

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Outputs of one request as they come; closing the iterator aborts it. RequestError if it is refused."""
        if self._draining:
            raise RequestError(Reason.SHUTTING_DOWN, "the server is shutting down")
        if request.request_id in self._subscribers:
            raise ValueError(f"request id {request.request_id!r} is in use")
        subscriber = _Subscriber()
        self._subscribers[request.request_id] = subscriber
        try:
            # A long history takes milliseconds, and an absurd one seconds: not between two steps of others.
            timeline = await asyncio.to_thread(compile_history, request, self.model.config)
            await self._call(lambda engine: engine.submit(request, timeline))
            while True:
                output = await subscriber.outputs.get()
                if output.error is not None:
                    raise output.error
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            self._subscribers.pop(request.request_id, None)
            self._calls.put(_Call(lambda engine: engine.abort(request.request_id), Future()))

    async def stats(self) -> EngineStats:
        """A snapshot between two steps."""
        return await self._call(lambda engine: engine.stats())

    async def flush_cache(self) -> int:
        """Free every unleased page; returns how many."""
        return await self._call(lambda engine: engine.flush_cache())

    async def cache_tree(self, max_nodes: int, max_depth: int) -> TreeView:
        """What the cache holds, between two steps; see `ServingEngine.cache_tree`."""
        return await self._call(lambda engine: engine.cache_tree(max_nodes, max_depth))

    async def check(self) -> None:
        """See `ServingEngine.check`."""
        await self._call(lambda engine: engine.check())

    def _require(self) -> ServingEngine:
        if self._engine is None:
            raise RequestError(Reason.SHUTTING_DOWN, "the model is still loading")
        return self._engine

    async def _call(self, function: Callable[[ServingEngine], T]) -> T:
        """Run `function` in the engine's thread and wait for what it returns or raises."""
        call = _Call(function, Future())
        self._calls.put(call)
        if self._ended is not None:
            # The thread may have looked at the queue for the last time before this call was in it.
            call.refuse(self._ended)
        return await asyncio.wrap_future(call.future)

    def _run(self) -> None:
        try:
            self._engine = self._make_engine()
            self._engine.warm_up(self._progress)
            if self.failure is not None:
                raise self.failure
            self.ready = True
            self._loaded.set()
            self._serve(self._engine)
            self._finishing = self.failure is None
        except BaseException as error:
            if self.failure is None:
                self.failure = error
                if self._loaded.is_set():
                    # A failure to start is for whoever waits in `wait_ready` to explain.
                    _log.exception("engine failed")
        finally:
            self.ready = False
            self._loaded.set()
            self._leave_nobody_waiting()
            if self.failure is not None:
                self._failed.set()
        if self._finishing:
            self._end(self._require())

    def _end(self, engine: ServingEngine) -> None:
        """A clean stop: what was computed for requests that are cut off is worth keeping too."""
        try:
            engine.abort_all()
            self._finish(engine)
        except BaseException:
            _log.exception("the engine has stopped, but not finished")

    def _serve(self, engine: ServingEngine) -> None:
        while True:
            # Sleep only when there is nothing to compute.
            while not engine.busy or not self._calls.empty():
                call = self._calls.get()
                if call is None:
                    return
                call.run(engine)
            for output in engine.step():
                subscriber = self._subscribers.get(output.request_id)
                if subscriber is not None:
                    subscriber.send(output)

    def _leave_nobody_waiting(self) -> None:
        """The thread ends: every open stream and every pending call gets an answer."""
        message = "the engine has stopped after an internal error" if self.failure else "the server is shutting down"
        lost = RequestError(Reason.SHUTTING_DOWN, message)
        self._ended = lost
        for request_id, subscriber in list(self._subscribers.items()):
            subscriber.send(Output(request_id, error=lost))
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get_nowait()
                if call is not None:
                    call.refuse(lost)
