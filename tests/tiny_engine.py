"""The real engine on the spec's tiny models, with one warm runner for each of them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from akv_jax import config as engine_config
from akv_jax.config import Disaggregation, EngineConfig
from akv_jax.disaggregated import DisaggregatedEngine
from akv_jax.engine import Engine, ServingEngine
from akv_jax.models.load import LoadedModel
from akv_jax.request import Output, Request, Sampling
from akv_jax.runtime.lanes import ThreadLanes
from akv_jax.runtime.placement import model_mesh
from akv_jax.runtime.runner import Runner
from akv_jax.side import Side
from spec import model as spec_model
from spec.operations import Append, Operation

#: Query rows of the one executable that a tiny engine has, and so the most prompt tokens of one step.
ROWS = 128


class OneByteTokens:
    """Token i is the character with code 48 + i; all that the engine asks of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes:
        return chr(48 + token_id).encode()

    def is_special(self, token_id: int) -> bool:
        return False


def engine_model(config: spec_model.ModelConfig) -> engine_config.ModelConfig:
    """The engine's ModelConfig with the same field values."""

    def rotary(value: Any) -> engine_config.Rotary:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if value.scaling is not None:
            fields["scaling"] = engine_config.RotaryScaling(**dataclasses.asdict(value.scaling))
        return engine_config.Rotary(**fields)

    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    fields["layers"] = tuple(engine_config.Layer(rotary(layer.rotary), layer.window) for layer in config.layers)
    if config.moe is not None:
        fields["moe"] = engine_config.MoE(**dataclasses.asdict(config.moe))
    return engine_config.ModelConfig(**fields)


def loaded(
    config: engine_config.ModelConfig, params: Any, eos: tuple[int, ...] = (), dtype: str = "float32"
) -> LoadedModel:
    """Weights of that dtype, and a tokenizer of single characters."""
    weights = _cast(params, dtype)
    return LoadedModel(config, weights, cast(Any, OneByteTokens()), None, eos, "", "", config.name, "random")


def _cast(params: Any, dtype: str) -> Any:
    if isinstance(params, dict):
        return {name: _cast(value, dtype) for name, value in params.items()}
    if isinstance(params, list):
        return [_cast(value, dtype) for value in params]
    return np.asarray(params).astype(jnp.dtype(dtype))


class TinyEngine:
    """Makes engines that share one compiled runner. Every row of a step may have its logits returned."""

    def __init__(
        self, config: spec_model.ModelConfig, params: Any, devices: int | None = None, **settings: Any
    ) -> None:
        """`devices`: lay the model over that many of them."""
        sizes = {"context_length": 512, "num_pages": 1024, "max_running_requests": ROWS, "chunked_prefill_size": ROWS}
        self.settings = EngineConfig(
            **{**sizes, "token_buckets": (ROWS,), "max_list_entries": 1 << 14, "tile": 16, **settings}
        )
        self.model = loaded(engine_model(config), params, dtype=self.settings.dtype)
        mesh = None if devices is None else model_mesh(jax.devices()[:devices])
        self.runner = Runner(self.model.config, self.model.params, self.settings, mesh)

    def engine(self, **settings: Any) -> Engine | DisaggregatedEngine:
        """A fresh engine that keeps nothing between requests; `settings` change what no executable depends on."""
        settings = {"disable_radix_cache": True, **settings}
        return Engine(self.model, dataclasses.replace(self.settings, **settings), runner=self.runner)


class TinySides(TinyEngine):
    """The same with prefill and decode apart: engines that share two runners, and threads."""

    def __init__(self, config: spec_model.ModelConfig, params: Any, split: Disaggregation, **settings: Any) -> None:
        super().__init__(config, params, split.prefill, **settings)
        mesh = model_mesh(jax.devices()[split.prefill : split.devices])
        self._decode = Runner(self.model.config, self.model.params, self.settings, mesh)
        self._lanes = ThreadLanes()

    def engine(self, **settings: Any) -> DisaggregatedEngine:
        """Both sides have these settings."""
        config = dataclasses.replace(self.settings, **{"disable_radix_cache": True, **settings})
        sides = (Side(self.model, config, runner) for runner in (self.runner, self._decode))
        return DisaggregatedEngine(self.model, *sides, lanes=self._lanes)


@contextlib.contextmanager
def quick_compiles(quick: bool = True) -> Iterator[None]:
    """Compile in a third of the time, without optimising much: worth it where little is run afterwards."""
    flag = "jax_disable_most_optimizations"
    options = {"xla_cpu_use_fusion_emitters": False} if quick else {}
    compile_with = functools.partialmethod(jax.stages.Lowered.compile, options)
    before = jax.config.read(flag)
    jax.config.update(flag, quick)
    try:
        with mock.patch.object(jax.stages.Lowered, "compile", compile_with):
            yield
    finally:
        jax.config.update(flag, before)


def score(request_id: str, operations: Sequence[Operation], max_tokens: int = 1) -> Request:
    """Asks for the logits of every token appended."""
    count = sum(len(op.tokens) for op in operations if isinstance(op, Append))
    greedy = Sampling(max_tokens=max_tokens, temperature=0.0)
    return Request(request_id, tuple(operations), greedy, logits_at=tuple(range(count)))


def serve(engine: ServingEngine, requests: Sequence[Request], arrivals: Sequence[int] = ()) -> dict[str, list[Output]]:
    """Serve `requests` together to their end, checking the page accounting after every step (DESIGN C7).

    `arrivals`: the step before which each of them is submitted; without it, before the first.
    """
    outputs: dict[str, list[Output]] = {request.request_id: [] for request in requests}
    coming = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    steps = 0
    while coming or engine.busy:
        while coming and coming[0][0] <= steps:
            engine.submit(coming.pop(0)[1])
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check()
        steps += 1
        assert steps < 5000, "the engine does not come to an end"
    return outputs


def empty(engine: ServingEngine) -> None:
    """Flush the cache; nobody may hold a page then."""
    engine.flush_cache()
    stats = engine.stats()
    assert stats.pages_cached + stats.pages_leased + stats.pages_private == 0


def run(engine: ServingEngine, requests: Sequence[Request], arrivals: Sequence[int] = ()) -> dict[str, list[Output]]:
    """`serve`, and then `empty`."""
    outputs = serve(engine, requests, arrivals)
    empty(engine)
    return outputs


def prompt_logits(outputs: Sequence[Output]) -> np.ndarray:
    """Float32 [looked at, vocab] of a request with `logits_at`."""
    (logits,) = [output.prompt_logits for output in outputs if output.prompt_logits is not None]
    return logits


def next_logits(outputs: Sequence[Output]) -> np.ndarray:
    """Float32 [vocab] of a request with `return_logits`."""
    (logits,) = [output.next_logits for output in outputs if output.next_logits is not None]
    return logits


def generated(outputs: Sequence[Output]) -> tuple[int, ...]:
    """The sampled tokens."""
    return tuple(token for output in outputs for token in output.token_ids)
