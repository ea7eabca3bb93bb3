"""The output side of one request: how its next token is sampled, and when it ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from akv_jax.chat.detokenizer import TextStream
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.request import FinishReason, Sampling, TokenLogprob
from akv_jax.runtime.grammar import GrammarState
from akv_jax.runtime.runner import SamplingPlan, empty_sampling
from akv_jax.runtime.sampling import Adjustment


@dataclass(slots=True)
class Generation:
    """Tokens sampled so far and the rules for the next one. It outlives a retraction, and so does the grammar's state.

    seed: what `Sampling.seed` asks for or a fresh one. limit: most tokens to come out, already cut to what fits.
    """

    sampling: Sampling
    prompt: np.ndarray
    seed: int
    limit: int
    end_tokens: frozenset[int]
    stream: TextStream
    grammar: GrammarState | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def adjusts(self) -> bool:
        """Whether the logits are changed before sampling."""
        s = self.sampling
        penalised = bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1)
        return penalised or bool(s.logit_bias) or self.grammar is not None

    def push(self, token: int) -> tuple[str, FinishReason | None]:
        """Take the sampled token; returns the text it makes safe to send, and why the request ends if it does."""
        self.tokens.append(token)
        if token in self.end_tokens:
            # A grammar that gave up allows nothing but the end: that is no end of the model's choice.
            gave_up = self.grammar is not None and self.grammar.failed
            return self.stream.finish(), "length" if gave_up else "stop"
        text = self.stream.push(token)
        if self.stream.stopped:
            return text, "stop"
        if self.grammar is not None:
            self.grammar.push(token)
            if self.grammar.complete:
                return text + self.stream.finish(), "stop"
        if len(self.tokens) >= self.limit or (self.grammar is not None and self.grammar.failed):
            return text + self.stream.finish(), "length"
        return text, None

    def bias(self, vocabulary: int) -> np.ndarray:
        """Float32 [V]: logit_bias, the presence and frequency penalties over what was generated (as OpenAI's), and
        minus infinity where the grammar forbids."""
        out = np.zeros(vocabulary, np.float32)
        for token, value in self.sampling.logit_bias.items():
            out[token] += value
        ids, counts = np.unique(np.array(self.tokens, np.int64), return_counts=True)
        out[ids] -= self.sampling.presence_penalty + self.sampling.frequency_penalty * counts
        if self.grammar is not None:
            out[~self.grammar.allowed()] = -np.inf
        return out

    def seen(self, vocabulary: int) -> np.ndarray:
        """Bool [V]: tokens of the prompt, dropped ones included, and of the output."""
        out = np.zeros(vocabulary, bool)
        out[self.prompt] = True
        out[self.tokens] = True
        return out


def new_generation(
    sampling: Sampling, prompt: np.ndarray, seed: int, room: int, eos: Iterable[int], tokenizer: Tokenizer
) -> Generation:
    """`room`: how many more tokens the positions allow (DESIGN A7)."""
    limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
    ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos))
    stream = TextStream(tokenizer, sampling.stop, skip_special=True)
    state = None if sampling.grammar is None else sampling.grammar.start()
    return Generation(sampling, prompt, seed, limit, ends, stream, state)


def sampling_plan(rows: list[Generation | None], vocabulary: int) -> SamplingPlan:
    """One row for each logit row of the step; None where nothing is sampled."""
    batch = empty_sampling(len(rows))
    adjusted = any(row is not None and row.adjusts for row in rows)
    adjustment = None
    if adjusted:
        shape = len(rows), vocabulary
        adjustment = Adjustment(np.zeros(shape, np.float32), np.zeros(shape, bool), np.ones(len(rows), np.float32))
    for index, row in enumerate(rows):
        if row is None:
            continue
        s = row.sampling
        batch.temperature[index], batch.top_p[index] = s.temperature, s.top_p
        batch.top_k[index], batch.min_p[index] = s.top_k, s.min_p
        batch.seed[index] = (row.seed >> 32) & 0xFFFFFFFF, row.seed & 0xFFFFFFFF
        batch.step[index] = len(row.tokens)
        if adjustment is not None and row.adjusts:
            adjustment.bias[index], adjustment.seen[index] = row.bias(vocabulary), row.seen(vocabulary)
            adjustment.repetition[index] = s.repetition_penalty
    want_top = any(row is not None and row.sampling.top_logprobs > 0 for row in rows)
    return SamplingPlan(batch._replace(want_top=np.bool_(want_top)), adjustment)


def token_logprob(
    sampling: Sampling, token: int, logprob: float, ids: np.ndarray, logprobs: np.ndarray
) -> TokenLogprob:
    """What is reported of one sampled token; `ids` and `logprobs` [20] are likeliest first."""
    top = range(min(sampling.top_logprobs, len(ids)))
    return TokenLogprob(token, logprob, tuple((int(ids[i]), float(logprobs[i])) for i in top))
