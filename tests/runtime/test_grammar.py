"""Constrained generation: masks that follow the text, and what happens at its end."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import numpy as np
import pytest

from akv_jax.chat.detokenizer import TextStream
from akv_jax.chat.tool_choice import free_grammar, reply_grammar
from akv_jax.config import EngineConfig
from akv_jax.engine import Engine
from akv_jax.models.load import LoadedModel
from akv_jax.request import Request, Sampling
from akv_jax.runtime.generation import Generation
from akv_jax.runtime.grammar import GrammarError, GrammarState, Vocabulary
from spec.operations import Append
from tests.tiny_engine import generated, run


@pytest.fixture(scope="module")
def vocabulary(model: LoadedModel) -> Vocabulary:
    return Vocabulary(model.tokenizer, model.config.vocab_size, model.eos_token_ids)


def push(state: GrammarState, model: LoadedModel, text: str) -> None:
    for token in model.tokenizer.encode(text):
        assert state.allowed()[token]
        state.push(token)


def texts(state: GrammarState, model: LoadedModel) -> set[str]:
    return {model.tokenizer.decode([int(token)]) for token in np.flatnonzero(state.allowed())}


def test_the_mask_follows_the_text(vocabulary: Vocabulary, model: LoadedModel) -> None:
    state = vocabulary.json_schema({"enum": ["hello", "help", 7]}).start()
    assert state.allowed().shape == (model.config.vocab_size,)
    assert texts(state, model) == {'"', "7"}
    push(state, model, '"')
    # Tokens of several characters too, where all of them fit.
    assert texts(state, model) >= {"h", "he", "hell"} and "hello" not in texts(state, model)
    push(state, model, "hel")
    assert texts(state, model) == {"l", "p"}
    push(state, model, 'p"')
    assert state.complete and not state.failed
    assert set(np.flatnonzero(state.allowed())) == set(model.eos_token_ids)


def test_the_end_is_allowed_exactly_where_the_text_may_end(vocabulary: Vocabulary, model: LoadedModel) -> None:
    state = vocabulary.json_schema({"type": "integer"}).start()
    ends = list(model.eos_token_ids)
    for digit in "123":
        assert state.allowed()[ends].all() == (digit != "1")
        push(state, model, digit)
        assert not state.complete
    state.push(ends[0])
    assert state.complete


def test_copies_do_not_share_their_place(vocabulary: Vocabulary, model: LoadedModel) -> None:
    grammar = vocabulary.json_schema({"const": "ab"})
    first, second = grammar.start(), grammar.start()
    push(first, model, '"a')
    assert texts(first, model) == {"b"} and texts(second, model) == {'"'}
    assert texts(grammar.after('"ab').start(), model) == {'"'}
    assert texts(grammar.start(), model) == {'"'}
    with pytest.raises(GrammarError):
        grammar.after("x")


def test_a_model_without_end_tokens(model: LoadedModel) -> None:
    vocabulary = Vocabulary(model.tokenizer, model.config.vocab_size, ())
    state = vocabulary.json_schema({"type": "integer"}).start()
    push(state, model, "12")
    assert state.allowed().shape == (model.config.vocab_size,)
    assert texts(state, model) == set("0123456789")


def test_blanks_come_to_an_end(vocabulary: Vocabulary, model: LoadedModel) -> None:
    state = vocabulary.json_schema({"type": "object"}).start()
    push(state, model, "{" + "\n" * 64)
    assert "\n" not in texts(state, model)


@pytest.mark.parametrize(
    "schema", [{"type": "wizard"}, {"$ref": "#"}, {"enum": []}, {"pattern": "(", "type": "string"}]
)
def test_hopeless_schemas_are_refused(vocabulary: Vocabulary, schema: Any) -> None:
    with pytest.raises(GrammarError) as caught:
        vocabulary.json_schema(schema)
    assert str(caught.value) and "\n" not in str(caught.value)


HOSTILE: dict[str, Any] = {
    "alternatives": {"anyOf": [{"const": str(i) * 20} for i in range(2000)]},
    "pattern": {"type": "string", "pattern": "(a|b|ab)*" * 50 + "c"},
    "counts": {"type": "string", "pattern": "(x{1000}){1000}"},
    "long": {"enum": [f"value number {i} of many, and each of them is long" for i in range(50_000)]},
    "counts of all": {"type": "string", "pattern": "^(a{1000}){1000}$"},
    "required": {"type": "object", "required": [f"k{i}" for i in range(2000)]},
    "items": {"type": "array", "minItems": 10**9, "maxItems": 10**9},
    "nested": json.loads('{"properties":{"a":' * 40 + "{}" + "}}" * 40),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_cost_little(vocabulary: Vocabulary, model: LoadedModel, name: str) -> None:
    """Refused, or followed for a while within bounds, in another thread than compiled them, as in the engine."""
    begun = time.process_time()
    try:
        state = vocabulary.json_schema(HOSTILE[name]).start()
    except GrammarError:
        return
    finally:
        # Seconds. The worst takes half of one, and without a bound on the steps five.
        assert time.process_time() - begun < 2
    steps: list[int] = []

    def follow() -> None:
        while not (state.complete or state.failed) and len(steps) < 50:
            token = int(np.flatnonzero(state.allowed())[0])
            state.push(token)
            steps.append(token)

    thread = threading.Thread(target=follow)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and steps


def test_a_large_enum_is_no_hostile_schema(vocabulary: Vocabulary) -> None:
    vocabulary.json_schema({"enum": [f"value number {i} of many" for i in range(10_000)]})


def test_a_grammar_that_gives_up_cuts_the_reply(model: LoadedModel) -> None:
    """Its own bounds, not the model, end the text: that is no stop."""

    class GivenUp:
        complete, failed = False, True

        def push(self, token: int) -> None: ...

    def generation() -> Generation:
        stream = TextStream(model.tokenizer)
        ends = frozenset(model.eos_token_ids)
        return Generation(Sampling(), np.zeros(1, np.int64), 0, 100, ends, stream, GivenUp())  # type: ignore[arg-type]

    assert generation().push(model.tokenizer.encode("a")[0]) == ("a", "length")
    assert generation().push(model.eos_token_ids[0]) == ("", "length")


def test_forced_calls_are_written_as_they_are_rendered(vocabulary: Vocabulary, model: LoadedModel) -> None:
    calls = [('say "é"\n', {"properties": {"to": {"const": "you"}}, "required": ["to"]}), ("wait", {"type": "object"})]
    text = '<tool_call>\n{"name": "say \\"é\\"\\n", "arguments": {"to": "you"}}\n</tool_call>'
    one = vocabulary.lark(reply_grammar(calls, None, several=False))
    assert one.after(text).start().complete
    several = vocabulary.lark(reply_grammar(calls, None, several=True)).after(text).start()
    assert not several.complete and several.allowed()[list(model.eos_token_ids)].all()
    push(several, model, '\n<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>')
    either = vocabulary.lark(reply_grammar(calls, {"const": 5}, several=False)).start()
    assert texts(either, model) == {"<", "5"}


def test_a_retracted_request_goes_on_where_its_grammar_was(vocabulary: Vocabulary, model: LoadedModel) -> None:
    """Two replies that do not fit the pool together are what each is alone."""
    config = EngineConfig(
        context_length=256,
        num_pages=80,
        max_running_requests=4,
        chunked_prefill_size=32,
        max_list_entries=1 << 12,
        tile=16,
        token_buckets=(32,),
    )
    engine = Engine(model, config)
    words = [
        {"type": "array", "items": {"enum": ["one", "two", True]}, "minItems": 9, "maxItems": 9},
        {"const": "a text of some length, which takes many pages"},
    ]

    def request(k: int) -> Request:
        sampling = Sampling(max_tokens=70, seed=k, grammar=vocabulary.json_schema(words[k]))
        return Request(f"r{k}", (Append(tuple(range(20 + k, 30 + k))),), sampling)

    alone = [run(engine, [request(k)])[f"r{k}"] for k in range(2)]
    assert engine.stats().preemptions_total == 0
    together = run(engine, [request(0), request(1)])
    assert engine.stats().preemptions_total > 0
    for k in range(2):
        assert generated(together[f"r{k}"]) == generated(alone[k])
        assert "".join(output.text for output in together[f"r{k}"]) == "".join(output.text for output in alone[k])
    assert json.loads("".join(output.text for output in together["r1"])) == words[1]["const"]


@pytest.mark.parametrize("several", [True, False])
def test_a_call_in_free_text(vocabulary: Vocabulary, model: LoadedModel, several: bool) -> None:
    """Any text, also one that nearly begins a call; behind the mark nothing but a call; an end but within one."""
    far = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
    state = vocabulary.lark(free_grammar([("look", far), ("go", far)], several=several)).start()
    ends = set(model.eos_token_ids)

    def may_end() -> bool:
        return ends <= set(np.flatnonzero(state.allowed()).tolist())

    for text in ("", "a < b, ", "naïve\n", "</tool_call> <tool_cal", "s> "):
        push(state, model, text)
        assert may_end()
    push(state, model, "<tool_call>")
    assert texts(state, model) == {"\n"} and not may_end()
    push(state, model, '\n{"name": "')
    assert texts(state, model) >= {"l", "g"} and "x" not in texts(state, model)
    push(state, model, 'go", "arguments": {"far": ')
    assert texts(state, model) == {"t", "f"}
    push(state, model, "true}}\n</tool_call>")
    assert state.complete == (not several) and may_end()
    if several:
        push(state, model, " and <tool_call>\n")
        assert texts(state, model) >= {"{"} and "x" not in texts(state, model)
