"""Chat messages and tool declarations as clients send them, made uniform (DESIGN A1, A4, A10).

Clients differ: content is a string, a list of text parts, null or absent; `tool_calls` is null; keys of their own are
mixed in. Everything here takes decoded JSON and gives frozen values, or a `RequestError` whose `param` is the path of
the value at fault (`messages[3].content[0]`). Text is kept as it came: CR line ends, control and escape characters too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from akv_jax.errors import invalid

Role = Literal["system", "user", "assistant", "tool"]

#: Roles that clients send, and the role that they are rendered as.
ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}

#: Types of content parts that are text, and the key that holds it.
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. `arguments` is JSON text, as in OpenAI's API."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Absent text is empty; `token_ids` is None unless the client sent exact ids (DESIGN A4)."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: tuple[int, ...] | None = None
    name: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A declared tool; `declaration` is the JSON text of the whole object that the client sent."""

    name: str
    declaration: str
    #: JSON schema of the arguments; None where the client sent none, for a function without any.
    parameters: Mapping[str, Any] | None = None
    #: Calls must fit `parameters`, also those at the model's choice.
    strict: bool = False


def describe(value: object) -> str:
    """What was found, for an error message: short, and in JSON's words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**18 else "a number of more than 18 digits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, Mapping):
        return "an object"
    return f"a value of type {type(value).__name__}"


def parse_messages(value: Any, *, vocab_size: int | None = None) -> tuple[Message, ...]:
    """The `messages` of a chat request; `vocab_size` bounds `token_ids`. Raises INVALID_REQUEST."""
    if not isinstance(value, list | tuple) or not value:
        raise invalid(f"expected a non-empty list of messages, found {describe(value)}", "messages")
    return tuple(_parse_message(item, f"messages[{k}]", vocab_size) for k, item in enumerate(value))


def _parse_message(value: Any, path: str, vocab_size: int | None) -> Message:
    if not isinstance(value, Mapping):
        raise invalid(f"expected a message object with role and content, found {describe(value)}", path)
    given = value.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        expected = ", ".join(ROLES)
        raise invalid(f"expected a role (one of {expected}), found {describe(given)}", f"{path}.role")
    calls = _parse_tool_calls(value.get("tool_calls"), f"{path}.tool_calls")
    calls += _parse_function_call(value.get("function_call"), f"{path}.function_call")
    if calls and role != "assistant":
        raise invalid(f"only assistant messages have tool calls, this one is {given}", f"{path}.tool_calls")
    return Message(
        role=role,
        content=_parse_content(value.get("content"), f"{path}.content"),
        reasoning=_parse_reasoning(value, path, role),
        tool_calls=calls,
        token_ids=_parse_token_ids(value.get("token_ids"), f"{path}.token_ids", role, vocab_size),
        name=_text(value.get("name"), f"{path}.name"),
        tool_call_id=_text(value.get("tool_call_id"), f"{path}.tool_call_id"),
    )


def _text(value: Any, path: str) -> str:
    """A string, or null or absent for the empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise invalid(f"expected a string or null, found {describe(value)}", path)
    return _sound(value, path)


