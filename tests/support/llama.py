"""A Llama of Hugging Face's transformers, small and with random weights.

transformers is imported by who makes a model, for importing it takes as long as importing torch.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

import zerocast

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCABULARY = 256

HIDDEN_96 = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}
"""k_proj and v_proj [32, 96], down_proj [96, 272]: 3 ranks cut unevenly, 4 inside of blocks."""

TIED_160 = {
    "hidden_size": 160,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}
"""One head of keys, and lm_head is the embedding."""


def llama(options: dict, *, seed: int = 0) -> LlamaForCausalLM:
    """Two layers, their widths of ``options``; the same values for the same ``seed``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        intermediate_size=272,
        num_hidden_layers=2,
        max_position_embeddings=64,
        pad_token_id=0,
        **options,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


CONTEXTS = {"use_reentrant": False, "context_fn": zerocast.checkpoint_contexts}
"""What recomputes all quantizers alike, those of layers and those that a user made."""


def checkpoint_activations(model: LlamaForCausalLM, options: dict | None = CONTEXTS) -> None:
    """By transformers' own switch, with these options of torch's checkpoints."""
    with warnings.catch_warnings():
        # Its successor is not in the releases for Python 3.10.
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is", FutureWarning)
        model.gradient_checkpointing_enable(options)
    model.config.use_cache = False


def tokens(step: int) -> torch.Tensor:
    """[4, 16]: every seventh token, from random ones on; one of two batches, the same on every
    rank.
    """
    generator = torch.Generator().manual_seed(step % 2)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    return (start + 7 * torch.arange(16)) % VOCABULARY
