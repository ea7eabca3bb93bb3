"""What the cache's own work costs, without a model: `python -m benchmarks.cache_figures`.

Eviction and allocation a page, in pools of different sizes that are full of idle pages; and how long it takes to find
and plan the next turn of a long conversation that is all resident. CPU time, so that other work on the machine counts
little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import EngineConfig, RepositionMode
from akv_jax.planning.planner import assemble
from akv_jax.planning.visibility import Timeline
from akv_jax.scheduler import Scheduler
from spec.operations import Append, Drop, History, Reposition


@dataclass(frozen=True)
class EvictionCost:
    """Microseconds a page: to evict and allocate `batch` pages at a time, and to give them to the cache again."""

    num_pages: int
    batch: int
    evict: float
    allocate: float
    keep: float


def eviction_cost(num_pages: int, batch: int, *, pages: int = 20_000, run: int = 500) -> EvictionCost:
    """Fill a pool with conversations of `run` tokens, half of them dropped; then replace `pages` pages of it."""
    random = np.random.default_rng(0)
    pool = PagePool(num_pages)
    cache = RadixCache(pool, reposition="copy")

    def conversation(length: int) -> Timeline:
        tokens = tuple(random.integers(50_000, size=length).tolist())
        return Timeline((Append(tokens), Drop(frozenset(range(0, length, 2))), Append((1,))))

    while pool.num_free > run:
        timeline = conversation(run)
        cache.keep(timeline, "", pool.allocate(timeline.count))
    spent = np.zeros(3)
    for _ in range(0, pages, batch):
        timeline = conversation(batch - 1) if batch > 1 else Timeline((Append((int(random.integers(50_000)),)),))
        began = time.process_time()
        cache.evict(timeline.count - pool.num_free)
        evicted = time.process_time()
        taken = pool.allocate(timeline.count)
        allocated = time.process_time()
        pool.free(cache.keep(timeline, "", taken))
        spent += evicted - began, allocated - evicted, time.process_time() - allocated
    return EvictionCost(num_pages, batch, *(1e6 * spent / pages).tolist())


@dataclass(frozen=True)
class TurnCost:
    """Milliseconds from a queued request to the plan of its first step; medians."""

    tokens: int
    mode: RepositionMode
    timeline: float
    submit: float
    schedule: float


def conversation(messages: int, tokens: int) -> History:
    """Messages of one length; every fourth one drops another, and every twelfth repositions."""
    length, history = tokens // messages, list[Append | Drop | Reposition]()
    for message in range(messages):
        history.append(Append(tuple(((np.arange(length) * 31 + message) % 50_000).tolist())))
        if message % 4 == 3:
            history.append(Drop(frozenset(range((message - 3) * length, (message - 2) * length))))
        if message % 12 == 11:
            history.append(Reposition())
    return tuple(history)


def turn_cost(tokens: int, mode: RepositionMode, *, messages: int = 100, runs: int = 20) -> TurnCost:
    """The next turn of a conversation that is all resident."""
    history = conversation(messages, tokens)
    pool = PagePool(4 * tokens)
    cache = RadixCache(pool, reposition=mode)
    config = EngineConfig(2 * tokens, 4 * tokens, chunked_prefill_size=tokens, reposition=mode)
    scheduler = Scheduler(config, pool, cache, window=None, list_capacity=1 << 30, logit_rows=16)
    times = []
    for run in range(runs + 1):
        began = time.process_time()
        timeline = Timeline((*history, Append((run,) * 20)))
        compiled = time.process_time()
        job = scheduler.submit(str(run), timeline, "", ())
        submitted = time.process_time()
        schedule = scheduler.schedule()
        assemble([part.placed for part in schedule.parts])
        times.append((compiled - began, submitted - compiled, time.process_time() - submitted))
        scheduler.advance(schedule)
        while job.sequence is not None and job.sequence.remaining:
            scheduler.advance(scheduler.schedule())
        scheduler.finish(job)
    # The first one computes everything.
    parts = [1000 * statistics.median(part) for part in zip(*times[1:], strict=True)]
    return TurnCost(tokens, mode, *parts)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cache_figures", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--pools", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000, 30_000, 100_000])
    arguments = parser.parse_args()
    console = Console()
    table = Table("pool", "pages at a time", "evict us/page", "allocate us/page", "keep us/page")
    for pool in arguments.pools:
        for batch in arguments.batches:
            cost = eviction_cost(pool, batch)
            table.add_row(f"{pool:,}", str(batch), f"{cost.evict:.2f}", f"{cost.allocate:.2f}", f"{cost.keep:.2f}")
    console.print(table)
    table = Table("tokens", "mode", "timeline ms", "submit ms", "match and plan ms")
    modes: tuple[RepositionMode, ...] = ("on_read", "copy")
    for length in arguments.lengths:
        for mode in modes:
            cost = turn_cost(length, mode)
            table.add_row(f"{length:,}", mode, f"{cost.timeline:.2f}", f"{cost.submit:.2f}", f"{cost.schedule:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
