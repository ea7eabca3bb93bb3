"""A llama-family model of ours as Hugging Face transformers has it, the same weights: for comparisons only."""

from __future__ import annotations

from typing import Any

import numpy as np

from akv_jax.models.load import LoadedModel
from akv_jax.models.weights.table import weight_table


def llama_in_transformers(model: LoadedModel, dtype: str = "float32") -> Any:
    """A `LlamaForCausalLM` of that torch dtype. Needs torch and transformers, and a model with plain rotary scaling."""
    import torch
    import transformers

    ours = model.config
    config = transformers.LlamaConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        head_dim=ours.head_dim,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        max_position_embeddings=ours.max_positions,
        rms_norm_eps=ours.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": ours.layers[0].rotary.base},
        tie_word_embeddings=ours.tie_embeddings,
    )
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(config)
    weights = {}
    for info in weight_table(ours):
        array: Any = model.params
        for key in info.path:
            array = array[key]
        weights[info.hf[0]] = torch.from_numpy(np.asarray(array, np.float32)).to(getattr(torch, dtype))
    unexpected = theirs.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    if unexpected:
        raise ValueError(f"weights that LlamaForCausalLM does not have: {unexpected}")
    theirs.tie_weights()
    # It was made without values, and a checkpoint has none for it.
    theirs.model.rotary_emb = type(theirs.model.rotary_emb)(config)
    return theirs.eval()


def random_cache(theirs: Any, batch: int, length: int) -> Any:
    """A `DynamicCache` of random K and V [batch, KV heads, length, head_dim] of every layer, of the model's dtype."""
    import torch
    import transformers

    config, cache = theirs.config, transformers.DynamicCache(config=theirs.config)
    shape = batch, config.num_key_value_heads, length, config.head_dim
    for layer in range(config.num_hidden_layers):
        k, v = torch.randn(2, *shape, dtype=theirs.dtype)
        cache.update(k, v, layer)
    return cache
