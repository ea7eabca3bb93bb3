"""Request bodies recorded from real clients, as they came. They skip where they are not at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.serving.running import Running

FOLDER = Path(__file__).parents[3] / "shared" / "requests"
FILES = sorted(FOLDER.glob("*.json"))

pytestmark = pytest.mark.skipif(not FILES, reason="no recorded requests beside the repository")


def body_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["body"]


def check_answer(server: Running, body: dict[str, Any]) -> None:
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        answer = response.json()
        assert answer["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        assert answer["usage"]["completion_tokens"] > 0
        return
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] in ("stop", "length", "tool_calls")
    if body.get("stream_options", {}).get("include_usage"):
        assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recorded_bodies(roomy: Running, path: Path) -> None:
    """Those that carry `cache` in a form that was never settled get a 400 that says so; the rest is answered."""
    body = body_of(path)
    if "cache" in body:
        response = roomy.post("/v1/chat/completions", body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "cache.drop", "invalid_cache")
        assert "expected an object from message index to a list" in error["message"]
        # With its `cache` put right, the same body is answered, whatever else it asks for.
        last = len(body["messages"]) - 1
        body["cache"] = {"drop": {str(last): [0]}, "reposition": [last]}
        body.setdefault("max_tokens", 48)
    check_answer(roomy, body)
