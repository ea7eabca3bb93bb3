"""SmolLM2 with its own weights in the engine, float32: against the specification, and against transformers.

The text is this project's licence. `make test` gives the specification one BLAS thread, which for it is several times
faster than two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel
from akv_jax.request import Request, Sampling
from akv_jax.runtime.runner import Runner
from benchmarks.transformers_model import llama_in_transformers
from spec.model import Layer, Model, ModelConfig
from spec.operations import Append, Drop, History, Operation, Reposition
from spec.rope import Rotary
from spec.state import State, apply
from tests import tiny_engine
from tests.random_histories import random_history

TOLERANCE = 5e-3
#: Tokens of the longest random history.
MOST = 300
LICENCE = Path(__file__).parents[2] / "LICENSE"

MakeEngine = Callable[[], Engine]


@pytest.fixture(scope="session")
def text(smollm2: LoadedModel) -> tuple[int, ...]:
    """Some 2,000 tokens."""
    return tuple(smollm2.tokenizer.encode(LICENCE.read_text(encoding="utf-8")))


@pytest.fixture
def make_engine(smollm2: LoadedModel, smollm2_runner: Runner) -> MakeEngine:
    return lambda: Engine(smollm2, smollm2_runner.config, runner=smollm2_runner)


@pytest.fixture(scope="session")
def copying_runner(smollm2: LoadedModel, smollm2_runner: Runner) -> Runner:
    """The same, but repositions by copies (DESIGN C8)."""
    return Runner(smollm2.config, smollm2.params, replace(smollm2_runner.config, reposition="copy"))


@pytest.fixture(scope="session")
def spec_model(smollm2: LoadedModel) -> Model:
    """The same weights in float64."""
    values = {field.name: getattr(smollm2.config, field.name) for field in fields(ModelConfig)}
    rotary = smollm2.config.layers[0].rotary
    values["layers"] = (Layer(Rotary(rotary.dim, rotary.base)),) * smollm2.config.num_layers
    return Model.of(ModelConfig(**values), smollm2.params)


# -- against the specification -------------------------------------------------------------------------------------


def three_histories(text: tuple[int, ...]) -> list[History]:
    """Of 100 tokens each. They share their first operations, which the spec then runs once."""
    shared = (
        *(Append(text[:30]), Drop(frozenset(range(8, 14))), Reposition()),
        *(Append(text[30:40]), Drop(frozenset({0, 20, 21, 35})), Append(text[40:88])),
    )
    return [
        (*shared, Append(text[88:100])),
        (
            *(*shared, Append(text[200:203]), Reposition(), Append(text[203:204])),
            *(Drop(frozenset(range(38, 60))), Reposition(), Append(text[300:308])),
        ),
        (
            *(*shared, Reposition(), Drop(frozenset(range(36, 40))), Reposition()),
            *(Append(text[500:504]), Drop(frozenset(range(0, 30, 3)))),
            *(Append(text[504:512]), Drop(frozenset({99}))),
        ),
    ]


def test_three_histories(text: tuple[int, ...], spec_model: Model, make_engine: MakeEngine) -> None:
    """R2: served together, every logit of prompts and of what is generated is the spec's."""
    histories = three_histories(text)
    assert [count_of(history) for history in histories] == [100, 100, 100]
    engine = make_engine()
    requests = [
        replace(tiny_engine.score(str(i), h), sampling=Sampling(3, 0.0, logprobs=True, top_logprobs=20))
        for i, h in enumerate(histories)
    ]
    outputs = tiny_engine.run(engine, requests)
    states: dict[History, State] = {}
    for number, history in enumerate(histories):
        own = outputs[str(number)]
        state = spec_state(spec_model, history, states)
        check_logits(tiny_engine.prompt_logits(own), logits_of(state))
        # The last token that comes out is not computed any more.
        tokens = tiny_engine.generated(own)
        state = apply(state, Append(tokens[:-1]), spec_model)
        for output, logits in zip(own, logits_of(state)[99:], strict=True):
            (reported,) = output.logprobs
            right = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            ids, values = zip(*reported.top, strict=True)
            np.testing.assert_allclose(values, right[list(ids)], rtol=0, atol=TOLERANCE)
            check_choice(reported.token_id, logits)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_twenty_histories(
    text: tuple[int, ...], spec_model: Model, make_engine: MakeEngine, copying_runner: Runner, seed: int
) -> None:
    """R2, C8: random histories of up to 300 tokens, a fifth of them that long; keys turned as read, and as copies."""
    history = history_in_words(seed, text)
    expected = logits_of(spec_state(spec_model, history, {}))
    on_read = make_engine()
    for engine in (on_read, Engine(on_read.model, copying_runner.config, runner=copying_runner)):
        outputs = tiny_engine.run(engine, [tiny_engine.score("a", history)])
        check_logits(tiny_engine.prompt_logits(outputs["a"]), expected)


def test_how_long_the_twenty_histories_are() -> None:
    """Without the model: the random ones reach as far as they are meant to."""
    sizes = sorted(count_of(history_in_words(seed, tuple(range(2000)))) for seed in range(20))
    assert sizes[-4:] == [MOST] * 4 and sizes[10] > 200


