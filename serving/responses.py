"""The objects that answers are made of: usage, the `cache` object, log-probabilities (DESIGN A4, A6, A10)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import orjson
from fastapi.responses import Response

from akv_jax.request import TokenLogprob, Usage

#: JSON has no minus infinity.
LOWEST_LOGPROB = -9999.0


def answer(body: dict[str, Any], *, as_msgpack: bool = False) -> Response:
    """200 with `body`, which may hold NumPy arrays, as JSON or msgpack (floats in single precision)."""
    if as_msgpack:
        return Response(msgpack.packb(body, default=_plain, use_single_float=True), media_type="application/msgpack")
    return Response(orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"cannot encode {type(value).__name__}")


def usage_object(usage: Usage, *, active: bool = False) -> dict[str, Any]:
    """OpenAI's usage with the details of A6; `active` reports the active count as `prompt_tokens`."""
    prompt_tokens = usage.active_tokens if active else usage.prompt_tokens
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "drop_skipped_tokens": usage.drop_skipped_tokens,
            "repos_tokens": usage.repos_tokens,
        },
    }


def cache_object(usage: Usage) -> dict[str, int]:
    """Exactly the keys of A10."""
    return {
        "computed_tokens": usage.computed_tokens,
        "restored_tokens": usage.restored_tokens,
        "active_tokens": usage.active_tokens,
        "next_position": usage.next_position,
        "segments": usage.segments,
        "forwards": usage.forwards,
    }


def logprobs_object(logprobs: Sequence[TokenLogprob], token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    """Chat-style log-probabilities; `token_bytes` gives a token's own bytes, which need not be whole characters."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(token_id)
        return {
            "token": raw.decode("utf-8", errors="replace"),
            "logprob": max(float(logprob), LOWEST_LOGPROB),
            "bytes": list(raw),
        }

    content = []
    for entry in logprobs:
        top = [one(token_id, logprob) for token_id, logprob in entry.top]
        content.append({**one(entry.token_id, entry.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}
