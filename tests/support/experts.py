"""Mixtures of experts of Hugging Face's transformers, small and with random weights: their experts
are parameters [experts, M, K] of modules that are no linear layers.

transformers is imported by who makes a model, for importing it takes as long as importing torch.
"""

from collections.abc import Mapping

import torch

import zerocast
from tests.support.fused import cast_as_served

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


MIXED = {
    "experts": {
        "*.experts.*": "nvfp4-4over6",
        "*.self_attn.*": "fp8-channel",
        "lm_head": None,
        "*": "mxfp8",
    },
    "groups": {
        "*.experts": "mxfp4",
        "*.self_attn.*": "nvfp4",
        "*.mlp.*": "fp8-tensor",
        "lm_head": "fp8-block",
    },
    "flat": {
        "*.gate_up_proj": "nvfp4-4over6-1x16",
        "*.experts.*": "nvfp4-1x16",
        "*.self_attn.*": "nvfp4-1x16",
        "*.mlp.*": "nvfp4-4over6-1x16",
        "lm_head": None,
    },
}
"""Recipes by patterns of names, for all linear layers and stacks of :func:`mixed_moe`. Weights that
servers fuse have scales of rows or blocks under the first; under the others they share an amax. The
last one's are in blocks of one dimension.
"""


def mixed_moe(*, seed: int = 0) -> torch.nn.Module:
    """Qwen-MoE whose first layer is dense, so that it has layers of every kind."""
    return moe("qwen-moe", seed=seed, mlp_only_layers=[0])


def own_casts(
    masters: Mapping[str, torch.Tensor], report: zerocast.nn.ConversionReport, dtype: torch.dtype
) -> dict[str, zerocast.QuantizedTensor]:
    """The unsharded cast of every weight that was converted, under its own recipe."""
    found = {
        name: zerocast.quantize(masters[name], recipe, dtype=dtype, columnwise=False)
        for name, recipe in report.recipes.items()
        if name in report.included
    }
    for recipe in {report.recipes[name] for name in report.converted}:
        names = [f"{n}.weight" for n in report.converted if report.recipes[n] == recipe]
        found |= cast_as_served({name: masters[name] for name in names}, recipe, dtype)
    return found


def moe(kind: str, *, seed: int = 0, **others: object) -> torch.nn.Module:
    """One of :data:`KINDS`, two layers; the same values for the same ``seed``."""
    import transformers as hf

    torch.manual_seed(seed)
    if kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**_OPTIONS, num_local_experts=EXPERTS))
    if kind == "qwen-moe":
        own = {"num_experts": EXPERTS, "moe_intermediate_size": 32, **others}
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
