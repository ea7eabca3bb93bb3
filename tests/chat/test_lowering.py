"""From requests to operations (DESIGN A1-A3, A5), against the definition in `spec/`."""

import gzip
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv_jax.chat.cache_field import PARTS, CacheField, DropEntry, parse_cache_field
from akv_jax.chat.choose_template import ChatFormat
from akv_jax.chat.lowering import PreparedChat, lower, prepare_chat
from akv_jax.chat.messages import Message, ToolCall, parse_messages, parse_tools
from akv_jax.chat.tokenise import TokenisedChat
from akv_jax.errors import Reason, RequestError
from spec.operations import Append, Drop, Reposition, canonical
from spec.request import TokenRange, history_of

MESSAGES = (
    Message("system", "Mend clocks."),
    Message("user", "It stops at noon."),
    Message("assistant", "Let me look.", "Could be the spring.", (ToolCall("open", "{}"),)),
    Message("tool", "spring: broken\n" * 10),
    Message("assistant", "The spring is broken."),
    Message("user", "Mend it."),
)


def prepare(chat: ChatFormat, body: dict, messages: tuple[Message, ...] = MESSAGES, **options) -> PreparedChat:
    return prepare_chat(chat, messages, parse_cache_field(body), **options)


def kinds(prepared: PreparedChat) -> list[str]:
    return [type(operation).__name__ for operation in prepared.operations]


def test_no_cache_field_is_one_append(chat: ChatFormat) -> None:
    prepared = prepare(chat, {})
    assert prepared.operations == (Append(prepared.token_ids),)


def test_drop_then_reposition_at_one_boundary(chat: ChatFormat) -> None:
    prepared = prepare(chat, {"cache": {"drop": {"4": [2, 3]}, "reposition": [4]}})
    assert kinds(prepared) == ["Append", "Drop", "Reposition", "Append"]
    spans = prepared.message_spans
    assert prepared.operations[0] == Append(prepared.token_ids[: spans[4][1]])
    assert prepared.operations[1] == Drop(frozenset(range(spans[2][0], spans[3][1])))


def test_trailing_boundary_runs_before_the_generation_prompt(chat: ChatFormat) -> None:
    prepared = prepare(chat, {"cache": {"drop": {"5": [5]}, "reposition": [5]}})
    assert kinds(prepared) == ["Append", "Drop", "Reposition", "Append"]
    start, end = prepared.generation_span
    assert prepared.operations[3] == Append(prepared.token_ids[start:end])
    assert chat.tokenizer.decode(prepared.token_ids[start:end]) == "<|im_start|>assistant\n"


def test_boundaries_to_come_are_inert(chat: ChatFormat) -> None:
    later = {"6": [0], "80": [70, {"message": 75, "tokens": [0, 10**9]}, {"message": 0, "tokens": [0, 10**9]}]}
    assert prepare(chat, {"cache": {"drop": later, "reposition": [6, 99]}}) == prepare(chat, {})


def test_boundary_of_a_continued_message_is_inert(chat: ChatFormat) -> None:
    messages = MESSAGES[:5]
    body = {"cache": {"drop": {"3": [1], "4": [{"message": 4, "tokens": [0, 999]}]}, "reposition": [4]}}
    prepared = prepare(chat, body, messages, continue_final_message=True)
    assert kinds(prepared) == ["Append", "Drop", "Append"]
    assert chat.tokenizer.decode(prepared.token_ids).endswith("The spring is broken.")
    assert prepared.generation_span == (len(prepared.token_ids),) * 2


def test_empty_drops_are_no_operation(chat: ChatFormat) -> None:
    body = {
        "cache": {
            "drop": {"1": [], "2": [{"message": 1, "part": "tool_calls"}], "3": [{"message": 1, "tokens": [2, 2]}]}
        }
    }
    assert prepare(chat, body) == prepare(chat, {})


def test_a_second_drop_of_the_same_is_no_operation(chat: ChatFormat) -> None:
    once = prepare(chat, {"cache": {"drop": {"3": [1]}}})
    assert prepare(chat, {"cache": {"drop": {"3": [1, 1], "4": [1], "5": [1]}}}) == once


def test_token_ranges(chat: ChatFormat) -> None:
    start, end = prepare(chat, {}).message_spans[3]
    length = end - start
    for tokens, expected in (
        ([4, 10], range(start + 4, start + 10)),
        ([-3, None], range(end - 3, end)),
        ([0, length], range(start, end)),
        ([-length, -1], range(start, end - 1)),
        ([10, -5], range(start + 10, end - 5)),
    ):
        prepared = prepare(chat, {"cache": {"drop": {"3": [{"message": 3, "tokens": tokens}]}}})
        assert prepared.operations[1] == Drop(frozenset(expected))


