"""The cache from one run to the next: the same answers from the same pages, and nothing but whole files of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import structlog

from akv_jax import warm_start
from akv_jax.cache import persistence
from akv_jax.cache.export import TreeExport
from akv_jax.cache.pages import PagePool
from akv_jax.cache.persistence import INDEX, Identity, StoredCacheError, opened, save
from akv_jax.cache.radix_tree import RadixCache
from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.errors import RequestError
from akv_jax.planning.visibility import Timeline
from akv_jax.request import Output, Request, Sampling
from akv_jax.scheduler import Scheduler
from spec.operations import Append, Drop, History, Reposition
from tests.cache.test_radix_tree import SharingSimulation, WatchedCache
from tests.planning.symbolic import ForgetfulPool
from tests.random_histories import random_history
from tests.shared_engines import config, shared
from tests.test_scheduler import MODES
from tests.tiny_engine import engine_model

IDENTITY = Identity(engine_model(config()), "00" * 32, "float32")


# -- the tree, on symbols --------------------------------------------------------------------------------------------


def restart(simulation: SharingSimulation, folder: Path, num_pages: int) -> None:
    """Stop and start again through files, with a pool of another size."""
    for client in simulation.live:
        simulation.finish(client, "aborted")
    tree, pages = simulation.cache.export()
    contents = [simulation.device.pages[page] for page in pages.tolist()]
    save(folder, IDENTITY, tree, [("contents", np.arange(len(pages), dtype=np.float32)[:, None])])

    simulation.device.pages.clear()
    simulation.config = dataclasses.replace(simulation.config, num_pages=num_pages)
    simulation.pool = ForgetfulPool(num_pages, simulation.device)
    settings = simulation.config
    simulation.cache = WatchedCache(simulation.pool, reposition=settings.reposition, eviction=settings.eviction)
    simulation.cache.simulation = simulation
    before = simulation.scheduler
    simulation.scheduler = Scheduler(
        simulation.config,
        simulation.pool,
        simulation.cache,
        window=before.window,
        list_capacity=before.list_capacity,
        logit_rows=before.max_logit_rows,
    )
    with opened(folder, IDENTITY) as stored:
        assert stored is not None
        count = min(stored.tree.num_slots, num_pages)
        pages = simulation.pool.allocate(count)
        ((_, rows),) = stored.arrays(count)
        for page, row in zip(pages.tolist(), rows[:, 0].astype(int).tolist(), strict=True):
            simulation.device.pages[page] = contents[row]
        simulation.cache.restore(stored.tree.first(count), pages)
    simulation.check_pages()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 300))])
@pytest.mark.parametrize("mode", MODES)
def test_random_traffic_with_restarts(mode: RepositionMode, seed: int, tmp_path: Path) -> None:
    """C1-C7 across restarts: drops, repositions, tombstones, tenants, pools that grow and shrink."""
    generator = np.random.default_rng(seed)
    windows = [(None,), (None, 3), (2,)][generator.integers(3)]
    policy = str(generator.choice(["drop_aware", "drop_aware", "lru"]))
    simulation = SharingSimulation(windows, reposition=mode, num_pages=90, chunked_prefill_size=16, eviction=policy)
    told: list[History] = []
    for _ in range(150):
        if generator.random() < 0.25:
            history = random_history(generator, max_operations=5, vocab_size=3)
            if told and generator.random() < 0.8:
                history = (*told[int(generator.integers(len(told)))], *history)
            try:
                simulation.submit(history, int(generator.choice([1, 2, 8])), salt=str(generator.choice(["", "é"])))
                told.append(history)
            except RequestError:
                pass
        event = generator.random()
        if event < 0.1:
            simulation.cache.evict(int(generator.integers(1, 20)))
        elif event < 0.14:
            restart(simulation, tmp_path, int(generator.integers(30, 160)))
        simulation.check_pages()
        simulation.step()
    simulation.drain()


def served(*histories: History, num_pages: int = 200, salt: str = "") -> SharingSimulation:
    """A simulation that has served these one after the other."""
    simulation = SharingSimulation(num_pages=num_pages)
    for history in histories:
        simulation.submit(history, salt=salt)
        while simulation.live:
            simulation.step()
    return simulation


def resident(simulation: SharingSimulation, history: History, salt: str = "") -> list[bool]:
    timeline = Timeline(history)
    match = simulation.cache.match(timeline, salt)
    simulation.cache.release(match, timeline)
    return (match.pages >= 0).tolist()


def test_tombstones_come_back_as_tombstones(tmp_path: Path) -> None:
    """C5: what was evicted stays unknown, what lies below it is found."""
    history = (Append((1, 2, 3, 4)), Drop(frozenset({1, 2})), Append((5,)))
    simulation = served(history)
    simulation.cache.evict(2)
    restart(simulation, tmp_path, 200)
    assert resident(simulation, history) == [True, False, False, True, True]
    assert simulation.cache.remembered == 5


def test_salts_come_back_and_still_separate(tmp_path: Path) -> None:
    history = (Append((1, 2, 3)),)
    simulation = served(history, salt="tenant é")
    restart(simulation, tmp_path, 200)
    assert resident(simulation, history, "tenant é") == [True] * 3
    assert resident(simulation, history, "") == [False] * 3


def test_a_smaller_pool_takes_what_was_used_last(tmp_path: Path) -> None:
    old, new = (Append((1, 2, 3, 4)),), (Append((5, 6, 7, 8)), Drop(frozenset({0})), Append((9,)))
    simulation = served(old, new)
    restart(simulation, tmp_path, 6)
    assert resident(simulation, new) == [False, True, True, True, True]
    # Of one path its beginning, without which the rest is worth less.
    assert resident(simulation, old) == [True, True, False, False]
    assert simulation.cache.remembered == 9
    # Paths on which nothing is left go, tombstones and all.
    simulation = served(old, new)
    restart(simulation, tmp_path, 4)
    assert resident(simulation, new) == [False, True, True, True, True] and simulation.cache.remembered == 5


def test_only_an_empty_cache_is_restored() -> None:
    simulation = served((Append((1, 2)),))
    tree, pages = simulation.cache.export()
    with pytest.raises(ValueError, match="empty"):
        simulation.cache.restore(tree, pages)
    simulation.check_pages()


def test_the_order_of_eviction_is_the_same_after_a_restart(tmp_path: Path) -> None:
    """C5: recency and drops are part of the state."""
    histories = ((Append((1, 2, 3)),), (Append((4, 5, 6)), Drop(frozenset({1})), Append((7,))), (Append((8, 9)),))
    left = []
    for restarted in (False, True):
        simulation = served(*histories)
        if restarted:
            restart(simulation, tmp_path, 200)
        left.append([])
        while simulation.cache.evict(1):
            simulation.check_pages()
            tree, _ = simulation.cache.export()
            left[-1].append((tree.numbers.tolist(), tree.nodes.tolist(), tree.offsets.tolist()))
    assert left[0] == left[1]


def test_any_columns_make_a_whole_tree_or_are_refused() -> None:
    """Whatever is in them, the books of the restored tree are right."""
    simulation = served(
        (Append((1, 2, 3, 4)), Drop(frozenset({1, 2})), Append((5,)), Reposition(), Append((6, 7))),
        (Append((1, 2, 8)), Reposition(), Append((9,))),
    )
    good, _ = simulation.cache.export()
    generator, kept = np.random.default_rng(0), 0
    for _ in range(600):
        name = str(generator.choice(list(TreeExport.COLUMNS)))
        column = getattr(good, name).copy()
        if generator.random() < 0.2:
            column = column[: int(generator.integers(len(column)))]
        else:
            at = int(generator.integers(len(column)))
            column[at] = generator.choice([0, 1, 2, 3, 5, 100, column[at - 1]]) - (generator.random() < 0.1)
        tree = dataclasses.replace(good, **{name: column})
        pool = PagePool(100)
        cache = RadixCache(pool)
        pages = pool.allocate(good.num_slots)
        try:
            cache.restore(tree, pages)
        except ValueError:
            assert cache.cached_pages() == []
            pool.check([pages], [])
            continue
        kept += 1
        cache.check()
        pool.check([], cache.cached_pages())
        cache.flush()
        assert pool.num_free == 100 and cache.remembered == 0
    assert 50 < kept < 550


# -- the engine ------------------------------------------------------------------------------------------------------

TALK: History = (
    Append(tuple(range(20))),
    Drop(frozenset(range(4, 9))),
    Append(tuple(range(30, 40))),
    Reposition(),
    Append((50, 51, 52)),
    Drop(frozenset({21, 22})),
    Reposition(),
    Append((53,)),
)


def serve(engine: Engine, name: str, history: History, salt: str = "") -> Output:
    """The last output of one request, all of whose new tokens have their logits looked at."""
    count = Timeline(history).count
    request = Request(
        name, history, Sampling(max_tokens=2, temperature=0.0), return_logits=True, cache_salt=salt,
        logits_at=(count - 2, count - 1),
    )  # fmt: skip
    engine.submit(request)
    outputs: list[Output] = []
    while engine.busy:
        outputs += engine.step()
        engine.check()
    assert outputs[-1].error is None
    return dataclasses.replace(outputs[0], usage=outputs[-1].usage)


def scrub(engine: Engine) -> None:
    """Engines of these tests share a device: what the last run has left there must be of no use."""
    everything = np.arange(engine.config.num_pages + 1, dtype=np.int32)
    arrays = [(name, np.full_like(rows, 7)) for name, rows in engine.runner.read_pages(everything)]
    engine.runner.write_pages(everything, arrays)


@pytest.mark.parametrize("mode", MODES)
def test_a_restart_changes_nothing(mode: RepositionMode, tmp_path: Path) -> None:
    """A4: logits to the bit and usage, of the unchanged request, of a next turn, a branch and another tenant's."""
    follow_ups: tuple[tuple[History, str], ...] = (
        (TALK, ""),
        ((*TALK, Drop(frozenset({0, 30})), Append((1, 2, 3))), ""),
        ((*TALK[:3], Append((9, 9))), ""),
        ((Append(tuple(range(20))), Append((3, 4))), "tenant"),
        (TALK, "stranger"),
    )
    results: list[list[Output]] = []
    for restarted in (False, True):
        engine = shared(mode).engine(disable_radix_cache=False)
        serve(engine, "a", TALK)
        serve(engine, "b", (Append(tuple(range(20))),), "tenant")
        engine.cache.evict(6)
        tree, _ = engine.cache.export()  # type: ignore[attr-defined]
        assert (tree.num_slots > tree.num_births) == (mode == "copy")
        if restarted:
            assert engine.save_cache(tmp_path) > 20
            scrub(engine)
            engine = shared(mode).engine(disable_radix_cache=False)
            assert engine.load_cache(tmp_path) > 20
            engine.check()
        results.append([serve(engine, f"follow-up {i}", *follow_up) for i, follow_up in enumerate(follow_ups)])
        engine.flush_cache()
        assert engine.stats().pages_free == engine.config.num_pages
    for before, after in zip(*results, strict=True):
        assert before.usage == after.usage and before.token_ids == after.token_ids
        np.testing.assert_array_equal(before.prompt_logits, after.prompt_logits)
    assert results[1][1].usage is not None and results[1][1].usage.cached_tokens > 0


