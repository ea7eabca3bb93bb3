from pathlib import Path

import pytest

from akv_jax.chat.choose_template import ChatFormat, chat_format
from akv_jax.chat.tokenizer import Tokenizer
from akv_jax.models.load import LoadedModel

SHARED = Path(__file__).parents[3] / "shared"


@pytest.fixture(scope="session")
def tokenizer(smollm2: LoadedModel) -> Tokenizer:
    return smollm2.tokenizer


@pytest.fixture(scope="session")
def chat(smollm2: LoadedModel) -> ChatFormat:
    """SmolLM2's own way of chatting."""
    return chat_format(
        smollm2.tokenizer,
        smollm2.chat_template,
        bos_token=smollm2.bos_token,
        eos_token=smollm2.eos_token,
        eos_token_ids=smollm2.eos_token_ids,
    )


@pytest.fixture(scope="session")
def shared() -> Path:
    """Recorded requests and conversations, where they are at hand."""
    if not SHARED.is_dir():
        pytest.skip("no recorded data beside the repository")
    return SHARED
