"""`response_format` and `tool_choice` to the grammar that a reply must fit (DESIGN A1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from akv_jax.chat.messages import Tool
from akv_jax.chat.reply import ReplyStream
from akv_jax.chat.tool_choice import ANY_OBJECT, ToolChoice, arguments_schema, free_grammar, reply_grammar
from akv_jax.errors import RequestError, invalid
from akv_jax.runtime.grammar import JSON_OPTIONS, Grammar, GrammarError, Vocabulary
from serving.schemas import ChatBody, ResponseFormat

SCHEMA_PARAM = "response_format.json_schema.schema"


def compile_grammar(
    vocabulary: Vocabulary, body: ChatBody, tools: Sequence[Tool], choice: ToolChoice, begun: str
) -> Grammar | None:
    """The grammar of the reply, or None where it is free.

    Text is free but for calls, where a tool is strict. A forced call leaves no room for other content. Where calls are
    the model's choice, a reply in a response format may also be calls. `begun` is the text of the message that is
    continued: the message as a whole has to fit.

    Raises RequestError.
    """
    content = _content_schema(body.response_format)
    if choice.mode == "required":
        schemas = _forced(vocabulary, tools, choice)
        several = body.parallel_tool_calls and choice.name is None
        grammar = _calls(vocabulary, schemas, None, several)
    elif content is None and needs_grammar(body, tools, choice):
        grammar = _lark(vocabulary, free_grammar(_offered(vocabulary, tools), several=body.parallel_tool_calls))
    elif content is None:
        return None
    else:
        grammar = _json(vocabulary, content, body.response_format)
        if choice.mode == "auto":
            schemas = _offered(vocabulary, tools)
            options = {**JSON_OPTIONS, **({"lenient": False} if _strict(body.response_format) else {})}
            grammar = _calls(vocabulary, schemas, {**content, "x-guidance": options}, body.parallel_tool_calls)
    return _after(grammar, begun)


def needs_grammar(body: ChatBody, tools: Sequence[Tool], choice: ToolChoice) -> bool:
    """Whether the reply is constrained at all."""
    strict = choice.mode == "auto" and any(tool.strict for tool in tools)
    return strict or choice.mode == "required" or body.response_format.type != "text"


def _content_schema(wanted: ResponseFormat) -> Mapping[str, Any] | None:
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return ANY_OBJECT
    assert wanted.json_schema is not None
    return wanted.json_schema.definition


def _strict(wanted: ResponseFormat) -> bool:
    return wanted.json_schema is not None and wanted.json_schema.strict


def _json(vocabulary: Vocabulary, schema: Mapping[str, Any], wanted: ResponseFormat) -> Grammar:
    try:
        return vocabulary.json_schema(schema, strict=_strict(wanted))
    except GrammarError as error:
        raise invalid(f"expected a JSON schema that can be compiled: {error}", SCHEMA_PARAM) from None


def _forced(vocabulary: Vocabulary, tools: Sequence[Tool], choice: ToolChoice) -> list[tuple[str, Mapping[str, Any]]]:
    schemas = []
    for index, tool in enumerate(tools):
        if choice.name not in (None, tool.name):
            continue
        schemas.append((tool.name, _arguments(vocabulary, index, tool, "the call is forced")))
    return schemas


def _offered(vocabulary: Vocabulary, tools: Sequence[Tool]) -> list[tuple[str, Mapping[str, Any]]]:
    """What calls at the model's choice must fit."""
    return [
        (
            tool.name,
            _arguments(vocabulary, index, tool, "the tool is strict")
            if tool.strict
            else _if_it_compiles(vocabulary, tool),
        )
        for index, tool in enumerate(tools)
    ]


def _arguments(vocabulary: Vocabulary, index: int, tool: Tool, why: str) -> Mapping[str, Any]:
    """The schema of a call's arguments, which has been found to compile. Raises RequestError."""
    path = f"tools[{index}].function.parameters"
    schema = arguments_schema(tool, path)
    try:
        vocabulary.json_schema(schema, strict=tool.strict)
    except GrammarError as error:
        raise invalid(f"expected a JSON schema that can be compiled, as {why}: {error}", path) from None
    return schema


def _if_it_compiles(vocabulary: Vocabulary, tool: Tool) -> Mapping[str, Any]:
    """The model need not call it, so that a schema beyond us is no reason to refuse: any arguments then."""
    try:
        schema = arguments_schema(tool, "")
        vocabulary.json_schema(schema)
    except (GrammarError, RequestError):
        return ANY_OBJECT
    return schema


def _calls(
    vocabulary: Vocabulary,
    schemas: Sequence[tuple[str, Mapping[str, Any]]],
    content: Mapping[str, Any] | None,
    several: bool,
) -> Grammar:
    return _lark(vocabulary, reply_grammar(schemas, content, several=several))


def _lark(vocabulary: Vocabulary, text: str) -> Grammar:
    try:
        return vocabulary.lark(text)
    except GrammarError as error:
        # Each schema compiles by itself.
        raise invalid(f"the tools are too much for one grammar: {error}", "tools") from None


def _after(grammar: Grammar, begun: str) -> Grammar:
    # Reasoning comes before what the grammar speaks of.
    reply = ReplyStream(reasoning=True, tools=False)
    written = (reply.push(begun) + reply.finish()).content if begun else ""
    try:
        return grammar.after(written)
    except GrammarError as error:
        message = f"the last message, which is to be continued, does not begin a reply of the form asked for: {error}"
        raise invalid(message, "messages") from None
