"""GET /cache/tree over HTTP: what was said is in it, what was cut is told, and secrets are not."""

from __future__ import annotations

import hashlib
from typing import Any

import httpx
import pytest

from serving.cache_tree import MOST_NODES
from tests.serving.fake_engine import FakeEngine
from tests.serving.running import Running, running

WORDS = "Consider the lilies."
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": WORDS},
    {"role": "assistant", "content": "Considered."},
    {"role": "user", "content": "And now?"},
]


@pytest.fixture
def server(tiny: Running) -> Running:
    """With an empty cache."""
    tiny.http.post("/flush_cache")
    return tiny


def ask(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tree(server: Running, **query: Any) -> dict[str, Any]:
    answer = server.http.get("/cache/tree", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def of_kind(tree: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [node for node in tree["nodes"] if node["kind"] == kind]


def test_an_empty_cache(server: Running) -> None:
    assert tree(server) == {
        "object": "cache.tree",
        "total_nodes": 0,
        "total_tokens": 0,
        "shown_nodes": 0,
        "truncated": False,
        "nodes": [],
    }


def test_a_request_is_a_path(server: Running) -> None:
    """Its texts, its drop and its reposition, with the numbers that its answer told."""
    answer = ask(server, cache={"drop": {"1": [0]}, "reposition": [1]})
    spans = answer["message_spans"]
    shown = tree(server)
    assert shown["total_nodes"] == shown["shown_nodes"] == len(shown["nodes"]) and not shown["truncated"]
    (root,), (drop,), (reposition,) = (of_kind(shown, kind) for kind in ("root", "drop", "reposition"))
    assert root["tenant"] is None and root["parent"] is None and root["depth"] == 0
    assert drop["ranges"] == [spans[0]] and drop["dropped"] == spans[0][1] - spans[0][0]
    assert drop["children"] == [reposition["id"]] and reposition["start"] == spans[1][1]
    runs = of_kind(shown, "tokens")
    # Of what was sampled, the last token has no K and V.
    assert sum(run["tokens"] for run in runs) == shown["total_tokens"] == len(answer["prompt_token_ids"])
    assert sum(run["resident"] for run in runs) == sum(sum(run["versions"].values()) for run in runs)
    assert all(run["leased"] == 0 and run["tokens"] == run["resident"] + run["tombstones"] for run in runs)
    text = server.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert text.startswith(runs[0]["text"]) and WORDS[:5] in runs[0]["text"]


def test_branches_and_bounds(server: Running) -> None:
    for word in ("alpha", "beta", "gamma"):
        ask(server, messages=[*MESSAGES, {"role": "assistant", "content": word}])
    full = tree(server)
    (fork,) = [node for node in full["nodes"] if len(node["children"]) > 1]
    by_id = {node["id"]: node for node in full["nodes"]}
    assert by_id[fork["children"][0]]["last_used"] >= by_id[fork["children"][1]]["last_used"]
    cut = tree(server, max_depth=1)
    assert cut["truncated"] and cut["total_nodes"] == full["total_nodes"]
    assert [node["depth"] for node in cut["nodes"]] == [0, 1]
    last = cut["nodes"][1]
    assert last["children"] == [] and last["hidden_children"] == len(by_id[last["id"]]["children"]) > 0
    assert len(tree(server, max_nodes=2)["nodes"]) == 2


@pytest.mark.parametrize(
    "query",
    [
        {"max_nodes": "0"},
        {"max_nodes": "-1"},
        {"max_nodes": str(MOST_NODES + 1)},
        {"max_nodes": "ten"},
        {"max_nodes": "1.0"},
        {"max_nodes": ""},
        {"max_nodes": "9" * 5000},
        {"max_nodes": "٣"},
        {"max_depth": "-1"},
        {"max_depth": "1e3"},
    ],
)
def test_bad_bounds_are_refused(tiny: Running, query: dict[str, str]) -> None:
    answer = tiny.http.get("/cache/tree", params=query)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == next(iter(query)) and "whole number" in error["message"]


def test_salts_are_told_apart_and_not_told(server: Running) -> None:
    salt = "tenant-secret-αβγ"
    ask(server)
    ask(server, cache_salt=salt)
    text = server.http.get("/cache/tree").text
    assert "secret" not in text
    roots = of_kind(tree(server), "root")
    told = {run["parent"]: run["text"] for run in of_kind(tree(server), "tokens")}
    assert all((told[root["id"]] is None) == (root["tenant"] is not None) for root in roots)
    assert {root["tenant"] for root in roots} == {None, hashlib.sha256(salt.encode()).hexdigest()[:12]}


def test_while_a_request_runs(server: Running) -> None:
    """Read between two steps; what the request leases is told, and it goes on undisturbed."""
    ask(server)
    a = server.post("/tokenize", {"prompt": "A"}).json()["tokens"][0]
    body = {"messages": MESSAGES, "max_tokens": 100, "stream": True, "logit_bias": {str(a): 100}}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        # Another connection: this one is busy with the stream.
        shown = httpx.get(f"{server.url}/cache/tree").json()
        text = "".join(lines)
    assert text.count('"content":"A"') == 100
    assert sum(run["leased"] for run in of_kind(shown, "tokens")) > 0


def test_it_wants_the_key_and_an_engine(fake: tuple[Running, FakeEngine]) -> None:
    _, engine = fake
    with running(engine, api_key="sesame") as server:
        assert server.http.get("/cache/tree").status_code == 401
        assert server.http.get("/metrics").status_code == 200
        engine.ready = False
        answer = server.http.get("/cache/tree", headers={"Authorization": "Bearer sesame"})
        assert answer.status_code == 503
        engine.ready = True
    assert fake[0].http.post("/cache/tree").status_code == 405
