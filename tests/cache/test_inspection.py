"""The tree as values says what requests did, changes nothing, and stays bounded and quick (DESIGN C1, C2)."""

from __future__ import annotations

import time

import numpy as np
import pytest

from akv_jax.cache.inspection import FIRST_RANGES, NodeView, TreeView, digest, tree_view
from akv_jax.cache.pages import PagePool
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Request, Sampling
from spec.operations import Append, Drop, History, Reposition
from spec.sharing import steps
from tests.random_histories import random_history
from tests.shared_engines import shared

#: More than any test's tree has.
ALL = 1 << 20
Step = int | Drop | Reposition


def cached_engine(mode: RepositionMode = "on_read") -> Engine:
    return shared(mode).engine(disable_radix_cache=False)


def serve(engine: Engine, name: str, history: History, salt: str = "", max_tokens: int = 1) -> tuple[Step, ...]:
    """To the end; returns the history with what was generated, as far as it has K and V."""
    engine.submit(Request(name, history, Sampling(max_tokens=max_tokens, temperature=0.0), cache_salt=salt))
    tokens: list[int] = []
    while engine.busy:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return (*steps(history), *tokens[:-1])


def whole(engine: Engine) -> TreeView:
    assert isinstance(engine.cache, RadixCache)
    return tree_view(engine.cache, max_nodes=ALL, max_depth=ALL, first_tokens=ALL)


def paths(tree: TreeView) -> dict[str, set[tuple[Step, ...]]]:
    """By tenant, the histories to the end of every node, worked out from nothing but the view."""
    to: dict[int, tuple[str, tuple[Step, ...]]] = {}
    for node in tree.nodes:
        if node.kind == "root":
            to[node.number] = node.tenant, ()
            continue
        tenant, before = to[node.parent]
        assert node.start == sum(isinstance(step, int) for step in before)
        own: tuple[Step, ...] = tuple(node.first.tolist())
        if node.kind == "drop":
            own = (Drop(frozenset(index for start, stop in node.ranges for index in range(start, stop))),)
        elif node.kind == "reposition":
            own = (Reposition(),)
        to[node.number] = tenant, before + own
    result: dict[str, set[tuple[Step, ...]]] = {}
    for tenant, path in to.values():
        result.setdefault(tenant, set()).add(path)
    return result


def starts_with(path: tuple[Step, ...], start: tuple[Step, ...]) -> bool:
    return path[: len(start)] == start


def runs(tree: TreeView) -> list[NodeView]:
    return [node for node in tree.nodes if node.kind == "tokens"]


@pytest.mark.parametrize("mode", ["on_read", "copy"])
def test_paths_are_the_histories_that_were_served(mode: RepositionMode) -> None:
    """C1: every history is a path, every path is the beginning of a history, and tenants are apart."""
    generator = np.random.default_rng(1)
    engine = cached_engine(mode)
    served: dict[str, list[tuple[Step, ...]]] = {"": [], digest("one"): []}
    histories: list[History] = [random_history(generator, max_operations=4) for _ in range(3)]
    for number in range(15):
        history = histories[int(generator.integers(len(histories)))]
        salt = "one" if generator.random() < 0.3 else ""
        histories.append((*history, *random_history(generator, max_operations=2, max_run=5)))
        served[digest(salt)].append(serve(engine, str(number), history, salt, max_tokens=4))
    tree = whole(engine)
    assert len(tree.nodes) == tree.total_nodes
    found = paths(tree)
    assert found.keys() == served.keys()
    for tenant, histories_of in served.items():
        assert all(any(starts_with(path, one) for path in found[tenant]) for one in histories_of)
        assert all(any(starts_with(one, path) for one in histories_of) for path in found[tenant])
    stats = engine.stats()
    assert sum(sum(node.versions.values()) for node in tree.nodes) == stats.pages_cached
    assert sum(node.length for node in runs(tree)) == tree.total_tokens
    assert all(node.hidden == node.leased == 0 for node in tree.nodes)


def merged(tree: TreeView) -> list[tuple[str, int, int]]:
    """Kind, start and length in the view's order, with runs put together that only how they were kept has split."""
    result: list[tuple[str, int, int]] = []
    by_number = {node.number: node for node in tree.nodes}
    for node in tree.nodes:
        parent = by_number.get(node.parent)
        if node.kind == "tokens" and parent is not None and parent.kind == "tokens" and len(parent.children) == 1:
            kind, start, length = result.pop()
            result.append((kind, start, length + node.length))
        else:
            result.append((node.kind, node.start, node.length))
    return result


def test_a_history_node_by_node() -> None:
    engine = cached_engine()
    history = (Append(tuple(range(40))), Drop(frozenset({3, 4, *range(5, 20), 30})), Reposition(), Append((1, 2)))
    serve(engine, "edited", history)
    serve(engine, "branch", (Append((*range(10), 50, 51)),))
    tree = whole(engine)
    assert merged(tree) == [
        ("root", 0, 0),
        ("tokens", 0, 10),
        # The branch was used last, so it comes first.
        ("tokens", 10, 2),
        ("tokens", 10, 30),
        ("drop", 40, 18),
        ("reposition", 40, 0),
        ("tokens", 40, 2),
    ]
    (drop,) = [node for node in tree.nodes if node.kind == "drop"]
    assert drop.ranges == ((3, 20), (30, 31))
    for node in tree.nodes:
        assert node.children == tuple(other.number for other in tree.nodes if other.parent == node.number)


