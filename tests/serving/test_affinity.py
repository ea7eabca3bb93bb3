"""Which replica a conversation belongs to. No Ray, no engine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from serving.replicas.affinity import PROMPT_BEGINNING, conversation_key, rank, spill
from serving.replicas.merge import label_metrics

TEXT = st.text(max_size=20)
CONTENT = TEXT | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3)


def _said(roles: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"role": st.sampled_from(roles), "content": CONTENT})


BEGINNING = st.lists(_said(["system", "developer", "user"]), min_size=1, max_size=3)
REPLY = st.fixed_dictionaries({"role": st.just("assistant"), "content": CONTENT})
LATER = st.lists(_said(["user", "assistant", "tool"]), max_size=5)


@given(
    BEGINNING, REPLY, LATER, st.dictionaries(st.sampled_from(["cache", "max_tokens", "stream", "tools"]), st.just(1))
)
def test_later_turns_have_the_same_key(beginning: list[Any], reply: Any, later: list[Any], fields: Any) -> None:
    key = conversation_key({"messages": beginning})
    assert len(key) == 32
    assert conversation_key({"messages": [*beginning, reply, *later], **fields}) == key


@given(st.text(min_size=PROMPT_BEGINNING, max_size=PROMPT_BEGINNING + 50), TEXT)
def test_prompts_that_grow_keep_their_key(prompt: str, more: str) -> None:
    assert conversation_key({"prompt": prompt}) == conversation_key({"prompt": prompt + more}) != ""


def test_token_ids_and_sequences_keep_their_key() -> None:
    ids = list(range(PROMPT_BEGINNING))
    assert conversation_key({"prompt": ids}) == conversation_key({"prompt": [*ids, 7]})
    assert conversation_key({"prompt": ids}) != conversation_key({"prompt": [1, *ids]})
    first = ["append", [1, 2, 3]]
    key = conversation_key({"operations": [first]})
    assert key == conversation_key({"operations": [first, ["drop", [0]], ["append", [4]], ["reposition"]]})
    assert key != conversation_key({"operations": [["append", [1, 2, 4]]]})


CHAT = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "Be kind."}, {"role": "user", "content": "Hi"}]},
        {"messages": CHAT["messages"], "cache_salt": "a"},
        {"messages": CHAT["messages"], "user": "a"},
        {"messages": CHAT["messages"], "prompt_cache_key": "a"},
    ],
)
def test_what_tells_conversations_apart(other: dict[str, Any]) -> None:
    assert conversation_key(CHAT) != conversation_key(other) != ""


def test_a_key_that_is_sent_stands_for_the_beginning() -> None:
    keys = {conversation_key({**body, "prompt_cache_key": "mine"}) for body in (CHAT, {"prompt": "x"}, {})}
    assert len(keys) == 1 and keys != {conversation_key({"prompt_cache_key": "yours"})}
    assert conversation_key({"prompt_cache_key": "mine", "cache_salt": "s"}) not in keys


def test_marks_and_the_form_of_content_do_not_matter() -> None:
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [part], "name": "x"}]
    assert conversation_key({"messages": messages}) == conversation_key(CHAT)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["messages", "prompt", "operations", "cache_salt", "user", "prompt_cache_key"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(st.dictionaries(st.just("content"), JSON), max_size=2)))
def test_any_body_has_a_key_or_none(body: dict[str, Any]) -> None:
    assert len(conversation_key(body)) in (0, 32)


def test_what_cannot_be_encoded_has_a_key() -> None:
    assert conversation_key({"prompt": "\ud800"}) and conversation_key({"cache_salt": "\ud800", "prompt": [1]})


KEYS = [f"key {number}" for number in range(3000)]


@pytest.mark.parametrize("seats", [2, 3, 8])
def test_keys_spread_and_few_move_when_a_seat_goes(seats: int) -> None:
    """Of N seats each has one key in N, and only those of the seat that goes move, evenly to all others."""
    names = [str(seat) for seat in range(seats)]
    homes = {key: names[rank(key, names)[0]] for key in KEYS}
    counts = Counter(homes.values())
    assert all(abs(counts[name] - len(KEYS) / seats) < 5 * (len(KEYS) / seats) ** 0.5 for name in names)
    left = names[:-1]
    moved = Counter(now for key in KEYS if (now := left[rank(key, left)[0]]) != homes[key])
    assert moved.total() == counts[names[-1]]
    assert len(moved) == seats - 1
    assert all(
        abs(each - moved.total() / len(left)) < 5 * (moved.total() / len(left)) ** 0.5 + 1 for each in moved.values()
    )


@given(st.text(max_size=8), st.lists(st.text(max_size=4), min_size=1, max_size=6, unique=True), st.randoms())
def test_ranking_does_not_depend_on_the_order_of_seats(key: str, names: list[str], random: Any) -> None:
    shuffled = random.sample(names, len(names))
    assert [names[index] for index in rank(key, names)] == [shuffled[index] for index in rank(key, shuffled)]


@pytest.mark.parametrize(
    "ongoing, order",
    [
        ([4, 0, 0, 0], [0, 1, 2, 3]),  # nobody waits at home
        ([6, 4, 5, 0], [0, 1, 2, 3]),  # some wait, but the next two are not much emptier
        ([6, 4, 3, 0], [2, 0, 1, 3]),  # the emptier of the next two
        ([9, 4, 4, 0], [1, 0, 2, 3]),  # of two alike the first
        ([9], [0]),
    ],
)
def test_a_full_home_spills_to_a_much_emptier_replica(ongoing: list[int], order: list[int]) -> None:
    assert spill(range(len(ongoing)), ongoing, full=4) == order


def test_metrics_of_replicas_become_one_text() -> None:
    one = (
        "# HELP a_total Text with {braces} in it.\n# TYPE a_total counter\na_total 1.0\n"
        '# HELP b Gauge.\n# TYPE b gauge\nb{state="free {x} y"} 2.0\nb{state="z"} 3.0\n'
    )
    two = one.replace("1.0", "5.0") + '# HELP c Only here.\n# TYPE c gauge\nc{le="1"} 4.0\n'
    text = label_metrics({"0": one, "1": two})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert sorted(families) == ["a", "b", "c"]
    assert {(s.labels["replica"], s.value) for s in families["a"].samples} == {("0", 1.0), ("1", 5.0)}
    assert families["a"].documentation == "Text with {braces} in it."
    assert {(s.labels["replica"], s.labels["state"]) for s in families["b"].samples} == {
        (replica, state) for replica in "01" for state in ("free {x} y", "z")
    }
    assert text.count("# TYPE b ") == 1
    assert label_metrics({}) == ""
