"""`tool_choice`, and the grammar of replies that it forces (DESIGN A1).

A forced call is written as `templates/` render it and `tool_calls.py` reads it, to the letter:

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from akv_jax.chat.messages import Tool, describe
from akv_jax.errors import invalid

#: JSON as `json.dumps` writes it, and keywords that the grammar engine lacks are left unchecked.
_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the client wants: no calls, calls if the model likes, or calls and nothing else."""

    mode: Literal["none", "auto", "required"]
    #: The one function to call; None is any.
    name: str | None = None


def parse_tool_choice(value: Any, tools: Sequence[Tool]) -> ToolChoice:
    """OpenAI's `tool_choice`, null for the default. A forced call needs the tool. Raises INVALID_REQUEST."""
    if value is None:
        return ToolChoice("auto" if tools else "none")
    if value in ("none", "auto") and isinstance(value, str):
        return ToolChoice(value if tools else "none")
    if value == "required":
        if not tools:
            raise invalid('"required" needs tools beside it', "tool_choice")
        return ToolChoice("required")
    if not isinstance(value, Mapping) or value.get("type") != "function":
        expected = '"none", "auto", "required" or {"type": "function", "function": {"name": …}}'
        raise invalid(f"expected {expected}, found {describe(value)}", "tool_choice")
    function = value.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in [tool.name for tool in tools]:
        expected = "the name of one of the tools" if tools else "tools beside it"
        raise invalid(f"expected {expected}, found {describe(name)}", "tool_choice.function.name")
    return ToolChoice("required", name)


def arguments_schema(tool: Tool, path: str) -> Mapping[str, Any]:
    """The schema of a forced call's arguments, which are an object. Raises INVALID_REQUEST."""
    if tool.parameters is None:
        return _NO_ARGUMENTS
    kind = tool.parameters.get("type", "object")
    if kind != "object":
        message = f'expected a schema of type "object", as arguments are, found {describe(kind)}'
        raise invalid(message, f"{path}.type")
    return {**tool.parameters, "type": "object"}


def reply_grammar(
    calls: Sequence[tuple[str, Mapping[str, Any]]], content: Mapping[str, Any] | None, *, several: bool
) -> str:
    """A Lark grammar: calls of functions (name, schema of its arguments), or else JSON that fits the schema `content`,
    which may hold options of its own under "x-guidance".

    `several`: whether more than one call may be made.
    """
    rules = [
        "start: calls" + (" | content" if content is not None else ""),
        'calls: call ("\\n" call)*' if several else "calls: call",
        'call: "<tool_call>" rest',
        *_call_rules(calls),
    ]
    if content is not None:
        rules.append(f"content: %json {json.dumps(content)}")
    return "\n".join(rules) + "\n"


def free_grammar(calls: Sequence[tuple[str, Mapping[str, Any]]], *, several: bool) -> str:
    """A Lark grammar: any text, in which the mark of a call begins one of these calls, written as in `reply_grammar`.

    `several`: whether more than one call may be made; if not, the reply ends with the first.
    """
    rules = [
        "start: (lead rest)* tail" if several else "start: tail | lead rest",
        "tail: TEXT",
        # Lazy: it ends with the first mark, whatever a longer text could be.
        'lead[lazy]: TEXT "<tool_call>"',
        r"TEXT: /(.|\n)*/",
        *_call_rules(calls),
    ]
    return "\n".join(rules) + "\n"


def _call_rules(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """The rule `rest`, which is what follows the mark of a call, and those that it needs."""
    forms = [f'"{{\\"name\\": " {_quoted(json.dumps(name, ensure_ascii=False))} ", \\"arguments\\": " a{i} "}}"'
             for i, (name, _) in enumerate(calls)]  # fmt: skip
    return [
        'rest: "\\n" form "\\n</tool_call>"',
        "form: " + " | ".join(f"f{i}" for i in range(len(forms))),
        *(f"f{i}: {form}" for i, form in enumerate(forms)),
        *(f"a{i}: %json {json.dumps({**schema, 'x-guidance': _STYLE})}" for i, (_, schema) in enumerate(calls)),
    ]


def _quoted(text: str) -> str:
    """A Lark string, which is written as a JSON string is."""
    return json.dumps(text, ensure_ascii=False)
