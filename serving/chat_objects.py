"""OpenAI's chat objects, whole and in chunks, from what the engine gives."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from akv_jax.chat.lowering import PreparedChat
from akv_jax.chat.messages import ToolCall
from akv_jax.chat.reply import ReplyPart, ReplyStream
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.request import Output, TokenLogprob, Usage
from serving.generation import Completion
from serving.responses import cache_object, logprobs_object, usage_object
from serving.schemas import ChatBody


@dataclass(slots=True)
class ChatAnswer:
    """The answer to one request, whole or as a stream, which say the same (DESIGN A6)."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    body: ChatBody
    prepared: PreparedChat
    reply: ReplyStream
    _calls_sent: int = 0
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, completion: Completion) -> dict[str, Any]:
        """The answer in one piece."""
        part = self.reply.push(completion.text) + self.reply.finish()
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.tool_calls:
            message["content"] = part.content or None
            message["tool_calls"] = [_tool_call(call) for call in part.tool_calls]
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": _finish_reason(completion.finish_reason, bool(part.tool_calls)),
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        usage = self._usage(completion.usage)
        return self._envelope("chat.completion", choice) | self._prompt() | usage | self._cache(completion.usage)

    def first_chunk(self) -> dict[str, Any]:
        """The role, and what is known of the prompt."""
        return self._chunk({"role": "assistant", "content": ""}) | self._prompt()

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        """What the client sees of one output: nothing, where text is held back and ids are not asked for. With the
        last output the finish reason, and usage in a chunk without choices if asked for; `cache` on the last one."""
        part = self.reply.push(output.text)
        if output.usage is not None:
            part += self.reply.finish()
        delta = self._delta(part)
        chunks = []
        if delta or (output.token_ids and (self.body.logprobs or self.body.return_token_ids)):
            chunks.append(self._chunk(delta, logprobs=output.logprobs, token_ids=output.token_ids))
        if output.usage is not None:
            finish_reason = _finish_reason(output.finish_reason, self._calls_sent > 0)
            chunks += self._last_chunks(self._chunk({}, finish_reason=finish_reason), output.usage)
        return chunks

    def _last_chunks(self, finish: dict[str, Any], usage: Usage) -> list[dict[str, Any]]:
        if not self.body.stream_options.include_usage:
            return [finish | self._cache(usage)]
        return [finish, self._envelope("chat.completion.chunk", None) | self._usage(usage) | self._cache(usage)]

    def _delta(self, part: ReplyPart) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        if part.tool_calls:
            # A call is sent whole: until its closing mark it may turn out to be content.
            delta["tool_calls"] = [
                {"index": self._calls_sent + i} | _tool_call(c) for i, c in enumerate(part.tool_calls)
            ]
            self._calls_sent += len(part.tool_calls)
        return delta

    def _chunk(
        self,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
        token_ids: Sequence[int] = (),
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": delta,
            "logprobs": self._logprobs(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = list(token_ids)
        chunk = self._envelope("chat.completion.chunk", choice)
        # OpenAI's streams that end with usage have it null until then.
        return chunk | {"usage": None} if self.body.stream_options.include_usage else chunk

    def _envelope(self, kind: str, choice: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [choice],
        }

    def _prompt(self) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prepared.token_ids, "message_spans": self.prepared.message_spans}

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {"usage": usage_object(usage, active=self.prepared.report_active)}

    def _cache(self, usage: Usage) -> dict[str, Any]:
        return {"cache": cache_object(usage)}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return logprobs_object(logprobs, self.tokenizer.token_bytes) if self.body.logprobs else None


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """OpenAI's object of a call, with an id of our own: models write none."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _finish_reason(engines: str | None, called: bool) -> str | None:
    """A reply that ends of its own accord with calls in it ends for those."""
    return "tool_calls" if called and engines == "stop" else engines