def test_what_one_way_of_repositioning_stored_the_other_can_use(tmp_path: Path) -> None:
    """C8: birth versions are the same in both; derived ones are left aside."""
    engine = shared("copy").engine(disable_radix_cache=False)
    serve(engine, "a", TALK)
    engine.save_cache(tmp_path)
    other = shared("on_read").engine(disable_radix_cache=False)
    births = engine.cache.export()[0].num_births  # type: ignore[attr-defined]
    scrub(other)
    assert other.load_cache(tmp_path) == births
    warm = serve(other, "b", TALK)
    cold = serve(shared("on_read").engine(), "c", TALK)
    assert warm.usage is not None and warm.usage.computed_tokens == 2
    np.testing.assert_allclose(warm.prompt_logits, cold.prompt_logits, atol=2e-4)


def test_a_smaller_pool_starts_with_less_and_answers_the_same(tmp_path: Path) -> None:
    engine = shared().engine(disable_radix_cache=False)
    expected = serve(engine, "a", TALK)
    engine.save_cache(tmp_path)
    scrub(engine)
    small = shared().engine(disable_radix_cache=False, num_pages=30)
    assert small.load_cache(tmp_path) == 30
    again = serve(small, "b", TALK)
    np.testing.assert_allclose(again.prompt_logits, expected.prompt_logits, atol=2e-4)