def history_in_words(seed: int, text: tuple[int, ...]) -> History:
    """A random history on the tokens of `text`, up to where it has `MOST` of them; the larger the seed, the longer."""
    generator, left = np.random.default_rng(seed), text[seed * 80 :][:MOST]
    result: list[Operation] = []
    for operation in random_history(generator, max_operations=10 + 2 * seed, max_run=60):
        if isinstance(operation, Append):
            operation, left = Append(left[: len(operation.tokens)]), left[len(operation.tokens) :]
        result.append(operation)
        if not left:
            break
    return tuple(result)


def spec_state(model: Model, history: History, states: dict[History, State]) -> State:
    """What the spec makes of it. `states` keeps that of every beginning of it, for histories that share some."""
    if not history:
        return State()
    if history not in states:
        states[history] = apply(spec_state(model, history[:-1], states), history[-1], model)
    return states[history]


def logits_of(state: State) -> np.ndarray:
    return np.array([query.logits for query in state.trajectory])


def check_logits(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    for row, logits in zip(actual, expected, strict=True):
        check_choice(int(row.argmax()), logits)


def check_choice(token: int, expected: np.ndarray) -> None:
    """The greedy token is the expected one where its lead is larger than what the logits may be off by."""
    second, best = np.partition(expected, -2)[-2:]
    assert token == expected.argmax() or best - second <= TOLERANCE


def count_of(history: History) -> int:
    return sum(len(operation.tokens) for operation in history if isinstance(operation, Append))


# -- against transformers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def theirs(smollm2: LoadedModel) -> Any:
    """Transformers' Llama with the very same float32 weights; skips where torch or transformers are absent."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    torch.set_num_threads(2)
    return llama_in_transformers(smollm2)


@pytest.mark.parametrize("size", [70, pytest.param(400, marks=pytest.mark.long), 1500])
def test_plain_chats(
    smollm2: LoadedModel, text: tuple[int, ...], theirs: Any, make_engine: MakeEngine, size: int
) -> None:
    """R2: the next token's logits after a chat of that many tokens, computed in the fewest possible forwards."""
    import torch

    encode = smollm2.tokenizer.encode
    head, tail = encode("<|im_start|>user\n"), encode("<|im_end|>\n<|im_start|>assistant\n")
    chat = (*head, *text[: size - len(head) - len(tail)], *tail)
    with torch.no_grad():
        expected = theirs(torch.tensor([chat]), logits_to_keep=1).logits[0, -1].numpy()
    request = Request("a", (Append(chat),), Sampling(1, 0.0), return_logits=True)
    own = tiny_engine.run(make_engine(), [request])["a"]
    check_logits(tiny_engine.next_logits(own)[None], expected[None])
    assert own[-1].usage is not None and own[-1].usage.forwards == -(-size // 128)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # past_key_values gets a new name
def test_drop_and_reposition_by_hand(text: tuple[int, ...], theirs: Any, make_engine: MakeEngine) -> None:
    """L2, L3: entries are taken out of transformers' own KV cache, and other keys turned by its own rotation."""
    import torch
    import transformers

    cache, logits = transformers.DynamicCache(config=theirs.config), []
    entries: list[int] = []  # logical indices of what the cache holds
    positions: list[int] = []
    operations: list[Operation] = []
    appended = 0

    def append(size: int, position: int) -> None:
        """Tokens one after another from `position` on, in one forward."""
        nonlocal appended
        tokens, where = text[appended : appended + size], list(range(position, position + size))
        ids, places = torch.tensor([tokens]), torch.tensor([where])
        out = theirs(ids, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits.append(out.logits[0, -1].numpy())
        entries.extend(range(appended, appended + size))
        positions.extend(where)
        appended += size
        operations.append(Append(tokens))

    def drop(indices: set[int]) -> None:
        kept = [place for place, index in enumerate(entries) if index not in indices]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        entries[:], positions[:] = [entries[place] for place in kept], [positions[place] for place in kept]
        operations.append(Drop(frozenset(indices)))

    def reposition() -> None:
        turns = torch.tensor([[place - position for place, position in enumerate(positions)]])
        rotate = sys.modules[type(theirs).__module__].apply_rotary_pos_emb
        for layer in cache.layers:
            layer.keys = rotate(layer.keys, layer.keys, *theirs.model.rotary_emb(layer.keys, turns))[1]
        positions[:] = range(len(positions))
        operations.append(Reposition())

    with torch.no_grad():
        append(300, position=0)
        drop({*range(40, 170), 7})
        append(60, position=300)
        drop({*range(200, 250), 310})
        reposition()
        append(100, position=len(entries))
        drop(set(range(20)))
        reposition()
        append(2, position=len(entries))
    looked_at = (299, 359, 459, 461)
    request = Request("a", tuple(operations), Sampling(1, 0.0), logits_at=looked_at)
    own = tiny_engine.run(make_engine(), [request])["a"]
    check_logits(tiny_engine.prompt_logits(own), np.stack(logits))
