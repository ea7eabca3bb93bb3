"""What goes into the engine and what comes out of it: immutable values, no HTTP and no text templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from spec.operations import Operation

if TYPE_CHECKING:
    from akv_jax.runtime.grammar import Grammar

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when to stop. Values are already validated and in OpenAI's ranges."""

    #: Most tokens to generate; None or too large is cut to what fits the positions (DESIGN A7).
    max_tokens: int | None = None
    #: 0 is greedy.
    temperature: float = 1.0
    top_p: float = 1.0
    #: 0 keeps every token.
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    #: None draws a fresh one.
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    #: Report the log-probability of every sampled token, and of this many most likely ones.
    logprobs: bool = False
    top_logprobs: int = 0
    #: What the generated text must fit; the reply ends where nothing can follow. None leaves it free.
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to compute and continue. `operations` is the history in the language of `spec/`."""

    request_id: str
    operations: tuple[Operation, ...]
    sampling: Sampling = Sampling()
    #: Tenants with different salts share nothing (DESIGN A8).
    cache_salt: str = ""
    #: Return the float32 logits of the last append.
    return_logits: bool = False
    #: Logical indices of prompt tokens whose logits are asked for (DESIGN C6); empty is the last one alone.
    logits_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The model's own log-probabilities (DESIGN A10): before temperature, penalties, bias and masks."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """DESIGN A6. The four kinds of prompt token sum to `prompt_tokens` and are fixed at the first output token."""

    prompt_tokens: int
    computed_tokens: int
    drop_skipped_tokens: int
    repos_tokens: int
    cached_tokens: int
    restored_tokens: int
    active_tokens: int
    next_position: int
    segments: int
    forwards: int
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request. `text` holds no part of a stop string and only whole characters."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    #: Set on the output that finishes the request.
    usage: Usage | None = None
    #: Float32 [vocab] of the last append, on the first output, if asked for.
    next_logits: np.ndarray | None = None
    #: Float32 [len(logits_at), vocab], on the first output, if asked for.
    prompt_logits: np.ndarray | None = None
    #: The request was refused or failed after it was accepted.
    error: Exception | None = None
