"""Mixtures of experts of Hugging Face's transformers, small and with random weights: their experts
are parameters [experts, M, K] of modules that are no linear layers.

transformers is imported by who makes a model, for importing it takes as long as importing torch.
"""

import torch

EXPERTS = 5
"""On 2, 3 and 4 ranks: 3 and 2; 2, 2 and 1; 2, 2, 1 and none."""

_OPTIONS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

KINDS = ("mixtral", "qwen-moe", "gpt-oss")
"""gpt-oss keeps its matrices as [in, out], and biases [experts, out] beside them."""

INCLUDE = ["model.layers.*.mlp.experts", "model.embed_tokens"]
"""What of them is converted beside linear layers: five weights, two in each block."""


def moe(kind: str, *, seed: int = 0) -> torch.nn.Module:
    """One of :data:`KINDS`, two layers; the same values for the same ``seed``."""
    import transformers as hf

    torch.manual_seed(seed)
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**_OPTIONS, num_local_experts=EXPERTS))
    if kind == "qwen-moe":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": 32}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_OPTIONS, **own))
    own = {
        "num_local_experts": EXPERTS,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eos_token_id": 1,
    }
    return hf.GptOssForCausalLM(hf.GptOssConfig(**_OPTIONS, **own))


def tokens(step: int = 0) -> torch.Tensor:
    """[2, 12] random ones, the same on every rank."""
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(step))
