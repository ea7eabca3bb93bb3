"""What careless and hostile clients send, with what is said about it (DESIGN A3, A10)."""

from __future__ import annotations

from typing import Any

CHAT, SEQUENCE = "/v1/chat/completions", "/v1/sequence"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]

#: Fields of a chat request, and the `param` of the error.
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"n": 2}, "n"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["x"] * 257}, "stop"),
    ({"stop": ["x" * 1025]}, "stop[0]"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [9999]}, "stop_token_ids[0]"),
    ({"logit_bias": {"9999": 1}}, "logit_bias.9999"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"01": 1}}, "logit_bias.01"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"tools": {"a": 1}}, "tools"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"cache": []}, "cache"),
    ({"cache": {"drop": {"0": [True]}}}, "cache.drop.0[0]"),
    ({"cache": {"drop": {"0": [1]}}}, "cache.drop.0[0]"),
    ({"cache": {"reposition": [0, 0]}}, "cache.reposition[1]"),
    ({"cache": {"sink": 4}}, "cache.sink"),
    ({"cache": {"drop": {"0": [{"message": 0, "tokens": [0, 999]}]}}}, "cache.drop.0[0].tokens[1]"),
    ({"drop_message": {"0": [1]}}, "drop_message.0[0]"),
    ({"continue_final_message": True}, "continue_final_message"),
]

#: `operations` of a sequence request, and the `param` of the error.
OPERATIONS: list[tuple[Any, str]] = [
    ("append", "operations"),
    ([], "operations"),
    ([["reposition"]], "operations"),
    ([["append", [1]], ["forget", [0]]], "operations[1]"),
    ([["append", [1], 2]], "operations[0]"),
    ([["append", [1, 2.0]]], "operations[0][1][1]"),
    ([["append", [True]]], "operations[0][1][0]"),
    ([["append", [1, 9999]]], "operations[0][1][1]"),
    ([["append", 5]], "operations[0][1]"),
    ([["append", [1, 2]], ["drop", [0, 2]]], "operations[1][1][1]"),
    ([["append", [1, 2]], ["drop", [-1]]], "operations[1][1][0]"),
    ([["append", [1, 2]], ["drop", 1]], "operations[1][1]"),
]

#: What is no JSON object that can be read, and what the error says.
BODIES: list[tuple[bytes, str]] = [
    (b"", "not valid JSON"),
    (b"{", "not valid JSON"),
    (b'{"messages": NaN}', "not valid JSON"),
    (b'{"temperature": -Infinity}', "not valid JSON"),
    (b'{"temperature": 1e999}', "not valid JSON"),
    (b'{"model": "\xff\xfe"}', "not valid JSON"),
    (b'{"model": "\\ud800"}', "not valid JSON"),
    (b"[]", "must be an object"),
    (b"5", "must be an object"),
    (b'{"metadata": ' + b"[" * 1000 + b"]" * 1000 + b"}", "nests deeper"),
    (b'{"metadata": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}", "nests deeper"),
    (b"[" * 100_000, "not valid JSON"),
]
