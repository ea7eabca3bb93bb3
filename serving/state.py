"""What all routes of one app share. One object per app, reached through `server_of(request)`; nothing is global."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request as HttpRequest
from starlette.exceptions import HTTPException
from structlog.typing import FilteringBoundLogger

from akv_jax.chat.choose_template import ChatFormat, TemplateError, chat_format
from akv_jax.errors import Reason, RequestError, invalid
from akv_jax.runtime.grammar import Vocabulary
from akv_jax.stats import Clock
from serving.metrics import Metrics
from serving.request_log import Notes, log_request
from serving.schemas import Body
from serving.settings import Settings
from serving.unknown_fields import UnknownFields, unknown_fields

if TYPE_CHECKING:
    from akv_jax.async_engine import AsyncEngine


#: Asked every few seconds by machines: their lines are for the log's debug level.
PROBES = frozenset({"/health", "/ready", "/metrics"})


@dataclass
class Server:
    settings: Settings
    log: FilteringBoundLogger
    metrics: Metrics
    engine: AsyncEngine
    #: Everything that is timed is timed by it; an argument, so that tests can have their own.
    clock: Clock = time.monotonic
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    #: Unix time, seconds.
    started: int = field(default_factory=lambda: int(time.time()))
    #: Made at first use, when the model is there.
    _chat: ChatFormat | TemplateError | None = None
    _vocabulary: Vocabulary | None = None
    _longest: int | None = None
    _making: threading.Lock = field(default_factory=threading.Lock)

    def require_engine(self) -> AsyncEngine:
        """The engine, or the 503 of a server that is not ready."""
        if self.engine.failure is not None:
            raise HTTPException(503, "The engine has stopped after an internal error.", {"x-should-retry": "false"})
        if not self.engine.ready:
            message = "The model is still loading; /ready turns 200 when it has warmed up."
            raise HTTPException(503, message, {"Retry-After": "5"})
        return self.engine

    def require_chat(self) -> ChatFormat:
        """How the model's conversations become tokens. A model without a usable template still serves sequences."""
        if self._chat is None:
            model = self.require_engine().model
            try:
                self._chat = chat_format(
                    model.tokenizer,
                    model.chat_template,
                    bos_token=model.bos_token,
                    eos_token=model.eos_token,
                    eos_token_ids=model.eos_token_ids,
                )
            except TemplateError as error:
                self._chat = error
        if isinstance(self._chat, TemplateError):
            raise invalid(str(self._chat), "messages")
        return self._chat

    def require_vocabulary(self) -> Vocabulary:
        """What grammars are compiled for. Takes a second the first time: not for the event loop."""
        with self._making:
            if self._vocabulary is None:
                model = self.require_engine().model
                self._vocabulary = Vocabulary(model.tokenizer, model.config.vocab_size, model.eos_token_ids)
        return self._vocabulary

    def refuse_hopeless(self, param: str, characters: int, tokens: int = 0) -> None:
        """Refuse what must take more positions than there are before minutes go into tokenising it: so many `tokens`,
        and text of so many `characters`. No token is longer than the longest one of the vocabulary.

        Raises CONTEXT_LENGTH_EXCEEDED (DESIGN A7).
        """
        limit = self.require_engine().config.context_length
        # Short enough for any vocabulary, which is nearly every request there is.
        if characters + tokens <= limit:
            return
        least = tokens + characters // self._longest_token()
        if least > limit:
            raise RequestError(
                Reason.CONTEXT_LENGTH_EXCEEDED,
                f"This model's maximum context length is {limit} tokens. However, your request has {least} tokens "
                f"(or more, in {characters} characters of text), which exceeds the context window "
                "(context_length_exceeded). Please reduce the length of the messages or completion.",
                param,
            )

    def _longest_token(self) -> int:
        """Characters."""
        if self._longest is None:
            model = self.require_engine().model
            sizes = (len(model.tokenizer.token_bytes(token)) for token in range(model.config.vocab_size))
            self._longest = max(1, *sizes)
        return self._longest

    @property
    def model_name(self) -> str:
        return self.settings.served_model_name or self.require_engine().model.name

    def note_unknown(self, notes: Notes, body: Body) -> None:
        """Have the request's line say which of its fields nobody looks at, once of every name."""
        fresh = self.unknown_fields.new(unknown_fields(body))
        if fresh:
            notes["unknown_fields"] = fresh

    def ended(self, method: str, path: str, status: int, seconds: float, notes: Notes) -> None:
        """A request has been answered, or its client has gone: one line, and the count of refusals."""
        if "code" in notes:
            self.metrics.refusals[notes["code"]] += 1
        log_request(self.log, method, path, status, seconds, notes, quiet=path in PROBES)


def server_of(request: HttpRequest) -> Server:
    return request.app.state.server
