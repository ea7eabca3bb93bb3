"""Streamed text: whole characters, nothing of a stop string, and the same text however tokens come (issue: streams)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from akv_jax.chat.detokenizer import TextStream
from akv_jax.chat.tokenizer import Tokenizer


class Chunks:
    """A vocabulary made of any byte strings; id -1 is special."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks

    def token_bytes(self, token_id: int) -> bytes:
        return b"<|end|>" if token_id == -1 else self.chunks[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id == -1


def stream(chunks: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], bool]:
    text = TextStream(Chunks(chunks), stop)
    return [*(text.push(i) for i in range(len(chunks))), text.finish()], text.stopped


def cut(text: str, stop: Sequence[str]) -> str:
    """By definition: up to the stop string that ends first, the longest of those that end there."""
    for end in range(len(text) + 1):
        sizes = [len(s) for s in stop if text[:end].endswith(s)]
        if sizes:
            return text[: end - max(sizes)]
    return text


TEXTS = [
    "family 👩‍👩‍👧‍👦 and flag 🏴󠁧󠁢󠁳󠁣󠁴󠁿!",
    "한국어 텍스트와 조합형 한국어",
    "n\u0303 e\u0301\u0323 x\u0336y\u0336 ก็",
    "plain\r\n\ttext\x00\x1b[0m",
]


@given(st.data())
def test_joined_stream_is_the_text_at_once(data: st.DataObject) -> None:
    text = data.draw(st.sampled_from(TEXTS) | st.text(max_size=30)).encode()
    text += data.draw(st.binary(max_size=4))
    edges = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    chunks = [text[a:b] for a, b in zip([0, *edges], [*edges, len(text)])]
    stop = data.draw(st.lists(st.text("abё👩 \u200d한\ufffd", min_size=1, max_size=4), max_size=4))
    shown, stopped = stream(chunks, stop)
    whole = text.decode("utf-8", "replace")
    assert "".join(shown) == cut(whole, stop)
    assert stopped == any(s in whole for s in stop)


@given(
    st.text("ab", max_size=24),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_overlapping_stop_strings(text: str, stop: list[str]) -> None:
    shown, _ = stream([c.encode() for c in text], stop)
    assert "".join(shown) == cut(text, stop)
    for k in range(len(shown)):
        assert cut(text, stop).startswith("".join(shown[: k + 1])), "text was shown that had to be taken back"


@given(st.binary(max_size=24))
def test_any_bytes_one_by_one(data: bytes) -> None:
    shown, _ = stream([bytes([b]) for b in data])
    assert "".join(shown) == data.decode("utf-8", "replace")


def test_only_whole_characters_are_shown() -> None:
    shown, _ = stream([b"a\xf0\x9f", b"\x91", b"\xa9b"])
    assert shown == ["a", "", "👩b", ""]


def test_unfinished_character_is_replaced_at_the_end() -> None:
    assert stream([b"a\xf0\x9f"])[0] == ["a", "\ufffd"]


def test_start_of_a_stop_string_is_held_back_and_released() -> None:
    shown, stopped = stream([b"one <", b"/", b"x>", b"</", b"s", b"> more"], ["</s>"])
    assert shown == ["one ", "", "</x>", "", "", "", ""]
    assert stopped


def test_stop_string_that_spans_the_end_of_a_token() -> None:
    text = TextStream(Chunks([b"answerObs", b"ervation:", b" junk"]), ["Observation:"])
    assert [text.push(0), text.stopped, text.push(1), text.stopped] == ["answer", False, "", True]
    assert text.push(2) == text.finish() == ""


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("xabcd", ["bc", "abc"], "x"),  # both end at c: the longest
        ("xabcd", ["abcd", "bc"], "xa"),  # "bc" is complete first
        ("aaab", ["aab"], "a"),
        ("ab", ["abc"], "ab"),
    ],
)
def test_which_stop_string_counts(text: str, stop: list[str], shown: str) -> None:
    for chunks in ([text.encode()], [c.encode() for c in text]):
        assert "".join(stream(chunks, stop)[0]) == shown


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    assert stream([b"hi"])[0] == ["hi", ""]
    hidden, shown = TextStream(Chunks([b"hi"])), TextStream(Chunks([b"hi"]), skip_special=False)
    assert (hidden.push(0) + hidden.push(-1), shown.push(0) + shown.push(-1)) == ("hi", "hi<|end|>")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(Chunks([]), ["a", ""])


@pytest.mark.parametrize("text", TEXTS)
def test_real_vocabulary(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.finish() == text == tokenizer.decode(ids)
    if not text.isascii():
        assert "" in pieces, "no character was split over tokens, so this proved nothing"
