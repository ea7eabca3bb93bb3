"""The `cache` field's grammar (DESIGN A1-A3, A10): every ill-formed one is a 400 that names the element."""

import time

import pytest

from akv_jax.chat.cache_field import CacheField, DropEntry, parse_cache_field
from akv_jax.chat.messages import Message
from akv_jax.errors import Reason, RequestError

MESSAGES = (
    Message("system", "s"),
    Message("user", "u"),
    Message("assistant", "a", reasoning="r"),
    Message("tool", "t"),
    Message("assistant", "b"),
)


def parse(body: dict) -> CacheField:
    return parse_cache_field(body).for_messages(MESSAGES)


def entries(field: CacheField, trigger: int) -> list[tuple]:
    return [(e.message, e.part, e.tokens) for e in field.drop[trigger]]


ILL_FORMED = {
    # drop: the schedule
    "cache list": ({"cache": [1]}, "cache"),
    "cache string": ({"cache": "drop"}, "cache"),
    "cache true": ({"cache": True}, "cache"),
    "cache false": ({"cache": False}, "cache"),
    "cache zero": ({"cache": 0}, "cache"),
    "unknown key": ({"cache": {"drops": {}}}, "cache.drops"),
    "unknown key beside": ({"cache": {"drop": {}, "evict": None}}, "cache.evict"),
    "drop list": ({"cache": {"drop": [{"message": 2}]}}, "cache.drop"),
    "drop number": ({"cache": {"drop": 3}}, "cache.drop"),
    "drop false": ({"cache": {"drop": False}}, "cache.drop"),
    # triggers
    "key 01": ({"cache": {"drop": {"01": [0]}}}, "cache.drop.01"),
    "key 00": ({"cache": {"drop": {"00": [0]}}}, "cache.drop.00"),
    "key +1": ({"cache": {"drop": {"+1": [0]}}}, "cache.drop.+1"),
    "key -1": ({"cache": {"drop": {"-1": [0]}}}, "cache.drop.-1"),
    "key 1.0": ({"cache": {"drop": {"1.0": [0]}}}, "cache.drop.1.0"),
    "key 1e1": ({"cache": {"drop": {"1e1": [0]}}}, "cache.drop.1e1"),
    "key blank": ({"cache": {"drop": {" 1": [0]}}}, "cache.drop. 1"),
    "key newline": ({"cache": {"drop": {"1\n": [0]}}}, "cache.drop.1\n"),
    "key empty": ({"cache": {"drop": {"": [0]}}}, "cache.drop."),
    "key word": ({"cache": {"drop": {"last": [0]}}}, "cache.drop.last"),
    "key underscore": ({"cache": {"drop": {"1_0": [0]}}}, "cache.drop.1_0"),
    "key arabic digit": ({"cache": {"drop": {"٣": [0]}}}, "cache.drop.٣"),
    # lists and entries
    "number for list": ({"cache": {"drop": {"3": 2}}}, "cache.drop.3"),
    "null for list": ({"cache": {"drop": {"3": None}}}, "cache.drop.3"),
    "object for list": ({"cache": {"drop": {"3": {"message": 2}}}}, "cache.drop.3"),
    "string for list": ({"cache": {"drop": {"3": "2"}}}, "cache.drop.3"),
    "above trigger": ({"cache": {"drop": {"3": [1, 4]}}}, "cache.drop.3[1]"),
    "above inert trigger": ({"cache": {"drop": {"50": [50, 51]}}}, "cache.drop.50[1]"),
    "negative": ({"cache": {"drop": {"3": [-1]}}}, "cache.drop.3[0]"),
    "bool": ({"cache": {"drop": {"3": [0, True]}}}, "cache.drop.3[1]"),
    "float": ({"cache": {"drop": {"3": [2.0]}}}, "cache.drop.3[0]"),
    "string": ({"cache": {"drop": {"3": ["2"]}}}, "cache.drop.3[0]"),
    "null": ({"cache": {"drop": {"3": [None]}}}, "cache.drop.3[0]"),
    "list": ({"cache": {"drop": {"3": [[2]]}}}, "cache.drop.3[0]"),
    "nan": ({"cache": {"drop": {"3": [float("nan")]}}}, "cache.drop.3[0]"),
    "bad under inert trigger": ({"cache": {"drop": {"50": [0, "1"]}}}, "cache.drop.50[1]"),
    "second trigger": ({"cache": {"drop": {"2": [1], "3": [2, 2.5]}}}, "cache.drop.3[1]"),
    # entry objects
    "empty entry": ({"cache": {"drop": {"3": [{}]}}}, "cache.drop.3[0].message"),
    "no message": ({"cache": {"drop": {"3": [{"part": "content"}]}}}, "cache.drop.3[0].message"),
    "message null": ({"cache": {"drop": {"3": [{"message": None}]}}}, "cache.drop.3[0].message"),
    "message true": ({"cache": {"drop": {"3": [{"message": True}]}}}, "cache.drop.3[0].message"),
    "message float": ({"cache": {"drop": {"3": [{"message": 1.0}]}}}, "cache.drop.3[0].message"),
    "message above": ({"cache": {"drop": {"3": [{"message": 4}]}}}, "cache.drop.3[0].message"),
    "message negative": ({"cache": {"drop": {"3": [{"message": -2}]}}}, "cache.drop.3[0].message"),
    "entry key": ({"cache": {"drop": {"3": [{"message": 2, "parts": []}]}}}, "cache.drop.3[0].parts"),
    "unknown part": ({"cache": {"drop": {"3": [{"message": 2, "part": "header"}]}}}, "cache.drop.3[0].part"),
    "part list": ({"cache": {"drop": {"3": [{"message": 2, "part": ["content"]}]}}}, "cache.drop.3[0].part"),
    "part true": ({"cache": {"drop": {"3": [{"message": 2, "part": True}]}}}, "cache.drop.3[0].part"),
    "part and tokens": (
        {"cache": {"drop": {"3": [{"message": 2, "part": "content", "tokens": [0, 1]}]}}},
        "cache.drop.3[0]",
    ),
    "tokens number": ({"cache": {"drop": {"3": [{"message": 2, "tokens": 5}]}}}, "cache.drop.3[0].tokens"),
    "tokens one": ({"cache": {"drop": {"3": [{"message": 2, "tokens": [5]}]}}}, "cache.drop.3[0].tokens"),
    "tokens three": ({"cache": {"drop": {"3": [{"message": 2, "tokens": [1, 2, 3]}]}}}, "cache.drop.3[0].tokens"),
    "tokens object": ({"cache": {"drop": {"3": [{"message": 2, "tokens": {}}]}}}, "cache.drop.3[0].tokens"),
    "tokens start null": (
        {"cache": {"drop": {"3": [{"message": 2, "tokens": [None, 4]}]}}},
        "cache.drop.3[0].tokens[0]",
    ),
    "tokens start bool": (
        {"cache": {"drop": {"3": [{"message": 2, "tokens": [False, 4]}]}}},
        "cache.drop.3[0].tokens[0]",
    ),
    "tokens end float": (
        {"cache": {"drop": {"3": [{"message": 2, "tokens": [0, 4.0]}]}}},
        "cache.drop.3[0].tokens[1]",
    ),
    "tokens end string": (
        {"cache": {"drop": {"3": [{"message": 2, "tokens": [0, "4"]}]}}},
        "cache.drop.3[0].tokens[1]",
    ),
    "tokens reversed": ({"cache": {"drop": {"3": [{"message": 2, "tokens": [5, 4]}]}}}, "cache.drop.3[0].tokens"),
    "tokens reversed negative": (
        {"cache": {"drop": {"3": [{"message": 2, "tokens": [-4, -5]}]}}},
        "cache.drop.3[0].tokens",
    ),
    # reposition
    "reposition true": ({"cache": {"reposition": True}}, "cache.reposition"),
    "reposition number": ({"cache": {"reposition": 5}}, "cache.reposition"),
    "reposition object": ({"cache": {"reposition": {"5": []}}}, "cache.reposition"),
    "reposition bool": ({"cache": {"reposition": [0, True]}}, "cache.reposition[1]"),
    "reposition float": ({"cache": {"reposition": [0.0]}}, "cache.reposition[0]"),
    "reposition negative": ({"cache": {"reposition": [-1]}}, "cache.reposition[0]"),
    "reposition string": ({"cache": {"reposition": ["1"]}}, "cache.reposition[0]"),
    "reposition null": ({"cache": {"reposition": [1, None]}}, "cache.reposition[1]"),
    "reposition repeated": ({"cache": {"reposition": [1, 3, 3]}}, "cache.reposition[2]"),
    "reposition unsorted": ({"cache": {"reposition": [3, 1, 5]}}, "cache.reposition[1]"),
    "reposition unsorted inert": ({"cache": {"reposition": [3, 80, 70]}}, "cache.reposition[2]"),
    # report
    "report word": ({"cache": {"report": "logical"}}, "cache.report"),
    "report true": ({"cache": {"report": True}}, "cache.report"),
    "report list": ({"cache": {"report": ["active"]}}, "cache.report"),
    # synonyms, under their own names
    "drop_message above": ({"drop_message": {"5": [2, 6]}}, "drop_message.5[1]"),
    "drop_message list": ({"drop_message": [2]}, "drop_message"),
    "drop_message tokens": (
        {"drop_message": {"3": [{"message": 0, "tokens": [0, True]}]}},
        "drop_message.3[0].tokens[1]",
    ),
    "reposition synonym": ({"reposition": [1, 3, 2]}, "reposition[2]"),
    "reposition synonym true": ({"reposition": True}, "reposition"),
    "rule string": ({"drop_rule": "thinking_drop"}, "drop_rule"),
    "rule without type": ({"drop_rule": {"drop_messages": {}}}, "drop_rule.type"),
    "rule unknown type": ({"drop_rule": {"type": "tool_drop"}}, "drop_rule.type"),
    "rule without schedule": ({"drop_rule": {"type": "message_drop"}}, "drop_rule.drop_messages"),
    "rule unknown key": ({"drop_rule": {"type": "message_drop", "drop_messages": {}, "x": 1}}, "drop_rule.x"),
    "rule above": (
        {"drop_rule": {"type": "message_drop", "drop_messages": {"5": [2, 9]}}},
        "drop_rule.drop_messages.5[1]",
    ),
    "thinking with schedule": (
        {"drop_rule": {"type": "thinking_drop", "drop_messages": {}}},
        "drop_rule.drop_messages",
    ),
    # both forms
    "cache and drop_message": ({"cache": {"drop": {}}, "drop_message": {}}, "drop_message"),
    "cache and reposition": ({"cache": {"drop": {"3": [1]}}, "reposition": [3]}, "reposition"),
    "cache and rule": ({"cache": {"report": "active"}, "drop_rule": {"type": "thinking_drop"}}, "drop_rule"),
    "drop_message and rule": ({"drop_message": {}, "drop_rule": {"type": "thinking_drop"}}, "drop_rule"),
}


