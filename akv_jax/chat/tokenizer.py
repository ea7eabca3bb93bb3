"""Text to token ids and back, with the exact bytes of every token.

`Tokenizer` wraps a `tokenizers.Tokenizer`, read from a `tokenizer.json` or rebuilt from a GGUF header. Nothing is ever
added to a text: beginning- and end-of-sequence tokens are the chat template's to write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from akv_jax.models.weights.errors import ModelError

#: How a vocabulary writes bytes: GPT-2's printable stand-ins, or SentencePiece's "▁" for a space and <0x0A>.
Spelling = Literal["byte_level", "sentencepiece"]

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
#: What llama.cpp splits by where a file names no pre-tokenizer, one after another.
_DEFAULT_SPLITS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")


class Tokenizer:
    """Encodes and decodes; immutable and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        spelling: Spelling,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        strips_first_space: bool = False,
    ) -> None:
        # A post-processor would add BOS, or trim blanks from the offsets; the other two would cut or pad.
        backend.post_processor = None
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling
        self._strips_first_space = strips_first_space
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in self._added.items() if token.special)
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Rebuild the tokenizer that a GGUF header describes. Raises `ModelError` for kinds that are not supported."""
        kind = metadata.get("tokenizer.ggml.model")
        tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise ModelError("the GGUF header has no tokenizer.ggml.tokens")
        if kind == "gpt2":
            backend, spelling = _byte_level_bpe(metadata, tokens), "byte_level"
        elif kind == "llama":
            backend, spelling = _sentencepiece_bpe(metadata, tokens), "sentencepiece"
        else:
            raise ModelError(f"tokenizer.ggml.model is {kind!r}, expected gpt2 or llama")
        _add_gguf_tokens(backend, tokens, metadata.get("tokenizer.ggml.token_type", ()))
        return cls(
            backend,
            spelling,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=metadata.get("tokenizer.ggml.eos_token_id"),
            strips_first_space=spelling == "sentencepiece" and metadata.get("tokenizer.ggml.add_space_prefix", True),
        )

    @classmethod
    def from_file(cls, path: Path, bos_token: str | None = None, eos_token: str | None = None) -> Tokenizer:
        """Read a `tokenizer.json`. Raises `ModelError` if it is damaged or of a kind that is not supported."""
        try:
            text = path.read_text("utf-8")
            decoder = json.loads(text).get("decoder") or {}
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from error
        steps = {step.get("type"): step for step in decoder.get("decoders", [decoder])}
        spelling: Spelling
        if "ByteLevel" in steps:
            spelling = "byte_level"
        elif "ByteFallback" in steps or "Metaspace" in steps:
            spelling = "sentencepiece"
        else:
            kinds = ", ".join(str(kind) for kind in steps)
            raise ModelError(f"{path}: decoder {kinds}, expected ByteLevel, ByteFallback or Metaspace")
        metaspace = steps.get("Metaspace", {})
        return cls(
            backend,
            spelling,
            bos_token_id=backend.token_to_id(bos_token) if bos_token else None,
            eos_token_id=backend.token_to_id(eos_token) if eos_token else None,
            strips_first_space="Strip" in steps or metaspace.get("prepend_scheme", "never") != "never",
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id with a token. A model's embedding may have more rows."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of the text. With `allow_special` False, "<|im_end|>" and its like are ordinary text.

        Some vocabularies lack a few bytes (SmolLM2's: U+0004, U+0006, U+0013, U+0014, U+0016, U+001D and everything
        from U+40000 on); these vanish, as they do in the model's own tokenizer.
        """
        return _encode(self._backend if allow_special else self._plain, text).ids

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and for each the half-open range of characters that it covers.

        A character split over several tokens gives each of them its whole range.
        """
        encoding = _encode(self._backend, text)
        return encoding.ids, encoding.offsets

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes of a token, a part of a character included. Ids without a token (padding) have none."""
        if (added := self._added.get(token_id)) is not None:
            return added.content.encode("utf-8")
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._spelling == "byte_level":
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:
                return token.encode("utf-8")
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace(_SPACE, " ").encode("utf-8")

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """The text of the tokens, broken characters as U+FFFD. Encoders that put a space before the text lose it."""
        kept = [token_id for token_id in ids if not (skip_special and token_id in self._special)]
        text = b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")
        if self._strips_first_space and kept and kept[0] not in self._added:
            return text.removeprefix(" ")
        return text

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which text output leaves out."""
        return token_id in self._special

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it ("<|im_end|>"); None if there is none."""
        return self._backend.token_to_id(token)

    def token(self, token_id: int | None) -> str:
        """A token as the vocabulary spells it, "" for None and for ids without one."""
        return "" if token_id is None else self._backend.id_to_token(token_id) or ""


def _encode(backend: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    """As a batch of one: unlike `encode`, that lets other threads run meanwhile, and a long text takes seconds."""
    return backend.encode_batch([text], add_special_tokens=False)[0]


def _byte_stand_ins() -> dict[str, int]:
    """The byte of each character of GPT-2's alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_stand_ins()


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        # Llama 3 takes a whole word that is in the vocabulary even where no merges lead to it.
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # `tokenizers` raises plain Exception
        raise ModelError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names, as the models' own tokenizer.json has it."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
        return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(p), "isolated") for p in patterns), whole])

    known = {
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]),
        "gpt-2": gpt2,
        "llama-bpe": split(_LLAMA3_WORDS),
        "qwen2": split(_QWEN2_WORDS),
        "default": split(*_DEFAULT_SPLITS),
    }
    if name not in known:
        raise ModelError(
            f"tokenizer.ggml.pre is {name!r}, expected one of {', '.join(known)}; "
            "load the original Hugging Face directory instead"
        )
    return known[name]


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: any two neighbours that spell a token merge, the best score first."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise ModelError("tokenizer.ggml.scores must have one score for each of tokenizer.ggml.tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, index in ids.items():
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [(left, right) for left, right in pairs if left in ids and right in ids]
        merges += [(-float(scores[index]), ids[left], ids[right], left, right) for left, right in found]
    merges.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    pairs_by_rank = [(left, right) for *_, left, right in merges]
    bpe = models.BPE(ids, pairs_by_rank, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    prefix = [normalizers.Prepend(_SPACE)] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _add_gguf_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens that are matched in the text before it is split into words."""
    by_type: dict[int, list[str]] = {_UNKNOWN: [], _CONTROL: [], _USER_DEFINED: []}
    for token, kind in zip(tokens, types):
        if int(kind) in by_type:
            by_type[int(kind)].append(token)
    special = by_type[_CONTROL] + by_type[_UNKNOWN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in by_type[_USER_DEFINED]])
