"""OpenAI's chat objects, whole and in chunks, from what the engine gives."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from akv_jax.chat.lowering import PreparedChat
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.request import Output, TokenLogprob, Usage
from serving.generation import Completion
from serving.responses import cache_object, logprobs_object, usage_object
from serving.schemas import ChatBody


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to one request; a stream and a whole one say the same (DESIGN A6)."""

    request_id: str
    model: str
    tokenizer: Tokenizer
    body: ChatBody
    prepared: PreparedChat
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, completion: Completion) -> dict[str, Any]:
        """The answer in one piece."""
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self._logprobs(completion.logprobs),
            "finish_reason": completion.finish_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = completion.token_ids
        usage = self._usage(completion.usage)
        return self._envelope("chat.completion", choice) | self._prompt() | usage | self._cache(completion.usage)

    def first_chunk(self) -> dict[str, Any]:
        """The role, and what is known of the prompt."""
        return self._chunk({"role": "assistant", "content": ""}) | self._prompt()

    def has_content(self, output: Output) -> bool:
        """Whether the client sees anything of this output: tokens may be held back or have no text."""
        return bool(output.text or (output.token_ids and (self.body.logprobs or self.body.return_token_ids)))

    def content_chunk(self, output: Output) -> dict[str, Any]:
        delta = {"content": output.text} if output.text else {}
        return self._chunk(delta, logprobs=output.logprobs, token_ids=output.token_ids)

    def last_chunks(self, output: Output) -> list[dict[str, Any]]:
        """The finish reason; usage in a chunk without choices if asked for; the `cache` object on the last one."""
        assert output.usage is not None
        finish = self._chunk({}, finish_reason=output.finish_reason)
        if not self.body.stream_options.include_usage:
            return [finish | self._cache(output.usage)]
        usage = self._envelope("chat.completion.chunk", None) | self._usage(output.usage) | self._cache(output.usage)
        return [finish, usage]

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
