"""From a file, a directory or nothing at all to a model that is ready to run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.config import ModelConfig
from akv_jax.models.families import family_of_gguf, family_of_hf
from akv_jax.models.weights.default_model import DEFAULT_MODEL, ensure_default_model
from akv_jax.models.weights.errors import ModelError
from akv_jax.models.weights.gguf import GgufFile
from akv_jax.models.weights.safetensors import HfDirectory
from akv_jax.models.weights.table import ArrayInfo, Params, TensorSource, load_params, weight_table

#: Tokens that end a turn in any vocabulary that has them as control tokens, whatever the file declares.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
_GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
#: The part of a file name that tells how its weights are stored: "SmolLM2-135M-Instruct.Q4_1".
_QUANTISATION = re.compile(r"[.\-_](I?Q\d\w*|T?Q\d_\w+|B?F16|FP16|F32|FP32|MXFP4\w*)$", re.IGNORECASE)


@dataclass(frozen=True)
class LoadedModel:
    """A model in host memory."""

    config: ModelConfig
    #: NumPy arrays; `weights.table.weight_table(config)` names every one with its shape and axes.
    params: Params = field(repr=False)
    tokenizer: Tokenizer
    #: Jinja source as the model brings it, None if it has none.
    chat_template: str | None
    #: Tokens that end a reply, the declared ones first.
    eos_token_ids: tuple[int, ...]
    #: As chat templates want them; "" if the model has none.
    bos_token: str
    eos_token: str
    #: What `/v1/models` calls it.
    name: str
    #: Where it was read from.
    source: str


def load_model(
    path: Path | None, dtype: Literal["float32", "bfloat16"], cache_dir: Path, progress: bool = True
) -> LoadedModel:
    """Load a GGUF file or a Hugging Face directory; None is the default model, fetched into `cache_dir` if need be.

    Raises `ModelError` with a message for the person who started the program.
    """
    name = None
    if path is None:
        path, name = ensure_default_model(cache_dir, progress), DEFAULT_MODEL.name
    if not path.exists():
        raise ModelError(f"{path} does not exist, expected a .gguf file or a Hugging Face model directory")
    return _load_hf(path, name, dtype, progress) if path.is_dir() else _load_gguf(path, name, dtype, progress)


def _load_gguf(path: Path, name: str | None, dtype: str, progress: bool) -> LoadedModel:
    file = GgufFile(path)
    metadata = file.metadata
    if metadata.get("split.count", 1) > 1:
        raise ModelError(f"{path} is one of {metadata['split.count']} parts; join them: llama-gguf-split --merge")
    name = name or _QUANTISATION.sub("", path.stem)
    family = family_of_gguf(metadata.get("general.architecture"))
    config = replace(family.config_from_gguf(file), name=name)
    params = _read_params(
        config,
        _Without(file, family.derived_gguf_tensors),
        dtype,
        lambda info, array: family.reorder_gguf(config, info, array),
        progress,
    )
    tokenizer = Tokenizer.from_gguf(metadata)
    declared = [metadata[key] for end in _GGUF_END_KEYS if (key := f"tokenizer.ggml.{end}") in metadata]
    return LoadedModel(
        config,
        params,
        tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        eos_token_ids=_end_tokens(tokenizer, declared),
        bos_token=tokenizer.token(tokenizer.bos_token_id),
        eos_token=tokenizer.token(tokenizer.eos_token_id),
        name=name,
        source=str(path),
    )


def _load_hf(path: Path, name: str | None, dtype: str, progress: bool) -> LoadedModel:
    directory = HfDirectory(path)
    name = name or _hub_name(path)
    config = replace(family_of_hf(directory.config.get("model_type")).config_from_hf(directory.config), name=name)
    settings = directory.read_json("tokenizer_config.json", required=False)
    generation = directory.read_json("generation_config.json", required=False)
    bos_token, eos_token = _spelled(settings.get("bos_token")), _spelled(settings.get("eos_token"))
    if not (path / "tokenizer.json").exists():
        raise ModelError(f"{path} has no tokenizer.json (tokenizer.model and vocab.json are not read)")
    tokenizer = Tokenizer.from_file(path / "tokenizer.json", bos_token, eos_token)
    declared = generation.get("eos_token_id", directory.config.get("eos_token_id"))
    declared = declared if isinstance(declared, list) else [declared]
    return LoadedModel(
        config,
        _read_params(config, directory, dtype, None, progress),
        tokenizer,
        chat_template=_hf_chat_template(directory, settings.get("chat_template")),
        eos_token_ids=_end_tokens(tokenizer, [*declared, tokenizer.eos_token_id]),
        bos_token=bos_token,
        eos_token=eos_token,
        name=name,
        source=str(path),
    )


class _Without:
    """A tensor source without the tensors that the configuration has taken in."""

    def __init__(self, source: GgufFile, left_out: Callable[[str], bool]) -> None:
        self.file_format: Literal["gguf", "hf"] = source.file_format
        self.shapes = {name: shape for name, shape in source.shapes.items() if not left_out(name)}
        self.read = source.read


def _read_params(
    config: ModelConfig,
    source: TensorSource,
    dtype: str,
    transform: Callable[[ArrayInfo, np.ndarray], np.ndarray] | None,
    progress: bool,
) -> Params:
    table = weight_table(config)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not progress) as bar:
        task = bar.add_task(f"Loading {config.name} ({dtype})", total=len(table))
        return load_params(table, source, dtype, transform, on_array=lambda _: bar.advance(task))


def _end_tokens(tokenizer: Tokenizer, declared: Iterable[int | None]) -> tuple[int, ...]:
    known = [token_id for token in _END_OF_TURN if (token_id := tokenizer.token_id(token)) is not None]
    ids = [int(token_id) for token_id in declared if token_id is not None]
    ids += [token_id for token_id in known if tokenizer.is_special(token_id)]
    return tuple(dict.fromkeys(ids))


def _spelled(token: object) -> str:
    """A token of tokenizer_config.json: a string, an object with `content`, or null."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _hf_chat_template(directory: HfDirectory, declared: object) -> str | None:
    """chat_template.jinja if there is one, else tokenizer_config.json's: one template or several with names."""
    if (template := directory.read_text("chat_template.jinja")) is not None:
        return template
    if isinstance(declared, list):
        named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
        declared = named.get("default")
    return declared if isinstance(declared, str) else None


def _hub_name(path: Path) -> str:
    """The directory's name, or the model's where the directory is a snapshot in the Hugging Face cache."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.name