def _sound(text: str, path: str) -> str:
    """Refuse lone surrogates (DESIGN A10): they are no text and have no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"expected text, found a lone surrogate at character {error.start}", path) from None
    return text


def _parse_content(value: Any, path: str) -> str:
    """Content as one string. Text parts are joined with nothing between them."""
    if value is None or isinstance(value, str):
        return _text(value, path)
    if not isinstance(value, list | tuple):
        raise invalid(f"expected a string, a list of text parts or null, found {describe(value)}", path)
    return "".join(_parse_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _parse_part(value: Any, path: str) -> str:
    if isinstance(value, str):
        return _sound(value, path)
    if not isinstance(value, Mapping):
        raise invalid(f'expected a text part {{"type": "text", "text": …}}, found {describe(value)}', path)
    kind = value.get("type", "text")
    key = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise invalid(f"this model reads text only: expected a part of type text, found {describe(kind)}", path)
    text = value.get(key)
    if not isinstance(text, str):
        raise invalid(f"expected a string, found {describe(text)}", f"{path}.{key}")
    return _sound(text, f"{path}.{key}")


def _parse_reasoning(value: Mapping[str, Any], path: str, role: Role) -> str:
    """`reasoning_content`, or `reasoning` where that is absent or empty (DESIGN A10)."""
    for key in ("reasoning_content", "reasoning"):
        text = _text(value.get(key), f"{path}.{key}")
        if text and role != "assistant":
            raise invalid(f"only assistant messages have reasoning, this one is {role}", f"{path}.{key}")
        if text:
            return text
    return ""


def _parse_tool_calls(value: Any, path: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise invalid(f"expected a list of tool calls or null, found {describe(value)}", path)
    return tuple(_parse_tool_call(item, f"{path}[{i}]") for i, item in enumerate(value))


def _parse_tool_call(value: Any, path: str) -> ToolCall:
    if not isinstance(value, Mapping):
        raise invalid(f"expected a tool call object, found {describe(value)}", path)
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise invalid(f"expected an object with name and arguments, found {describe(function)}", f"{path}.function")
    identifier = _text(value.get("id"), f"{path}.id")
    return _parse_function(function, f"{path}.function", identifier)


def _parse_function(function: Mapping[str, Any], path: str, identifier: str = "") -> ToolCall:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"expected the name of a tool, found {describe(name)}", f"{path}.name")
    return ToolCall(
        _sound(name, f"{path}.name"), _arguments(function.get("arguments"), f"{path}.arguments"), identifier
    )


def _parse_function_call(value: Any, path: str) -> tuple[ToolCall, ...]:
    """The older, single form of a tool call."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise invalid(f"expected an object with name and arguments or null, found {describe(value)}", path)
    return (_parse_function(value, path),)


def _arguments(value: Any, path: str) -> str:
    """Arguments as JSON text. A string that is a JSON object is kept to the letter, so that a call sent back is
    rendered as the model wrote it; another string, models write broken ones, is quoted as a JSON string."""
    if value is None:
        return "{}"
    if isinstance(value, Mapping):
        return _sound(dump_json(value, path), path)
    if not isinstance(value, str):
        raise invalid(f"expected arguments as JSON text or an object, found {describe(value)}", path)
    if not value.strip():
        return "{}"
    try:
        is_object = isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        is_object = False
    return _sound(value if is_object else json.dumps(value, ensure_ascii=False), path)


def dump_json(value: Any, path: str) -> str:
    """JSON text as models are shown it: `", "` and `": "`, no escapes for letters outside ASCII."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise invalid("nested too deeply", path) from None
    except (TypeError, ValueError) as error:
        raise invalid(f"expected a JSON value: {error}", path) from None


def _parse_token_ids(value: Any, path: str, role: Role, vocab_size: int | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    if role != "assistant":
        raise invalid(f"only assistant messages have token_ids, this one is {role}", path)
    if not isinstance(value, list | tuple):
        raise invalid(f"expected a list of token ids or null, found {describe(value)}", path)
    limit = vocab_size if vocab_size is not None else 2**31
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < limit:
            raise invalid(f"expected a token id from 0 to {limit - 1}, found {describe(token)}", f"{path}[{i}]")
    return tuple(value)


def parse_tools(value: Any) -> tuple[Tool, ...]:
    """The `tools` of a chat request, null or absent for none. Raises INVALID_REQUEST."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise invalid(f"expected a list of tools or null, found {describe(value)}", "tools")
    return tuple(_parse_tool(item, f"tools[{i}]") for i, item in enumerate(value))


def _parse_tool(value: Any, path: str) -> Tool:
    if not isinstance(value, Mapping):
        raise invalid(f"expected a tool object, found {describe(value)}", path)
    kind = value.get("type", "function")
    if kind != "function":
        raise invalid(f'expected "function", found {describe(kind)}', f"{path}.type")
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise invalid(f"expected an object with name and parameters, found {describe(function)}", f"{path}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"expected the name of the tool, found {describe(name)}", f"{path}.function.name")
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        found = describe(parameters)
        raise invalid(f"expected a JSON schema (an object) or null, found {found}", f"{path}.function.parameters")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise invalid(f"expected true, false or null, found {describe(strict)}", f"{path}.function.strict")
    return Tool(name, _sound(dump_json(value, path), path), parameters, bool(strict))