@pytest.mark.parametrize("name", ILL_FORMED)
def test_ill_formed_is_refused_with_its_path(name: str) -> None:
    body, param = ILL_FORMED[name]
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.reason is Reason.INVALID_CACHE
    assert caught.value.status == 400
    assert caught.value.param == param
    assert "expected" in caught.value.message


def test_message_says_what_was_expected_and_found() -> None:
    with pytest.raises(RequestError) as caught:
        parse({"cache": {"drop": {"3": [True]}}})
    assert caught.value.message == "expected the index of a message (a whole number from 0), found true"
    with pytest.raises(RequestError) as caught:
        parse({"cache": {"drop": {"3": [7]}}})
    assert caught.value.message == "expected a message at or before the trigger 3, found 7"


@pytest.mark.parametrize("body", [{}, {"cache": None}, {"cache": {}}, {"cache": {}, "drop_message": None}])
def test_no_cache_field(body: dict) -> None:
    assert parse(body) == CacheField()


def test_empty_cache_leaves_room_for_synonyms() -> None:
    assert parse({"cache": {}, "reposition": [2]}).reposition == (2,)


def test_whole_grammar() -> None:
    field = parse(
        {
            "cache": {
                "drop": {"0": [], "3": [2, 2, {"message": 2}], "4": [{"message": 4, "part": "reasoning"}]},
                "reposition": [0, 3, 900],
                "report": "active",
            }
        }
    )
    assert entries(field, 0) == []
    assert entries(field, 3) == [(2, None, None)] * 2
    assert field.drop[4] == (DropEntry(4, part="reasoning", param="cache.drop.4[0]"),)
    assert field.reposition == (0, 3, 900)
    assert field.report_active


