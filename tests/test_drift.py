"""However often an entry moves, its K is what one rotation from birth makes of it (DESIGN C3, C8; issue 4, drift)."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16
from prometheus_client.parser import text_string_to_metric_families

from akv_jax.config import RepositionMode
from akv_jax.engine import Engine
from akv_jax.models.rope import rotary_table
from akv_jax.planning.visibility import Timeline, View
from akv_jax.request import Request, Sampling
from pallas_kernels.rotary import rotate
from serving.metrics import Metrics
from spec.operations import Append, Drop, History, Reposition
from tests import shared_engines, two_layers

CONTEXT, PAGES, CHUNK, TURNS = 128, 512, 32, 100
#: As many tokens as there are turns come before them, and each turn drops one.
SURVIVORS = np.arange(TURNS, TURNS + 4)


def serve(engine: Engine, name: str, history: History) -> None:
    engine.submit(Request(name, history, Sampling(max_tokens=1, temperature=0.0)))
    while engine.busy:
        engine.step()
        engine.check()


def pool_keys(engine: Engine, pages: np.ndarray) -> np.ndarray:
    """Of the pool's dtype, [layers, pages, kv_heads * head_dim]."""
    rows = np.stack([np.asarray(layer)[pages] for layer in engine.runner._pool.k])
    return rows.view(bfloat16) if rows.dtype == np.uint16 else rows


def versions(engine: Engine, timeline: Timeline) -> tuple[np.ndarray, np.ndarray, View, np.ndarray]:
    """Each entry's page and the position it is rotated to; and what is active in the end, with the pages of the
    versions that are just there."""
    view = timeline.view(timeline.num_epochs - 1)
    match = engine.cache.match(timeline, "")
    (exact,) = engine.cache.lease_versions(match, timeline, "", [view])
    engine.cache.release(match, timeline)
    return match.pages, match.encoded, view, exact


def rotated_once(engine: Engine, births: np.ndarray) -> np.ndarray:
    """K at birth, [layers, survivors, width], turned by -1, -2 and so on in float32 and not rounded:
    [turns, layers, survivors, width]."""
    layers = []
    for layer, keys in zip(engine.model.config.layers, births.astype(np.float32), strict=True):
        heads = jnp.tile(keys.reshape(len(keys), -1, engine.model.config.head_dim), (TURNS, 1, 1))
        cos, sin = (
            jnp.repeat(table[1 : TURNS + 1], len(keys), axis=0) for table in rotary_table(layer.rotary, CONTEXT)
        )
        layers.append(np.asarray(rotate(heads, cos, -sin, style=layer.rotary.style)).reshape(TURNS, *keys.shape))
    return np.stack(layers, axis=1)


def counter(engine: Engine, name: str) -> float:
    """As /metrics has it."""
    families = text_string_to_metric_families(Metrics().render(engine.stats()).decode())
    (value,) = (sample.value for family in families for sample in family.samples if sample.name == name)
    return value


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("copy", "bfloat16"),
        pytest.param("copy", "float32", marks=pytest.mark.long),
        pytest.param("on_read", "float32", marks=pytest.mark.long),
        pytest.param("on_read", "bfloat16", marks=pytest.mark.long),
    ],
)
def test_a_hundred_repositions_do_not_drift(mode: RepositionMode, dtype: str) -> None:
    """C3: survivors move in every one of them; while the birth version is resident, each copy is off by one rounding of
    the pool's dtype at most. C8: on read nothing is written, and no entry has a second version."""
    sizes: dict[str, Any] = {"context_length": CONTEXT, "num_pages": PAGES, "max_running_requests": 2}
    sizes |= {"chunked_prefill_size": CHUNK, "token_buckets": (CHUNK,), "reposition": mode, "dtype": dtype}
    tiny = shared_engines.warm(two_layers.model_config(), two_layers.params(), **sizes)
    engine = tiny.engine(disable_radix_cache=False)
    history: History = (Append(tuple(token % 64 for token in range(int(SURVIVORS[-1]) + 1))),)
    serve(engine, "birth", history)
    pages, *_ = versions(engine, Timeline(history))
    born = pages[SURVIVORS]
    births = pool_keys(engine, born)
    moved = []
    for turn in range(TURNS):
        # One token before the survivors, and the last turn's message.
        gone = {turn} | ({int(SURVIVORS[-1]) + turn} if turn else set())
        history = (*history, Drop(frozenset(gone)), Reposition(), Append((turn % 64,)))
        serve(engine, f"turn {turn}", history)
        pages, _, view, exact = versions(engine, Timeline(history))
        assert (pages[SURVIVORS] == born).all(), "the births are resident"
        of_survivors = np.isin(view.indices, SURVIVORS)
        assert (view.shifts[of_survivors] == -1 - turn).all()
        if mode == "copy":
            assert (exact[of_survivors] >= 0).all()
            moved.append(pool_keys(engine, exact[of_survivors]).astype(np.float32))
        else:
            assert (exact[of_survivors] == -1).all()
    assert (pool_keys(engine, born) == births).all()
    assert counter(engine, "akv:derived_hops_total") == 0
    assert (counter(engine, "akv:copied_pages_total") > TURNS * len(SURVIVORS)) == (mode == "copy")
    if mode == "on_read":
        assert engine.stats().derived_pages == 0
        return
    once = rotated_once(engine, births)
    # Half a unit in the last place, and what float32 adds by itself.
    unit = np.abs(np.spacing(once.astype(births.dtype)).astype(np.float32))
    noise = np.spacing(np.abs(births).max().astype(np.float32))
    assert (np.abs(np.stack(moved) - once) <= (0 if dtype == "float32" else unit / 2) + noise).all()
    hop(engine, history, born)


def hop(engine: Engine, history: History, born: np.ndarray) -> None:
    """C3: where the births, pages `born`, are gone, copies are made of copies, and each is counted."""
    # What was left behind goes first, so that the survivors' latest versions stay.
    while np.isin(born, np.concatenate(engine.cache.cached_pages())).any():
        assert engine.cache.evict(1) == 1
    history = (*history, Drop(frozenset({int(SURVIVORS[0])})), Reposition(), Append((1,)))
    timeline = Timeline(history)
    pages, encoded, view, exact = versions(engine, timeline)
    turned = (pages >= 0) & (encoded != timeline.birth[: timeline.count])
    assert turned[SURVIVORS[1:]].all()
    hops = (turned[view.indices] & (exact < 0) & (view.shifts != 0)).sum()
    serve(engine, "hop", history)
    assert counter(engine, "akv:derived_hops_total") == hops >= len(SURVIVORS) - 1
