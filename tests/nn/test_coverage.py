"""What a model has in codes, counted in parameters and bytes, and why the rest is not."""

import pytest
import torch
from torch import nn

import zerocast
from tests.support.llama import HIDDEN_96, llama
from zerocast.nn import convert, coverage, explain
from zerocast.sharded.report import grouped_names

NVFP4 = zerocast.NVFP4BlockScaling()


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([], []),
        ([""], [("", 1)]),
        (["a.0.b", "a.1.b", "a.2.b", "a.7.b"], [("a.{0..2,7}.b", 4)]),
        (["a.0.b", "a.0.c", "a.1.b", "a.1.c"], [("a.{0..1}.{b,c}", 4)]),
        (["0.e.0", "0.e.1", "1.e.0", "1.e.1", "2.e.1"], [("{0..1}.e.{0..1}", 4), ("2.e.1", 1)]),
        (["a.10.b", "a.9.b", "a.b", "c.0"], [("a.{9..10}.b", 2), ("a.b", 1), ("c.0", 1)]),
    ],
)  # fmt: skip
def test_names_are_grouped(names, patterns):
    """Those that differ in one part only are one pattern; every name is in one."""
    assert grouped_names(names) == patterns


def small(family: str, **options) -> nn.Module:
    """A model of transformers from its configuration, random."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    model = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, model)(config).float()


WIDTHS = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
MODELS = {
    "Llama": (WIDTHS, 57_344, 74_048),
    "Mixtral": (WIDTHS | {"num_local_experts": 4}, 32_768, 148_288),
    "Qwen3Moe": (
        WIDTHS | {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32}, 32_768, 99_264
    ),
    "GPT2": ({"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2}, 0, 173_824),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_parameters_are_counted_not_layers(family):
    """Experts in one parameter and GPT-2's Conv1D are parameters that are left, with the reason;
    everything is counted once, and the report is short.
    """
    options, in_codes, total = MODELS[family]
    model = small(family, **options)
    report = convert(model, NVFP4, filter_fqns=["lm_head"])
    found = report.coverage
    assert found == coverage(model)
    assert found.elements() == total == sum(p.numel() for p in model.parameters())
    assert found.elements("held in codes") == in_codes
    assert found.elements("left") == total - in_codes
    assert found.bytes("left") == 4 * (total - in_codes)
    text = str(report)
    assert text.splitlines()[1].startswith(
        f"{total:,} parameters, {100 * in_codes / total:.1f} % held in codes; in memory they take"
        if in_codes
        else f"{total:,} parameters, none in codes; in memory they take"
    )
    assert len(text.splitlines()) <= 10
    assert "round_master" not in text
    assert {
        "Llama": "layers.{0..1}.self_attn.{q_proj,k_proj,v_proj,o_proj}.weight [64x64]: held in",
        "Mixtral": "experts.gate_up_proj [4x128x64], 44.2 %: it belongs to class MixtralExperts, "
        "not torch.nn.Linear; include=['model.layers.*.mlp.experts'] takes it",
        "Qwen3Moe": "experts.gate_up_proj [4x64x64], 33.0 %: it belongs to class Qwen3MoeExperts, "
        "not torch.nn.Linear; include=['model.layers.*.mlp.experts'] takes it",
        "GPT2": "h.{0..1}.attn.c_attn.weight [64x192], 14.1 %: it belongs to class Conv1D, not "
        "torch.nn.Linear; include=['transformer.h.*.attn.c_attn'] takes it",
    }[family] in text
    assert "its name contains 'lm_head' of filter_fqns" in text


def test_a_head_that_was_replaced_since_is_noticed():
    """transformers' resize_token_embeddings makes a plain one in the place of a converted one."""
    model = llama(HIDDEN_96)
    convert(model, NVFP4)
    before = coverage(model).elements("held in codes")
    model.resize_token_embeddings(272, mean_resizing=False)
    after = coverage(model)
    assert before - after.elements("held in codes") == 256 * 96
    assert "left: lm_head.weight [272x96], " in str(after)
    assert "its layer was made after zerocast.nn.convert, or never given to it" in str(after)


@pytest.mark.parametrize(
    ("weights", "how"),
    [("master", "gathered in codes"), ("high_precision", "quantized under autocast")],
)
def test_every_kind_of_conversion_is_counted(weights, how):
    """Masters take what they took; weights in high precision are quantized by forwards."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    report = convert(model, NVFP4, weights=weights, filter_fqns=["1"])
    assert report.coverage.elements(how) == 32 * 32
    assert report.coverage.bytes() == 2 * (32 * 32 + 32) * 4
    assert f"  0.weight [32x32]: {how}" in str(report)


def test_tied_parameters_are_counted_once():
    """An embedding that is the head, under the head's name and reason."""
    model = llama(HIDDEN_96 | {"tie_word_embeddings": True})
    report = convert(model, NVFP4)
    (head,) = (p for p in report.coverage.parameters if p.name == "lm_head.weight")
    assert head.why == (
        "its weight is tied with model.embed_tokens.weight, which stays as it is; "
        "include=['model.embed_tokens'] converts both, or untie them"
    )
    assert report.coverage.elements() == sum(p.numel() for p in model.parameters())


def test_an_explanation_is_as_short_as_a_model_has_kinds_of_layers():
    """Totals first, then a line for all layers of which the same is said."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    convert(model, "current")
    lines = str(explain(model, "current")).splitlines()
    assert lines[0] == (
        "0 of 48 products are computed by GEMMs on codes, under Float8CurrentScaling()"
    )
    assert len(lines) <= 4
    assert lines[1].startswith("  {0..15}, output: decoded operands")
