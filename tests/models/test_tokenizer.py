"""Text to ids and back: SmolLM2's tokenizer rebuilt from its GGUF header, and the other kinds on tiny vocabularies."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.models.load import LoadedModel
from akv_jax.models.weights.errors import ModelError
from tests.models import checkpoints as tiny


def header(**changes) -> dict:
    """A byte-level GGUF header; a change to None takes the key away."""
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tiny.VOCABULARY,
        "merges": tiny.MERGES,
        "token_type": np.array([3] * 3 + [1] * (len(tiny.VOCABULARY) - 3)),
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items() if value is not None}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]


def test_a_long_text_leaves_other_threads_running(smollm2: LoadedModel) -> None:
    """Seconds of work inside the library: a server could answer nobody meanwhile."""
    text, over, turns = "a text of words that are not all alike " * 8000, threading.Event(), 0

    def count() -> None:
        nonlocal turns
        while not over.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    for encode in (smollm2.tokenizer.encode, smollm2.tokenizer.encode_with_offsets):
        before = turns
        encode(text)
        # Some hundred, and one or two where nobody else gets a turn.
        assert turns - before > 10
    over.set()
    thread.join()


# --- SmolLM2 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19556, 28, 905, 17]),
        ("The capital of France is", [504, 3575, 282, 4649, 314]),
        ("123 abc", [33, 34, 35, 43239]),
        ("2 + 2 = 4", [34, 1232, 216, 34, 446, 216, 36]),
        ("  spaced  text", [216, 23861, 216, 1694]),
        (
            "The quick brown fox jumps over 13 lazy dogs.",
            [504, 2365, 6354, 16438, 27003, 690, 216, 33, 35, 23790, 5046, 30],
        ),
        ("<|endoftext|><|im_start|><|im_end|>", [0, 1, 2]),
        ("", []),
    ],
)
def test_smollm2_ids(smollm2, text, ids):
    """As the model's own tokenizer.json gives them; digits are split one by one."""
    assert smollm2.tokenizer.encode(text) == ids
    assert smollm2.tokenizer.decode(ids) == text


def test_smollm2_chat_prompt(smollm2):
    text = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    )
    system = [9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert smollm2.tokenizer.encode(text) == [1, *system, 2, 198, 1, 4093, 198, 28120, 905, 2, 198, 1, 520, 9531, 198]


#: SmolLM2's vocabulary has no token for six control characters, nor for planes 4 to 16 of Unicode.
WITH_TOKENS = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d")


@given(st.text(WITH_TOKENS, max_size=60))
def test_smollm2_round_trip_and_offsets(smollm2, text):
    """Any text comes back; offsets run forward without a hole, and each covers its token's bytes."""
    tokenizer = smollm2.tokenizer
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    covered = 0
    for token_id, (start, end) in zip(ids, offsets, strict=True):
        assert start <= covered <= end and start < end
        assert tokenizer.token_bytes(token_id) in text[start:end].encode()
        covered = end
    assert covered == len(text)


def test_each_part_of_a_character_has_its_span(smollm2):
    ids, offsets = smollm2.tokenizer.encode_with_offsets("a👍🏽b")
    assert offsets == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (2, 3), (2, 3), (3, 4)]
    assert [smollm2.tokenizer.token_bytes(i) for i in ids[1:4]] == [b"\xf0\x9f", b"\x91", b"\x8d"]
    assert smollm2.tokenizer.decode(ids[:2]) == "a�"


def test_bytes_without_a_token_vanish(smollm2):
    ids, offsets = smollm2.tokenizer.encode_with_offsets("a\x04b")
    assert smollm2.tokenizer.decode(ids) == "ab"
    assert offsets == [(0, 1), (2, 3)]


def test_special_tokens(smollm2):
    tokenizer = smollm2.tokenizer
    plain = tokenizer.encode("<|im_end|>", allow_special=False)
    assert tokenizer.encode("<|im_end|>") == [2]
    assert 2 not in plain and tokenizer.decode(plain) == "<|im_end|>"
    assert [tokenizer.is_special(i) for i in (0, 1, 2, 198)] == [True, True, True, False]
    assert tokenizer.decode([1, 28120, 2]) == "<|im_start|>hello<|im_end|>"
    assert tokenizer.decode([1, 28120, 2], skip_special=True) == "hello"
    assert tokenizer.token_id("<|im_end|>") == 2 and tokenizer.token_id("<|nothing|>") is None
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    # Embeddings may be padded to more rows than the vocabulary has tokens.
    assert tokenizer.token_bytes(49152) == b"" and tokenizer.decode([49152, 28120]) == "hello"