def test_overlapping_ranges_and_parts_are_united(chat: ChatFormat) -> None:
    start, end = prepare(chat, {}).message_spans[2]
    entries = [{"message": 2, "part": part} for part in PARTS]
    entries += [
        {"message": 2, "tokens": [0, 8]},
        {"message": 2, "tokens": [4, -4]},
        {"message": 2, "tokens": [-6, None]},
    ]
    prepared = prepare(chat, {"cache": {"drop": {"2": entries}}})
    assert prepared.operations[1] == Drop(frozenset(range(start, end)))


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        ([0, 10_000], ".tokens[1]"),
        ([10_000, None], ".tokens[0]"),
        ([-10_000, 5], ".tokens[0]"),
        ([0, -10_000], ".tokens[1]"),
        ([10**30, None], ".tokens[0]"),
        ([-2, 3], ".tokens"),
    ],
)
@pytest.mark.parametrize("name", ["cache.drop", "drop_message", "drop_rule.drop_messages"])
def test_ranges_out_of_bounds_are_refused(chat: ChatFormat, tokens: list, param: str, name: str) -> None:
    schedule = {"4": [1, {"message": 3, "tokens": tokens}]}
    bodies = {
        "cache.drop": {"cache": {"drop": schedule}},
        "drop_message": {"drop_message": schedule},
        "drop_rule.drop_messages": {"drop_rule": {"type": "message_drop", "drop_messages": schedule}},
    }
    with pytest.raises(RequestError) as caught:
        prepare(chat, bodies[name])
    assert (caught.value.reason, caught.value.param) == (Reason.INVALID_CACHE, f"{name}.4[1]{param}")
    assert "expected" in caught.value.message


def test_the_first_of_equal_bad_entries_is_named(chat: ChatFormat) -> None:
    bad = {"message": 3, "tokens": [0, 10_000]}
    with pytest.raises(RequestError) as caught:
        prepare(chat, {"cache": {"drop": {"4": [0, bad, bad]}}})
    assert caught.value.param == "cache.drop.4[1].tokens[1]"


def test_thinking_drop(chat: ChatFormat) -> None:
    prepared = prepare(chat, {"drop_rule": {"type": "thinking_drop"}, "reposition": [2]})
    assert kinds(prepared) == ["Append", "Drop", "Reposition", "Append"]
    (drop,) = (op for op in prepared.operations if isinstance(op, Drop))
    dropped = chat.tokenizer.decode([prepared.token_ids[i] for i in sorted(drop.indices)])
    assert dropped == "<think>\nCould be the spring.\n</think>\n\n"


