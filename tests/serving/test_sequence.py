"""`/v1/sequence` (DESIGN A9), in JSON and in msgpack."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from serving.schemas import parse_operations
from spec.operations import Append, Drop, Reposition, canonical
from tests.serving.running import Running

BODY: dict[str, Any] = {
    "operations": [["append", [10, 11, 12, 13]], ["drop", [1, 2]], ["reposition"], ["drop", []], ["append", [14, 15]]],
    "max_tokens": 3,
    "temperature": 0,
    "top_logprobs": 20,
    "return_logits": True,
}
MSGPACK = {"Content-Type": "application/msgpack"}


def test_json(tiny: Running) -> None:
    answer = tiny.post("/v1/sequence", BODY).json()
    choice = answer["choices"][0]
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] <= 3
    logits = np.array(choice["next_logits"])
    assert logits.shape == (tiny.state.engine.model.config.vocab_size,)
    assert int(logits.argmax()) == choice["token_ids"][0]
    first = choice["logprobs"]["content"][0]
    assert len(first["top_logprobs"]) == 20
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert first["logprob"] == pytest.approx(logprobs.max(), abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == 6
    assert set(answer["cache"]) == {
        "computed_tokens",
        "restored_tokens",
        "active_tokens",
        "next_position",
        "segments",
        "forwards",
    }
    assert (answer["cache"]["active_tokens"], answer["cache"]["next_position"]) == (4, 4)


def test_the_three_routes_differ(tiny: Running) -> None:
    """The history counts, not the tokens that are left: A,B,C then drop A; A,B, drop A, C; B,C alone."""
    routes = (
        [["append", [1, 2, 3]], ["drop", [0]]],
        [["append", [1, 2]], ["drop", [0]], ["append", [3]]],
        [["append", [2, 3]]],
    )
    logits = [
        np.array(tiny.post("/v1/sequence", {**BODY, "operations": route}).json()["choices"][0]["next_logits"])
        for route in routes
    ]
    for left, right in ((0, 1), (1, 2), (0, 2)):
        assert np.abs(logits[left] - logits[right]).max() > 1e-3


def test_msgpack_both_ways(tiny: Running) -> None:
    # Usage is the same from the second time on (A10).
    tiny.post("/v1/sequence", BODY)
    plain = tiny.post("/v1/sequence", BODY).json()
    packed = msgpack.packb(BODY)
    response = tiny.http.post("/v1/sequence", content=packed, headers=MSGPACK)
    assert response.headers["content-type"] == "application/msgpack"
    answer = msgpack.unpackb(response.content)
    assert answer["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    assert np.allclose(answer["choices"][0]["next_logits"], plain["choices"][0]["next_logits"], atol=1e-5)
    response = tiny.http.post("/v1/sequence", content=packed, headers={**MSGPACK, "Accept": "application/json"})
    assert response.json()["cache"] == plain["cache"]
    response = tiny.http.post("/v1/sequence", json=BODY, headers={"Accept": "application/msgpack"})
    assert msgpack.unpackb(response.content)["cache"] == plain["cache"]


def test_without_logprobs_and_logits_they_are_left_out(tiny: Running) -> None:
    choice = tiny.post("/v1/sequence", {"operations": [["append", [1]]], "max_tokens": 1}).json()["choices"][0]
    assert choice["logprobs"] is None and "next_logits" not in choice


def test_operations_that_do_nothing_are_left_out() -> None:
    """L5: the same history, whatever they are and however many."""
    idle = [["drop", []], ["append", []], ["drop", [0, 2]], ["reposition"]] * 1000
    raw = [
        ["reposition"],
        ["append", [1, 2, 3]],
        ["drop", [0]],
        ["drop", [0, 2]],
        ["reposition"],
        *idle,
        ["append", [4]],
    ]
    parsed = parse_operations(raw, 10)
    assert len(parsed) == 5 and canonical(parsed) == canonical(
        (Append((1, 2, 3)), Drop(frozenset({0, 2})), Reposition(), Append((4,)))
    )
