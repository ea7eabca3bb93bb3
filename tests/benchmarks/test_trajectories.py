"""What the reports of the cache replay."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.trajectories import Trajectory, recorded, rolling_drop, synthetic


def _messages(tools: int) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    for k in range(tools):
        messages += [{"role": "assistant", "content": f"a{k}"}, {"role": "tool", "content": f"result {k}"}]
    return messages


def test_rolling_drop_keeps_the_last_tool_messages() -> None:
    # Tool messages are 3, 5, 7, 9 and 11.
    cache = rolling_drop(_messages(5), keep=2, every=2)
    assert cache == {"drop": {"7": [3], "9": [5], "11": [7]}, "reposition": [5, 9]}


def test_rolling_drop_is_cumulative() -> None:
    longer = rolling_drop(_messages(9), keep=3, every=2)
    shorter = rolling_drop(_messages(6), keep=3, every=2)
    assert shorter["drop"].items() <= longer["drop"].items()
    assert longer["reposition"][: len(shorter["reposition"])] == shorter["reposition"]


def test_a_turn_is_what_an_assistant_message_answers() -> None:
    trajectory = Trajectory("t", (*_messages(3), {"role": "assistant", "content": "done"}))
    assert trajectory.turns == [2, 4, 6, 8]
    assert Trajectory("t", ({"role": "assistant", "content": "hello"}, {"role": "user", "content": "u"})).turns == []


def test_shortened() -> None:
    short = Trajectory("t", tuple(_messages(5))).shortened(turns=2, tool_chars=3)
    assert [m["content"] for m in short.messages] == ["s", "u", "a0", "res", "a1"]
    assert Trajectory("t", tuple(_messages(2))).shortened(None, None).messages == tuple(_messages(2))


def test_synthetic_runs_follow_from_the_seed() -> None:
    first, again, other = synthetic(3, 6, seed=1), synthetic(3, 6, seed=1), synthetic(3, 6, seed=2)
    assert first == again
    assert first != other
    assert len({agent.messages[0]["content"] for agent in first}) == 1
    assert len({agent.messages[1]["content"] for agent in first}) == 3
    assert all(len(agent.turns) == 6 for agent in first)


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.jsonl.gz"])
def test_recorded_runs(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({"id": f"r{k}", "messages": _messages(k), "extra": 1}) for k in (2, 0, 3)]
    text = "\n\n".join(lines).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    # A run in which no assistant answers has no turn to replay.
    assert [run.name for run in recorded(tmp_path / name)] == ["r2", "r3"]
    assert recorded(tmp_path / name)[0].messages == tuple(_messages(2))


@pytest.mark.parametrize(
    "line", ["{", '{"id": "x"}', '{"messages": [3]}', "[]", '{"messages": [{"content": "x"}, {}]}']
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "runs.jsonl").write_text(json.dumps({"messages": _messages(1)}) + "\n" + line)
    with pytest.raises(ValueError, match=r"line 2: expected an object"):
        recorded(tmp_path / "runs.jsonl")
