"""Copies pages from one pool to another, device to device, while both go on with their steps (DESIGN R5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from akv_jax.cache.pages import SCRATCH_PAGE
from akv_jax.runtime.lanes import Lanes


class PageCopier(Protocol):
    """The part of a runner that copies pages; blocks are arrays on a device, of one size."""

    def copy_out(self, pages: np.ndarray) -> list[Any]:
        """What these pages hold, int32 [pages], as blocks beside this runner's pool."""
        ...

    def bring(self, blocks: list[Any]) -> list[Any]:
        """Another runner's blocks on this one's devices, once they are there."""
        ...

    def copy_in(self, pages: np.ndarray, blocks: list[Any]) -> None:
        """Put such blocks into these pages."""
        ...


class Link:
    """One direction between two pools. A transfer goes through three lanes: out of the source's pool in the lane of its
    steps, over in a lane of the link's own, into the target's pool in the lane of its steps.

    So pools are touched in the order in which their sides were told to, and a side that has to do with a transfer for a
    moment never waits for the other one, nor for what lies between them.
    """

    def __init__(self, lanes: Lanes, source: str, target: str, copiers: Callable[[], tuple[PageCopier, PageCopier]]):
        """Names of the two sides' lanes; `copiers` gives those of the source and of the target."""
        self._lanes, self._source, self._target, self._copiers = lanes, source, target, copiers
        #: Pages that are somewhere between the two pools.
        self.in_flight = 0

    def warm_up(self) -> None:
        """Copy the scratch page, in this thread, so that nothing compiles afterwards (DESIGN R3)."""
        out_of, into = self._copiers()
        scratch = np.full(1, SCRATCH_PAGE, np.int32)
        into.copy_in(scratch, into.bring(out_of.copy_out(scratch)))

    def send(
        self,
        source: np.ndarray,
        target: np.ndarray,
        copied_out: Callable[[], None],
        ended: Callable[[Exception | None], None],
    ) -> None:
        """Copy pages `source` to pages `target`, int32 [pages] each.

        `copied_out` is called when the source pages are no longer needed, then `ended`, with an error if the target
        could not take them. If it comes to nothing before that, `ended` alone is called, with the error.
        """
        if not len(source):
            copied_out()
            ended(None)
            return
        out_of, into = self._copiers()
        self.in_flight += len(source)

        def failed(error: Exception) -> None:
            self.in_flight -= len(source)
            ended(error)

        def stage(lane: str, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
            def done(result: Callable[[], Any]) -> None:
                try:
                    value = result()
                except Exception as error:
                    failed(error)
                else:
                    then(value)

            self._lanes.start(lane, work, done)

        def carry(blocks: list[Any]) -> None:
            stage(f"{self._source} to {self._target}", lambda: into.bring(blocks), put)

        def put(blocks: list[Any]) -> None:
            copied_out()
            stage(self._target, lambda: into.copy_in(target, blocks), arrived)

        def arrived(_: None) -> None:
            self.in_flight -= len(source)
            ended(None)

        stage(self._source, lambda: out_of.copy_out(source), carry)