@pytest.mark.parametrize("tokens", [[0, 0], [0, None], [-5, None], [-5, -5], [-5, 3], [10**30, None]])
def test_token_ranges(tokens: list) -> None:
    field = parse({"cache": {"drop": {"3": [{"message": 2, "tokens": tokens}]}}})
    assert entries(field, 3) == [(2, None, tuple(tokens))]


def test_nulls_in_an_entry_are_absent() -> None:
    assert entries(parse({"cache": {"drop": {"3": [{"message": 2, "part": None, "tokens": None}]}}}), 3) == [
        (2, None, None)
    ]


def test_triggers_beyond_the_last_message_are_legal() -> None:
    huge = "9" * 500
    field = parse({"cache": {"drop": {"70": [3, 69], huge: [12345]}, "reposition": [70, 10**20]}})
    assert set(field.drop) == {70, int(huge)}


def test_synonyms_mean_the_same() -> None:
    schedule = {"3": [1, {"message": 2, "part": "content"}]}
    plain = parse({"cache": {"drop": schedule, "reposition": [3]}})
    for body in (
        {"drop_message": schedule, "reposition": [3]},
        {"drop_rule": {"type": "message_drop", "drop_messages": schedule}, "reposition": [3]},
    ):
        field = parse(body)
        assert (entries(field, 3), field.reposition) == (entries(plain, 3), plain.reposition)


def test_thinking_drop_is_every_reasoning_right_after_its_message() -> None:
    field = parse({"drop_rule": {"type": "thinking_drop"}, "reposition": [4]})
    assert {k: entries(field, k) for k in field.drop} == {k: [(k, "reasoning", None)] for k in (2, 4)}
    assert field.reposition == (4,)


def test_an_index_twice_is_once_and_an_entry_like_it_is_not_mistaken_for_it() -> None:
    assert entries(parse({"cache": {"drop": {"2": [1, 0, 1, 1, 0]}}}), 2) == [(1, None, None), (0, None, None)]
    with pytest.raises(RequestError) as caught:
        parse({"cache": {"drop": {"2": [1, True]}}})
    assert caught.value.param == "cache.drop.2[1]"


def test_many_entries_take_linear_time() -> None:
    def seconds(count: int) -> float:
        body = {"cache": {"drop": {str(count): [*range(count // 2)] * 2}, "reposition": list(range(count))}}
        start = time.perf_counter()
        parse(body)
        return time.perf_counter() - start

    assert seconds(100_000) < 5