def test_the_pool_is_written_in_place_after_a_save(tmp_path: Path) -> None:
    """R3: to have looked at the pages costs no copy of the pool afterwards."""
    engine = shared().engine(disable_radix_cache=False)
    serve(engine, "a", TALK)
    engine.save_cache(tmp_path)
    scrub(engine)

    def buffers() -> list[int]:
        return [pool.unsafe_buffer_pointer() for pool in engine.runner._pool.k]

    before = buffers()
    serve(engine, "b", (Append((1, 2, 3)),))
    assert buffers() == before


def test_bfloat16_comes_back_to_the_bit(tmp_path: Path) -> None:
    from tests.shared_engines import params
    from tests.tiny_engine import TinyEngine

    tiny = TinyEngine(config(), params(), num_pages=20, dtype="bfloat16")
    runner, pages = tiny.runner, np.array([3, 1, 20], np.int32)
    bits = np.random.default_rng(0).integers(0, 1 << 16, (3, runner._pool.k[0].shape[1]), np.uint16)
    runner.write_pages(pages, [(name, bits + i) for i, (name, _) in enumerate(runner.read_pages(pages))])
    for i, (_, rows) in enumerate(runner.read_pages(pages)):
        np.testing.assert_array_equal(rows, bits + i)
    with pytest.raises(ValueError, match="layer-000-k, uint16"):
        runner.write_pages(pages, ((name, rows.astype(np.float32)) for name, rows in runner.read_pages(pages)))