def test_tombstones_and_leases() -> None:
    """C4, C5: who leases how much while a request runs, and what an eviction leaves behind."""
    engine = cached_engine()
    serve(engine, "one", (Append(tuple(range(40))), Drop(frozenset(range(5, 20))), Append((1,))))
    assert engine.cache.evict(15) == 15

    def sums(name: str) -> int:
        return sum(getattr(node, name) for node in runs(whole(engine)))

    assert (sums("length"), sums("resident"), sums("tombstones"), sums("leased")) == (41, 26, 15, 0)
    assert sum(pages for node in runs(whole(engine)) for pages in node.versions.values()) == 26
    engine.submit(Request("runs", (Append(tuple(range(5))),), Sampling(max_tokens=9)))
    engine.step()
    assert sums("leased") == 5 == engine.stats().pages_leased
    engine.abort("runs")
    assert sums("leased") == 0
    engine.flush_cache()
    assert whole(engine) == TreeView((), 0, 0)


def test_it_reads_and_changes_nothing() -> None:
    engine = cached_engine()
    serve(engine, "one", (Append(tuple(range(20))), Drop(frozenset({4})), Append((1, 2))))
    before, stats = whole(engine), engine.stats()
    tokens = [node.first.tolist() for node in before.nodes]
    for node in before.nodes:
        node.first[:] = 63
    again = whole(engine)
    assert [node.first.tolist() for node in again.nodes] == tokens
    assert [(n.number, n.last_used, n.resident) for n in again.nodes] == [
        (n.number, n.last_used, n.resident) for n in before.nodes
    ]
    assert engine.stats() == stats
    engine.check()


def test_without_a_cache_there_is_no_tree() -> None:
    engine = shared().engine()
    serve(engine, "one", (Append((1, 2, 3)),))
    assert engine.cache_tree(100, 100) == TreeView((), 0, 0)


def cut_everywhere(tree: TreeView, max_nodes: int, max_depth: int) -> None:
    """A cut tree is a tree, within its bounds, and says what is missing."""
    assert len(tree.nodes) <= max_nodes and all(node.depth <= max_depth for node in tree.nodes)
    numbers = [node.number for node in tree.nodes]
    for place, node in enumerate(tree.nodes):
        assert node.parent == -1 or node.parent in numbers[:place]
        assert node.children == tuple(other.number for other in tree.nodes if other.parent == node.number)
    roots = sum(node.kind == "root" for node in tree.nodes)
    assert roots + sum(len(node.children) for node in tree.nodes) == len(tree.nodes)


def test_bounds() -> None:
    """By level, and the latest used first: whoever is cut off is older or deeper than all that are shown."""
    generator = np.random.default_rng(2)
    engine = cached_engine()
    for number in range(12):
        serve(engine, str(number), random_history(generator, max_operations=6))
    assert isinstance(engine.cache, RadixCache)
    every = {node.number: node for node in whole(engine).nodes}
    for max_nodes, max_depth in ((1, 9), (2, 9), (7, 9), (ALL, 0), (ALL, 1), (ALL, 3), (10, 2)):
        tree = tree_view(engine.cache, max_nodes=max_nodes, max_depth=max_depth)
        cut_everywhere(tree, max_nodes, max_depth)
        assert tree.total_nodes == len(every)
        shown = {node.number for node in tree.nodes}
        for node in tree.nodes:
            assert node.hidden == len(set(every[node.number].children) - shown)
        deepest = max(node.depth for node in tree.nodes)
        assert len(shown) == min(max_nodes, sum(node.depth <= max_depth for node in every.values()))
        oldest = min(every[number].last_used for number in shown if every[number].depth == deepest)
        for number in every.keys() - shown:
            assert every[number].depth > deepest or every[number].last_used <= oldest


def test_long_drops_are_cut() -> None:
    engine = cached_engine()
    gone = frozenset(range(0, 60, 2))
    serve(engine, "one", (Append(tuple(range(60))), Drop(gone), Append((1,))))
    assert isinstance(engine.cache, RadixCache)
    (drop,) = [node for node in tree_view(engine.cache, max_nodes=ALL, max_depth=ALL).nodes if node.kind == "drop"]
    assert drop.length == 30 and drop.ranges == tuple((2 * i, 2 * i + 1) for i in range(FIRST_RANGES))


@pytest.mark.parametrize("branches, turns", [(1_500, 200), pytest.param(50_000, 500, marks=pytest.mark.long)])
def test_a_huge_tree_is_quick(branches: int, turns: int) -> None:
    """Branches that all were edited, and one path with an edit at every turn."""
    pool = PagePool(4 * branches + 3 * turns)
    cache = RadixCache(pool)

    def store(history: History) -> None:
        timeline = Timeline(history)
        cache.keep(timeline, "", pool.allocate(timeline.count))

    deep: list[Append | Drop | Reposition] = []
    for turn in range(turns):
        deep += [Append((7,) * 3), Drop(frozenset({3 * turn}))]
    # The drop after the last token holds nothing and is not kept.
    store((*deep, Append((7,) * 3)))
    for branch in range(branches):
        store((Append((branch + 8, 1)), Drop(frozenset({0})), Append((2,))))
    started = time.thread_time()
    tree = tree_view(cache, max_nodes=500, max_depth=1000)
    elapsed = time.thread_time() - started
    cut_everywhere(tree, 500, 1000)
    assert (len(tree.nodes), tree.total_nodes) == (500, 1 + 2 * turns + 1 + 3 * branches)
    assert tree.nodes[0].hidden == branches + 1 - 499
    # CPU time, as others may be busy: about 0.02 s on a 2-core EPYC, and 0.1 s with 150,000 nodes.
    assert elapsed < 0.5
    narrow = tree_view(cache, max_nodes=10_000, max_depth=2 * turns + 1)
    assert max(node.depth for node in narrow.nodes) == (2 * turns + 1 if 3 * branches < 9_500 else 3)