# --- other vocabularies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ123", "'s", "ĊĊ"]),
        ("smollm", ["a", "ĠĠ", "1", "2", "3", "'s", "ĊĊ"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "123", "'s", "ĊĊ"]),
        ("qwen2", ["a", "Ġ", "Ġ", "1", "2", "3", "'s", "ĊĊ"]),
        ("default", ["a", "Ġ", "Ġ", "123", "'", "s", "ĊĊ"]),
    ],
)
def test_words_of_each_pre_tokenizer(pre, words):
    """One token a word: a vocabulary that has all the words, and merges that build every string from the left."""
    alphabet = sorted({character for word in words for character in word})
    built = [word[:end] for word in words for end in range(2, len(word) + 1)]
    merges = [f"{word[:-1]} {word[-1]}" for word in dict.fromkeys(built)]
    tokens = list(dict.fromkeys([*alphabet, *built]))
    tokenizer = Tokenizer.from_gguf(header(pre=pre, tokens=tokens, merges=merges, token_type=[1] * len(tokens)))
    assert [tokenizer.token(i) for i in tokenizer.encode("a  123's\n\n")] == words


def test_llama3_takes_whole_words_without_merges():
    tokens = [*tiny.VOCABULARY, "whole"]
    kinds = np.array([3] * 3 + [1] * (len(tokens) - 3))
    assert pieces(Tokenizer.from_gguf(header(pre="llama-bpe", tokens=tokens, token_type=kinds)), "whole") == ["whole"]
    assert len(pieces(Tokenizer.from_gguf(header(tokens=tokens, token_type=kinds)), "whole")) == 5


def test_user_defined_tokens_are_matched_but_not_special():
    tokens = [*tiny.VOCABULARY, "<think>", "<｜ende｜>"]
    kinds = np.array([3] * 3 + [1] * (len(tiny.VOCABULARY) - 3) + [4, 3])
    tokenizer = Tokenizer.from_gguf(header(tokens=tokens, token_type=kinds))
    think, end = len(tokens) - 2, len(tokens) - 1
    assert tokenizer.encode("<think><｜ende｜>") == [think, end]
    assert not tokenizer.is_special(think) and tokenizer.is_special(end)
    assert tokenizer.token_bytes(end) == "<｜ende｜>".encode()
    assert tokenizer.decode([think, end]) == "<think><｜ende｜>"
    assert tokenizer.encode("hell")[0] == tiny.VOCABULARY.index("hell")


def sentencepiece(**changes) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello", "he"]
    scores = [0.0] * 259 + [-20.0] * 5 + [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    return Tokenizer.from_gguf(
        header(
            model="llama",
            tokens=["<unk>", "<s>", "</s>", *bytes_, *words],
            scores=scores,
            token_type=np.array([2, 3, 3] + [6] * 256 + [1] * len(words)),
            merges=None,
            bos_token_id=1,
            eos_token_id=2,
            unknown_token_id=0,
            **changes,
        )
    )


def test_sentencepiece_merges_by_score():
    tokenizer = sentencepiece()
    assert [tokenizer.token(i) for i in tokenizer.encode("hello")] == ["▁hello"]
    # "el" scores better than "he", and "▁h" better than both: ▁h + el, never ▁ + he + l.
    assert [tokenizer.token(i) for i in tokenizer.encode("helel")] == ["▁hel", "el"]
    bare = sentencepiece(add_space_prefix=False)
    assert [bare.token(i) for i in bare.encode("hello")] == ["h", "el", "lo"]


def test_sentencepiece_bytes_and_blanks():
    tokenizer = sentencepiece()
    for text in ("hello hello", "hé\n👍", " hello  h", "h"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(tokenizer.encode("hello")[0]) == b" hello"
    assert tokenizer.token_bytes(3 + 0xF0) == b"\xf0"
    ids, offsets = tokenizer.encode_with_offsets("h👍")
    assert [tokenizer.token(i) for i in ids] == ["▁h", "<0xF0>", "<0x9F>", "<0x91>", "<0x8D>"]
    assert offsets == [(0, 1)] + [(1, 2)] * 4


def test_tokenizer_json_adds_nothing_and_keeps_offsets(tmp_path):
    """A post-processor that adds BOS and trims blanks from offsets is Llama 3's; chat templates write their own BOS."""
    backend = Backend(models.BPE({token: i for i, token in enumerate(tiny.VOCABULARY)}, [("Ġ", "w")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(tiny.CONTROL)
    bos = processors.TemplateProcessing("<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), bos])
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer.json", bos_token="<|im_start|>")
    ids, offsets = tokenizer.encode_with_offsets("a w b")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"a", b" w", b" ", b"b"]
    assert offsets == [(0, 1), (1, 3), (3, 4), (4, 5)]
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "t5"}, r"tokenizer\.ggml\.model is 't5', expected gpt2 or llama"),
        ({"model": None}, r"tokenizer\.ggml\.model is None"),
        ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
        ({"pre": "chatglm-bpe"}, r"tokenizer\.ggml\.pre is 'chatglm-bpe', expected one of smollm, gpt-2"),
        ({"merges": ["h zzz"]}, r"tokenizer\.ggml\.merges do not fit"),
        ({"model": "llama", "scores": [0.0]}, r"tokenizer\.ggml\.scores must have one score"),
    ],
)
def test_headers_that_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(header(**changes))


def test_tokenizer_json_of_another_kind_is_refused(tmp_path):
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="decoder WordPiece, expected ByteLevel"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