# -- files that must not be used -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored_engine() -> Engine:
    engine = shared().engine(disable_radix_cache=False)
    serve(engine, "a", TALK, "secret salt")
    return engine


@pytest.fixture
def stored(stored_engine: Engine, tmp_path: Path) -> Path:
    stored_engine.save_cache(tmp_path)
    return tmp_path


def refused(folder: Path, says: str) -> None:
    """A start with these files is a start with nothing, and says why."""
    engine = shared().engine(disable_radix_cache=False)
    with pytest.raises(StoredCacheError, match=says):
        engine.load_cache(folder)
    engine.check()
    assert engine.stats().pages_free == engine.config.num_pages


def array_file(folder: Path) -> Path:
    return sorted(folder.glob("*/*.npy"))[2]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index and make its checksum right again."""
    data = (folder / INDEX).read_bytes()
    size = persistence._HEADER.size
    index = msgpack.unpackb(data[size:])
    change(index)
    payload = msgpack.packb(index)
    digest = persistence.hashlib.sha256(payload).digest()
    magic, version, _, _ = persistence._HEADER.unpack(data[:size])
    (folder / INDEX).write_bytes(persistence._HEADER.pack(magic, version, len(payload), digest) + payload)


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda f: flip(f / INDEX, 5), "index.akv is no KV cache of this program"),
        (lambda f: (f / INDEX).write_bytes(b"PK\x03\x04 something else"), "index.akv is no KV cache of this program"),
        (lambda f: os.truncate(f / INDEX, 0), "index.akv is no KV cache of this program"),
        (lambda f: os.truncate(f / INDEX, 30), "index.akv is damaged: 30 bytes, not even a header"),
        (lambda f: os.truncate(f / INDEX, 500), r"index.akv is damaged: \d+ bytes after its header, expected \d+"),
        (lambda f: flip(f / INDEX, 17), r"index.akv has format \d+, this program reads format 1"),
        (lambda f: flip(f / INDEX, 35), "index.akv is damaged: its checksum is wrong"),
        (lambda f: flip(f / INDEX, -1), "index.akv is damaged: its checksum is wrong"),
        (lambda f: array_file(f).unlink(), "layer-001-k.npy cannot be read: No such file"),
        (lambda f: os.truncate(array_file(f), 100), r"layer-001-k.npy is damaged: 100 bytes, expected \d+"),
        (lambda f: flip(array_file(f), -3), "layer-001-k.npy is damaged: its checksum is wrong"),
        (lambda f: flip(array_file(f), 20), "layer-001-k.npy is damaged: its checksum is wrong"),
        (lambda f: rewrite(f, lambda i: i.update(folder="../..")), "is no name of a file"),
        (lambda f: rewrite(f, lambda i: i.pop("salts")), "holds no tree that could be: KeyError"),
        (lambda f: rewrite(f, lambda i: i.update(salts=["a", "b"])), "not one salt a root"),
        (lambda f: rewrite(f, lambda i: i["tree"].update(nodes=b"123")), "holds no tree that could be"),
        (lambda f: rewrite(f, lambda i: i["files"].pop()), "shorter"),
        (lambda f: rewrite(f, lambda i: i["files"].reverse()), "array layer-.*was expected"),
    ],
)
def test_what_is_damaged_or_foreign_is_refused(damage: Callable[[Path], Any], says: str, stored: Path) -> None:
    damage(stored)
    refused(stored, says)


def test_another_dtype_is_refused(stored: Path) -> None:
    rewrite(stored, lambda index: index["identity"].update(dtype="bfloat16"))
    refused(stored, "holds bfloat16, this server computes in float32")


@pytest.mark.parametrize("field, value", [("norm_eps", 1e-3), ("rotary", 500.0), ("qk_norm", None)])
def test_another_model_is_refused(field: str, value: Any, stored: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        model = index["identity"]["model"]
        if field == "rotary":
            model["layers"][0]["rotary"]["base"] = value
        elif value is None:
            del model[field]
        else:
            model[field] = value

    rewrite(stored, change)
    refused(stored, f"of another model: .*, with other {'layers' if field == 'rotary' else field}$")


def test_other_weights_of_the_same_shape_are_refused(stored: Path) -> None:
    """Not by name, path, size or time: by content."""
    tiny = shared()
    model = dataclasses.replace(tiny.model, params={**tiny.model.params, "norm": tiny.model.params["norm"] + 1e-6})
    settings = dataclasses.replace(tiny.settings, disable_radix_cache=False)
    engine = Engine(model, settings, runner=tiny.runner)
    with pytest.raises(StoredCacheError, match="of other weights"):
        engine.load_cache(stored)


def test_a_model_may_be_called_something_else_and_reach_further(stored: Path) -> None:
    tiny = shared()
    other = dataclasses.replace(tiny.model.config, name="other", max_positions=1 << 20)
    settings = dataclasses.replace(tiny.settings, disable_radix_cache=False)
    engine = Engine(dataclasses.replace(tiny.model, config=other), settings, runner=tiny.runner)
    assert engine.load_cache(stored) > 0


def test_nothing_stored_is_no_error(tmp_path: Path) -> None:
    assert shared().engine(disable_radix_cache=False).load_cache(tmp_path / "not there") == 0


def test_an_empty_index_is_refused_and_replaced(stored_engine: Engine, tmp_path: Path) -> None:
    """What a full disk or a crash of the machine may leave is not for people to clear away."""
    (tmp_path / INDEX).touch()
    with pytest.raises(StoredCacheError, match="no KV cache of this program"):
        shared().engine(disable_radix_cache=False).load_cache(tmp_path)
    pages = stored_engine.save_cache(tmp_path)
    assert shared().engine(disable_radix_cache=False).load_cache(tmp_path) == pages > 0


def test_files_of_others_are_left_alone(stored_engine: Engine, tmp_path: Path) -> None:
    """Neither an index of something else nor a folder with a name like ours loses anything."""
    (tmp_path / INDEX).write_text("mine")
    with pytest.raises(StoredCacheError, match="left alone"):
        stored_engine.save_cache(tmp_path)
    assert (tmp_path / INDEX).read_text() == "mine" and os.listdir(tmp_path) == [INDEX]
    (tmp_path / INDEX).unlink()
    (tmp_path / "akv-pages-mine").mkdir()
    (tmp_path / "akv-pages-mine" / "thesis.txt").write_text("mine")
    stored_engine.save_cache(tmp_path)
    assert (tmp_path / "akv-pages-mine" / "thesis.txt").read_text() == "mine"


def test_files_are_for_their_owner_alone(stored_engine: Engine, tmp_path: Path) -> None:
    """They hold prompts and salts."""
    folder = tmp_path / "new"
    stored_engine.save_cache(folder)
    assert b"secret salt" in (folder / INDEX).read_bytes()
    for path in [folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_start_says_what_became_of_what_was_stored(stored: Path) -> None:
    """And starts whatever it was."""
    engine = shared().engine(disable_radix_cache=False)
    with structlog.testing.capture_logs() as logs:
        warm_start.load(engine, stored)
        flip(array_file(stored), -1)
        warm_start.load(shared().engine(disable_radix_cache=False), stored)
    assert [entry["log_level"] for entry in logs] == ["info", "warning"]
    assert logs[0]["pages"] == engine.stats().pages_cached > 0 and "checksum" in logs[1]["reason"]


def test_a_stop_that_cannot_store_is_a_stop_all_the_same(
    stored: Path, stored_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is logged, what was stored before stays, and nothing is raised."""
    monkeypatch.setattr(persistence, "os", FailingSystem(8, dead=False))
    with structlog.testing.capture_logs() as logs:
        warm_start.save(stored_engine, stored)
    assert [(entry["log_level"], entry["reason"]) for entry in logs] == [
        ("error", "[Errno 28] No space left on device")
    ]
    assert shared().engine(disable_radix_cache=False).load_cache(stored) > 0


