"""Tool calls and reasoning in generated text, whole and as a stream."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv_jax.chat.choose_template import ChatFormat
from akv_jax.chat.messages import Message, ToolCall
from akv_jax.chat.reasoning import ReasoningStream
from akv_jax.chat.template import render
from akv_jax.chat.tool_calls import ToolCallStream, parse_tool_calls


def call(name: str = "f", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CASES = {
    "none": ("just text", "just text", []),
    "one": (call(a=1), "", [("f", '{"a": 1}')]),
    "after content": ("I look.\n" + call(a=1), "I look.", [("f", '{"a": 1}')]),
    "two": (call(a=1) + "\n" + call("g"), "", [("f", '{"a": 1}'), ("g", "{}")]),
    "content behind": (call() + "\n\nthen this\n", "then this\n", [("f", "{}")]),
    "compact": ('<tool_call>{"name":"f","arguments":{"x":"é"}}</tool_call>', "", [("f", '{"x": "é"}')]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    "arguments as text": ('<tool_call>{"name": "f", "arguments": "{\\"a\\""}</tool_call>', "", [("f", '{"a"')]),
    "newline in a string": (
        '<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>',
        "",
        [("f", '{"s": "a\\nb"}')],
    ),
    "marks in a string": (call(s="</tool_call> <tool_call> x"), "", [("f", '{"s": "</tool_call> <tool_call> x"}')]),
    "broken json": ("<tool_call>{name: f}</tool_call>", "<tool_call>{name: f}</tool_call>", []),
    "broken then good": ("<tool_call>{</tool_call>\n" + call(), "<tool_call>{</tool_call>", [("f", "{}")]),
    "open string then good": (
        '<tool_call>{"name": "x</tool_call> ' + call(),
        '<tool_call>{"name": "x</tool_call> ',
        [("f", "{}")],
    ),
    "never closed": ('a\n<tool_call>\n{"name": "f"', 'a\n<tool_call>\n{"name": "f"', []),
    "open inside open": ("<tool_call>\n" + call(), "<tool_call>", [("f", "{}")]),
    "not an object": ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
    "nan": ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',) * 2 + ([],),
    "lone surrogate": ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>',) * 2 + ([],),
    "deep": ("<tool_call>" + "[" * 5000 + "</tool_call>",) * 2 + ([],),
    "start of a mark": ("a <tool_cal", "a <tool_cal", []),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_are_found(name: str) -> None:
    text, content, calls = CASES[name]
    assert parse_tool_calls(text) == (content, tuple(ToolCall(*c) for c in calls))
    stream = ToolCallStream()
    one_by_one = [*(event for character in text for event in stream.push(character)), *stream.finish()]
    assert "".join(e for e in one_by_one if isinstance(e, str)) == content
    assert [e for e in one_by_one if isinstance(e, ToolCall)] == [ToolCall(*c) for c in calls]


SNIPPETS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n", call(a=1), call(s="</tool_call>"), '{"name": "f"}', '"', "<", "text", " "]
)


@given(st.lists(SNIPPETS, max_size=8).map("".join), st.data())
def test_stream_gives_what_the_whole_gives(text: str, data: st.DataObject) -> None:
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    stream = ToolCallStream()
    events = []
    for a, b in zip([0, *edges], [*edges, len(text)]):
        events += stream.push(text[a:b])
    events += stream.finish()
    assert "" not in events
    content, calls = parse_tool_calls(text)
    assert "".join(e for e in events if isinstance(e, str)) == content
    assert tuple(e for e in events if isinstance(e, ToolCall)) == calls


def test_content_is_not_kept_waiting() -> None:
    stream = ToolCallStream()
    assert stream.push("Let me see") == ["Let me see"]
    assert stream.push(".\n<tool") == ["."]
    assert stream.push("box>") == ["\n<toolbox>"]
    assert stream.finish() == []


def split(text: str, *, opened: bool = False) -> tuple[str, str]:
    stream = ReasoningStream(opened=opened)
    pieces = [stream.push(text), stream.finish()]
    return "".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("plain", "", "plain"),
        ("<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        ("<think>hm</think>yes", "hm", "yes"),
        ("<think>\n\nhm\n\n</think>\n\n\nyes\n", "\nhm\n", "\nyes\n"),
        ("<think>\nnever closed", "never closed", ""),
        ("<think></think>", "", ""),
        ("say <think>x</think>", "", "say <think>x</think>"),
        ("<thin", "", "<thin"),
        ("", "", ""),
    ],
)
def test_reasoning_is_split_off(text: str, reasoning: str, content: str) -> None:
    assert split(text) == (reasoning, content)
    stream = ReasoningStream()
    one_by_one = [*(stream.push(character) for character in text), stream.finish()]
    assert "".join(p.reasoning for p in one_by_one) == reasoning
    assert "".join(p.content for p in one_by_one) == content


def test_reasoning_opened_by_the_prompt() -> None:
    assert split("hm\n</think>\n\nyes", opened=True) == ("hm", "yes")


@given(st.text("<>/think\n a", max_size=20), st.text("<>/think\n a", max_size=20), st.data())
def test_reasoning_stream_gives_what_the_whole_gives(inner: str, after: str, data: st.DataObject) -> None:
    text = (
        data.draw(st.sampled_from(["<think>", "<think>\n", ""])) + inner + data.draw(st.sampled_from(["</think>", ""]))
    )
    text += after
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    stream = ReasoningStream()
    pieces = [stream.push(text[a:b]) for a, b in zip([0, *edges], [*edges, len(text)])] + [stream.finish()]
    assert ("".join(p.reasoning for p in pieces), "".join(p.content for p in pieces)) == split(text)


def test_what_the_template_writes_is_read_back(chat: ChatFormat) -> None:
    calls = (ToolCall("f", '{"a": "</think>"}'), ToolCall("g", "{}"))
    message = Message("assistant", "First.\n", "Hm\n\nwell", calls)
    opening = (Message("system", "s"),)
    text = render(chat.template, (*opening, message)).removeprefix(render(chat.template, opening))
    body = text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    reasoning, rest = split(body)
    assert (reasoning, *parse_tool_calls(rest)) == (message.reasoning, message.content, calls)