def test_report_active_is_passed_on(chat: ChatFormat) -> None:
    assert prepare(chat, {"cache": {"report": "active"}}).report_active
    assert not prepare(chat, {"cache": {"drop": {}}}).report_active


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (MESSAGES, {"continue_final_message": True}, "continue_final_message"),
        (MESSAGES[:5], {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_impossible_continuations(chat: ChatFormat, messages: tuple, options: dict, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(chat, {}, messages, **options)
    assert caught.value.param == param


def test_prompt_without_generation_prompt(chat: ChatFormat) -> None:
    prepared = prepare(chat, {}, add_generation_prompt=False)
    assert prepared.message_spans[-1][1] == len(prepared.token_ids)


# --- against the specification -----------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, dict[int, list[DropEntry]], list[int], bool]:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    messages = [[100 * k + i for i in range(size)] for k, size in enumerate(sizes)]
    generation = draw(st.integers(0, 3))
    drop: dict[int, list[DropEntry]] = {}
    for trigger in draw(st.sets(st.integers(0, len(sizes) + 1), max_size=4)):
        drop[trigger] = []
        for message in draw(st.lists(st.integers(0, min(trigger, len(sizes) - 1)), max_size=4)):
            size = sizes[message]
            start, end = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
            start = draw(st.sampled_from([start, start - size])) if start < size else start
            end = draw(st.sampled_from([end, end - size])) if end < size else draw(st.sampled_from([size, None]))
            tokens = draw(st.sampled_from([None, (start, end)]))
            drop[trigger].append(DropEntry(message, tokens=tokens))
    reposition = sorted(draw(st.sets(st.integers(0, len(sizes) + 1), max_size=4)))
    return messages, generation, drop, reposition, draw(st.booleans())


@given(cases())
def test_lowering_is_what_the_specification_says(case: tuple) -> None:
    messages, generation, drop, reposition, continued = case
    prompt = [7] * (0 if continued else generation)
    ids = tuple(token for message in (*messages, prompt) for token in message)
    edges = [sum(map(len, messages[:k])) for k in range(len(messages) + 1)]
    spans = tuple(pairwise(edges))
    tokenised = TokenisedChat(ids, spans, (edges[-1], len(ids)), tuple({} for _ in messages))
    field = CacheField({k: tuple(entries) for k, entries in drop.items()}, tuple(reposition))
    lowered = lower(tokenised, field, len(messages) - continued)
    ranges = {k: [TokenRange(e.message, *(e.tokens or (0, None))) for e in entries] for k, entries in drop.items()}
    history = history_of(messages, ranges, reposition, prompt, continued)
    assert canonical(lowered) == canonical(history)
    assert all(op.indices for op in lowered if isinstance(op, Drop))
    assert all(op.tokens for op in lowered if isinstance(op, Append))


# --- recorded requests and runs ----------------------------------------------------------------------------------


def test_recorded_requests(chat: ChatFormat, shared: Path) -> None:
    seen = []
    for path in sorted((shared / "requests").glob("*.json")):
        body = json.loads(path.read_text("utf-8"))["body"]
        messages, tools = parse_messages(body["messages"]), parse_tools(body.get("tools"))
        if "cache" not in body:
            prepared = prepare_chat(chat, messages, parse_cache_field(body), tools)
            assert prepared.operations == (Append(prepared.token_ids),)
            seen.append("prepared")
            continue
        with pytest.raises(RequestError) as caught:
            parse_cache_field(body)
        assert (caught.value.reason, caught.value.param) == (Reason.INVALID_CACHE, "cache.drop"), path.name
        seen.append("refused")
    assert set(seen) == {"prepared", "refused"}


@pytest.fixture(scope="module")
def runs(shared: Path) -> list[list[dict]]:
    """One run of each kind: mini-SWE-agent with and without reasoning, tau-bench."""
    with gzip.open(shared / "trajectories" / "agents.jsonl.gz", "rt", encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    chosen = {record["id"].split("/")[0]: record["messages"] for record in reversed(records)}
    assert len(chosen) >= 3
    return list(chosen.values())


def test_recorded_runs_grow_by_appending(chat: ChatFormat, runs: list[list[dict]]) -> None:
    for run in runs:
        messages = parse_messages(run[:100])
        whole = chat.tokenise(messages, generation_prompt=False)
        bounds = [*(start for start, _ in whole.message_spans), len(whole.token_ids)]
        assert bounds == sorted(set(bounds))
        for k in (1, 2, 3, 10, 37, len(messages) - 1):
            shorter = prepare_chat(chat, messages[:k], CacheField())
            assert shorter.message_spans == whole.message_spans[:k]
            before_reply = shorter.token_ids[: shorter.generation_span[0]]
            assert before_reply == whole.token_ids[: len(before_reply)]
            if messages[k].role == "assistant":
                assert shorter.token_ids == whole.token_ids[: len(shorter.token_ids)]


def test_recorded_runs_with_a_rolling_schedule(chat: ChatFormat, runs: list[list[dict]]) -> None:
    for run in runs:
        messages = parse_messages(run[:100])
        tools = [k for k, message in enumerate(messages) if message.role == "tool"]
        drop = {str(later): [tool] for tool, later in zip(tools, tools[4:])}
        prepared = prepare(chat, {"cache": {"drop": drop, "reposition": tools[4:]}}, messages)
        assert sum(isinstance(op, Drop) for op in prepared.operations) == len(drop)
        assert sum(isinstance(op, Reposition) for op in prepared.operations) == len(drop)
        appended = [token for op in prepared.operations if isinstance(op, Append) for token in op.tokens]
        assert tuple(appended) == prepared.token_ids


def test_a_long_run_is_prepared_quickly(chat: ChatFormat, runs: list[list[dict]]) -> None:
    messages = parse_messages(max(runs, key=len)[:100])
    prepare(chat, {}, messages)
    start = time.perf_counter()
    prepared = prepare(chat, {}, messages)
    assert len(prepared.token_ids) > 10_000
    assert time.perf_counter() - start < 0.5  # about 0.01 s, but machines are shared


def test_many_entries_over_many_tokens(chat: ChatFormat) -> None:
    """10^5 entries that name 10^5 tokens over and over."""
    messages = (Message("user", "word " * 2_000),) * 50
    half = [{"message": k % 50, "tokens": [k % 1_000, None]} for k in range(100_000)]
    body = {"cache": {"drop": {"49": half, **{str(k): list(range(k + 1)) for k in range(49)}}}}
    start = time.perf_counter()
    prepared = prepare(chat, body, messages)
    assert time.perf_counter() - start < 5
    assert len(prepared.token_ids) > 100_000
    dropped = [op.indices for op in prepared.operations if isinstance(op, Drop)]
    assert sum(map(len, dropped)) == len(frozenset().union(*dropped))
