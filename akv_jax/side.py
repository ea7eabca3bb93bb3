"""One device, or mesh of devices, with its pages, its cache and its queue: all that a step is made of (DESIGN §5).

An engine has one. With prefill and decode apart it has two, which know nothing of each other (DESIGN R5).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from akv_jax.cache import persistence
from akv_jax.cache.base import KVCache
from akv_jax.cache.eviction import EvictionClass
from akv_jax.cache.inspection import TreeView, tree_view
from akv_jax.cache.naive import NaiveCache
from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import EngineConfig
from akv_jax.models.load import LoadedModel
from akv_jax.models.weights.digest import weights_digest
from akv_jax.planning.plan import StepPlan
from akv_jax.planning.planner import assemble
from akv_jax.runtime.runner import Runner, SamplingPlan, StepResult
from akv_jax.runtime.transfer import PageCopier
from akv_jax.scheduler import Schedule, Scheduler
from akv_jax.stats import Clock, EngineStats
from akv_jax.works import Works


class Executor(Protocol):
    """Runs plans (DESIGN R6): the device, or a simulation of it."""

    def run(self, plan: StepPlan, sampling: SamplingPlan) -> StepResult:
        """One forward pass and one sampled token for each logit row of `plan`."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that has pages and is still to run."""

    schedule: Schedule
    plan: StepPlan
    sampling: SamplingPlan
    #: When it was begun and when it was planned, by the engine's clock.
    begun: float
    planned: float


class Side:
    """Plans steps; its owner runs them. `executor` and `copier` are the runner, or what is put in its place."""

    def __init__(self, model: LoadedModel, config: EngineConfig, runner: Runner, cache: KVCache | None = None) -> None:
        """`cache` keeps K and V between requests; by default what `config` says."""
        self.model, self.config, self.runner = model, config, runner
        self.executor: Executor = runner
        self.copier: PageCopier = runner
        self.pool = PagePool(config.num_pages)
        self.cache = _new_cache(config, self.pool) if cache is None else cache
        self.scheduler = Scheduler(
            config,
            self.pool,
            self.cache,
            window=model.config.largest_window,
            list_capacity=runner.list_capacity(runner.largest_bucket),
            logit_rows=runner.logit_rows(runner.largest_bucket),
        )

    def plan(self, schedule: Schedule, works: Works, begun: float, clock: Clock) -> PlannedStep:
        """The arrays of a schedule that has parts."""
        plan = assemble([part.placed for part in schedule.parts])
        return PlannedStep(schedule, plan, works.sampling(schedule), begun, clock())

    def check(self) -> None:
        """C7: every page is exactly one of free, cached, private or scratch. PageError if not."""
        self.pool.check(self.scheduler.private_pages(), self.cache.cached_pages())
        self.cache.check()

    def tree(self, max_nodes: int, max_depth: int) -> TreeView:
        """What the cache holds, as values (see `inspection.tree_view`); nothing where nothing is kept."""
        if not isinstance(self.cache, RadixCache):
            return TreeView((), 0, 0)
        return tree_view(self.cache, max_nodes=max_nodes, max_depth=max_depth)

    def save(self, folder: Path) -> int:
        """Write what is cached to `folder`, in place of what it holds; returns how many pages.

        What running requests have of their own is left aside. OSError or StoredCacheError if it cannot be written.
        """
        assert isinstance(self.cache, RadixCache)
        tree, pages = self.cache.export()
        persistence.save(folder, self._identity, tree, self.runner.read_pages(pages))
        return len(pages)

    def load(self, folder: Path) -> int:
        """Take over what `save` wrote, or as much as the pool holds; returns how many pages.

        Only for a side that was never used. StoredCacheError, and nothing is cached, if what is there cannot be used.
        """
        assert isinstance(self.cache, RadixCache)
        with persistence.opened(folder, self._identity) as stored:
            if stored is None:
                return 0
            # On-read looks for birth versions alone (DESIGN C8).
            useful = stored.tree.num_slots if self.config.reposition == "copy" else stored.tree.num_births
            count = min(useful, self.pool.num_free)
            pages = self.pool.allocate(count)
            try:
                self.runner.write_pages(pages, stored.arrays(count))
                self.cache.restore(stored.tree.first(count), pages)
            except (persistence.StoredCacheError, ValueError) as error:
                self.pool.free(pages)
                raise persistence.StoredCacheError(str(error)) from None
        self.check()
        return count

    @functools.cached_property
    def _identity(self) -> persistence.Identity:
        model = self.model
        return persistence.Identity(model.config, weights_digest(model.params), self.config.dtype)


def _new_cache(config: EngineConfig, pool: PagePool) -> KVCache:
    if config.disable_radix_cache:
        return NaiveCache()
    return RadixCache(pool, reposition=config.reposition, eviction=config.eviction)


def collect(sides: Sequence[Side], works: Works, num_running: int) -> EngineStats:
    """The numbers of all sides together; compilations are the process's."""
    pages, caches = [side.pool.counts() for side in sides], [side.cache.stats for side in sides]
    leased, meter = sum(side.cache.leased() for side in sides), works.meter
    evicted = {
        kind.name.lower(): sum(cache.evicted[number] for cache in caches) for number, kind in enumerate(EvictionClass)
    }
    return EngineStats(
        num_running=num_running,
        num_waiting=sum(len(side.scheduler.waiting) for side in sides),
        pages_free=sum(count.free for count in pages),
        pages_cached=sum(count.cached for count in pages) - leased,
        pages_leased=leased,
        pages_private=sum(count.private for count in pages),
        derived_pages=sum(cache.versions for cache in caches),
        tombstones=sum(cache.tombstones for cache in caches),
        requests_total=meter.requests,
        requests_aborted_total=meter.aborted,
        prompt_tokens_total=meter.prompt_tokens,
        generation_tokens_total=meter.generation_tokens,
        forwards_total=meter.forwards,
        computed_tokens_total=meter.computed_tokens,
        restored_tokens_total=sum(cache.restored for cache in caches),
        copied_pages_total=sum(cache.rotations for cache in caches),
        derived_hops_total=sum(cache.hops for cache in caches),
        evicted_pages_total={**evicted, "forgotten": sum(cache.forgotten for cache in caches)},
        preemptions_total=sum(side.scheduler.preemptions for side in sides),
        compilations_total=sides[0].runner.compilations.total,
        prefix_cache_queries_total=meter.looked_up,
        prefix_cache_hits_exact_total=meter.hits_exact,
        prefix_cache_hits_rotated_total=meter.hits_rotated,
        prefix_cache_misses_total=meter.misses,
        drop_skipped_tokens_total=meter.drop_skipped,
        pages_to_decode_total=meter.pages_to_decode,
        pages_to_prefill_total=meter.pages_to_prefill,
        transfers_failed_total=meter.transfers_failed,
        queue_time=meter.queue_time.snapshot(),
        plan_time=meter.plan_time.snapshot(),
        step_time=meter.step_time.snapshot(),
        step_tokens=meter.step_tokens.snapshot(),
        closure=meter.closure.snapshot(),
    )