# -- crashes ---------------------------------------------------------------------------------------------------------


def tree_of(token: int) -> tuple[TreeExport, list[tuple[str, np.ndarray]]]:
    """A state that `token` tells from others: tree and arrays."""
    tree, pages = served((Append((token, 1, 2)),)).cache.export()
    return tree, [(f"array-{i}", np.full((len(pages), 4), token * 10 + i, np.float32)) for i in range(3)]


def state_of(folder: Path) -> int | None:
    """The token of the state that is stored; every array must be of that state."""
    with opened(folder, IDENTITY) as stored:
        if stored is None:
            return None
        token = int(stored.tree.numbers[0])
        for i, (_, rows) in enumerate(stored.arrays(stored.tree.num_slots)):
            assert (rows == token * 10 + i).all() and len(rows) == 3
        return token


class KilledError(BaseException):
    pass


class FailingSystem:
    """The `os` that persistence sees: the n-th call that changes anything fails, and so do all after it if `dead`."""

    CHANGING = ("open", "fsync", "replace", "close")

    def __init__(self, fail_at: int, dead: bool) -> None:
        self._fail_at, self._dead, self.calls = fail_at, dead, []

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.CHANGING:
            return real

        def call(*arguments: Any, **keywords: Any) -> Any:
            if name == "close":
                # The kernel does this whatever comes of the call, and for the dead.
                real(*arguments)
                self.step(name)
                return None
            self.step(name)
            return real(*arguments, **keywords)

        return call

    def step(self, name: str) -> None:
        self.calls.append(name)
        count = len(self.calls)
        if self._dead and count >= self._fail_at:
            raise KilledError
        if count == self._fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")


