"""A reply taken apart, from its beginning or from the middle."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv_jax.chat.messages import ToolCall
from akv_jax.chat.reply import ReplyPart, ReplyStream

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
REPLY = f"<think>\nHm.\n</think>\n\nI call.\n{CALL}\n{CALL}"
WHOLE = ReplyPart("Hm.", "I call.", (ToolCall("f", '{"a": 1}'),) * 2)


def read(pieces: list[str], *, reasoning: bool = True, tools: bool = True, begun: str = "") -> ReplyPart:
    stream = ReplyStream(reasoning=reasoning, tools=tools, begun=begun)
    part = ReplyPart()
    for piece in pieces:
        part += stream.push(piece)
    return part + stream.finish()


@given(st.lists(st.integers(0, len(REPLY)), max_size=12))
def test_parts_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(REPLY)]
    assert read([REPLY[a:b] for a, b in pairwise(edges)]) == WHOLE


@pytest.mark.parametrize(
    ("reasoning", "tools", "expected"),
    [
        (False, False, ReplyPart(content=REPLY)),
        (True, False, ReplyPart("Hm.", f"I call.\n{CALL}\n{CALL}")),
        (False, True, ReplyPart(content="<think>\nHm.\n</think>\n\nI call.", tool_calls=WHOLE.tool_calls)),
    ],
)
def test_what_is_not_looked_for_is_content(reasoning: bool, tools: bool, expected: ReplyPart) -> None:
    assert read([REPLY], reasoning=reasoning, tools=tools) == expected


@pytest.mark.parametrize("cut", range(len(REPLY) + 1))
def test_from_the_middle_of_a_reply(cut: int) -> None:
    """What had been read of the message before the cut and what comes after it are the whole."""
    before = ReplyStream(reasoning=True, tools=True)
    first = before.push(REPLY[:cut])
    rest = read(list(REPLY[cut:]), begun=REPLY[:cut])
    assert first + rest == WHOLE


@pytest.mark.parametrize(
    ("begun", "then", "expected"),
    [
        ("a <tool", "box", ReplyPart(content="box")),
        ("a\n", "b", ReplyPart(content="b")),
        ("a\n<", "\n" + CALL, ReplyPart(tool_calls=WHOLE.tool_calls[:1])),
        ("<thi", "s", ReplyPart(content="s")),
        ("<think>\na\n</th", "em", ReplyPart("em")),
        ("a <tool", "", ReplyPart()),
        ("", "", ReplyPart()),
    ],
)
def test_what_the_client_has_already_does_not_come_again(begun: str, then: str, expected: ReplyPart) -> None:
    assert read([then], begun=begun) == expected
    assert read(list(then), begun=begun) == expected
