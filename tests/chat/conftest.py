import os
from pathlib import Path

import pytest

from akv_jax.chat.choose_template import ChatFormat, chat_format
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.models.weights.default_model import ensure_default_model
from akv_jax.models.weights.gguf import GgufFile
from serving.settings import Settings

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture(scope="session")
def smollm_metadata() -> dict:
    """The header of the default model: its tokenizer and its chat template."""
    return dict(GgufFile(ensure_default_model(Settings.from_environment(os.environ).cache_dir)).metadata)


@pytest.fixture(scope="session")
def tokenizer(smollm_metadata: dict) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_metadata)


@pytest.fixture(scope="session")
def chat(smollm_metadata: dict, tokenizer: Tokenizer) -> ChatFormat:
    """SmolLM2's own way of chatting."""
    return chat_format(
        tokenizer,
        smollm_metadata["tokenizer.chat_template"],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        eos_token_ids=(2, 0),
    )


@pytest.fixture(scope="session")
def shared() -> Path:
    """Recorded requests and conversations, where they are at hand."""
    if not SHARED.is_dir():
        pytest.skip("no recorded data beside the repository")
    return SHARED