def saves_failing_at_every_step(folder: Path, monkeypatch: pytest.MonkeyPatch, dead: bool) -> Iterator[int]:
    """Save state after state, each failing one call later, until one does not; yields what was to be written."""
    real_unlink, real_rmdir, real_write = Path.unlink, Path.rmdir, persistence._CheckedFile.write
    for fail_at in range(1, 200):
        system = FailingSystem(fail_at, dead)

        def stepping(name: str, real: Any, system: FailingSystem = system) -> Any:
            def call(*arguments: Any, **keywords: Any) -> Any:
                system.step(name)
                return real(*arguments, **keywords)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(persistence, "os", system)
            patch.setattr(Path, "unlink", stepping("unlink", real_unlink))
            patch.setattr(Path, "rmdir", stepping("rmdir", real_rmdir))
            patch.setattr(persistence._CheckedFile, "write", stepping("write", real_write))
            with contextlib.suppress(KilledError, OSError):
                save(folder, IDENTITY, *tree_of(fail_at))
        yield fail_at
        if len(system.calls) < fail_at:
            return
    raise AssertionError("a save takes more steps than this test has")


def test_a_crash_at_any_step_leaves_the_old_state_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if killed: after that step nothing happens any more, no cleaning up either."""
    save(tmp_path, IDENTITY, *tree_of(0))
    state, wanted, seen = 0, 0, []
    for wanted in saves_failing_at_every_step(tmp_path, monkeypatch, dead=True):
        found = state_of(tmp_path)
        assert found in (state, wanted)
        seen.append(found == wanted)
        state = found
    assert state == wanted
    # Before the rename always the old one, after it always the new one.
    assert seen == sorted(seen) and 20 < seen.index(True) < len(seen)
    # The last save has removed what all the others left.
    assert len(list(tmp_path.iterdir())) == 2


def test_a_full_disk_leaves_the_old_state_and_no_rubbish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, IDENTITY, *tree_of(0))
    state = wanted = 0
    for wanted in saves_failing_at_every_step(tmp_path, monkeypatch, dead=False):
        found = state_of(tmp_path)
        assert found in (state, wanted)
        # Once the new state is in place, only removing the old one can fail.
        assert found == wanted or len(list(tmp_path.iterdir())) == 2
        state = found
    assert state == wanted and len(list(tmp_path.iterdir())) == 2


def test_everything_is_on_the_disk_before_the_index_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = FailingSystem(1 << 20, dead=False)
    monkeypatch.setattr(persistence, "os", system)
    save(tmp_path, IDENTITY, *tree_of(1))
    at = system.calls.index("replace")
    # Three arrays, the index, and the folder they are in; then the folder that has the new name.
    assert system.calls[:at].count("fsync") == 5 and "fsync" in system.calls[at:]


WRITER = """
import sys
from pathlib import Path
from akv_jax.cache.persistence import save
from tests.cache.test_persistence import IDENTITY, tree_of
states = [tree_of(token) for token in range(1, 50)]
print("ready", flush=True)
while True:
    for state in states:
        save(Path(sys.argv[1]), IDENTITY, *state)
"""


def test_a_real_kill_leaves_a_usable_state(tmp_path: Path) -> None:
    """SIGKILL at any time."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.1 + np.random.default_rng().random() / 10)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert state_of(tmp_path) in range(1, 50)
    finally:
        process.kill()
        process.wait()
    save(tmp_path, IDENTITY, *tree_of(60))
    assert state_of(tmp_path) == 60 and len(list(tmp_path.iterdir())) == 2
