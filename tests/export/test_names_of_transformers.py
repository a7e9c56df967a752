"""What stays in high precision has the names and the bytes of transformers' own checkpoints,
whatever a model calls its parameters.
"""

import pytest
import torch
from safetensors.torch import load_file

import zerocast
from tests.support.claims import message_of
from tests.support.exports import configuration, update
from tests.support.same_bytes import assert_same_bytes
from zerocast.errors import InputError
from zerocast.export import save_pretrained
from zerocast.refit import Receiver, Refit

transformers = pytest.importorskip("transformers", minversion="5")

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2
}  # fmt: skip
TEXT = SIZES | {"vocab_size": 128, "num_key_value_heads": 1, "head_dim": 32}
TWO_OF_FOUR = {"num_experts_per_tok": 2, "num_local_experts": 4}
VISION = SIZES | {"image_size": 28, "patch_size": 14}


def _gemma3():
    """Beside its text model a vision tower with a parameter of three dimensions."""
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION).to_dict(),
        text_config=transformers.Gemma3TextConfig(**TEXT).to_dict(),
        mm_tokens_per_image=4,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _linear_attention():
    """Convolutions, a shared expert, and routed ones."""
    own = {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention"],
    }
    return transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**TEXT, **own))


def _granite():
    """Experts that its checkpoints have fused, under another name."""
    config = transformers.GraniteMoeConfig(**TEXT, **TWO_OF_FOUR)
    return transformers.GraniteMoeForCausalLM(config)


def _llama4():
    """Experts of [in, out], which its checkpoints have so, too."""
    own = {"intermediate_size_mlp": 128, "interleave_moe_layer_step": 1}
    config = transformers.Llama4TextConfig(**TEXT, **TWO_OF_FOUR, **own)
    return transformers.Llama4ForCausalLM(config)


def _mixtral():
    """Experts that its checkpoints have one by one, under other names."""
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, **TWO_OF_FOUR))


def assert_plain_as_saved(model: torch.nn.Module, folder, include=()) -> None:
    """Export ``model``; compare what is in BF16 with the files that transformers writes of it."""
    modules = [name for name, _ in model.named_modules()]
    kept = [part for part in ("lm_head", "vision_tower") if any(part in name for name in modules)]
    model.save_pretrained(folder / "own")
    zerocast.nn.convert(model, "mxfp8", filter_fqns=kept, include=include)
    save_pretrained(model, folder / "ours", dialect="modelopt/mxfp8")

    own = load_file(folder / "own" / "model.safetensors")
    ours = load_file(folder / "ours" / "model.safetensors")
    assert {name for name in ours if not name.endswith("_scale")} == own.keys()
    plain = {name for name, tensor in ours.items() if tensor.dtype == torch.bfloat16}
    assert plain & {name for name, tensor in own.items() if tensor.dim() == 3 or "experts" in name}
    for name in plain:
        assert_same_bytes(ours[name], own[name], name)


@pytest.mark.parametrize("make", [_gemma3, _linear_attention, _granite, _llama4, _mixtral])
def test_what_stays_as_it_is_is_that_of_transformers(tmp_path, make):
    """Routers, experts, convolutions, the probe of a vision tower."""
    torch.manual_seed(0)
    model = make().bfloat16()
    for parameter in model.parameters():  # some models leave zeros, which are alike
        torch.nn.init.normal_(parameter)
    assert_plain_as_saved(model, tmp_path)


def test_experts_of_in_and_out_that_are_in_codes_are_stored_as_they_are(tmp_path):
    """By a dialect that has no place for them, with their values: here ones that codes hold."""
    model = _llama4().bfloat16()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter).sign()
    assert_plain_as_saved(model, tmp_path, include=["*.experts"])


def _qwen3(*, tie: bool = False, **parameters: torch.nn.Parameter):
    """Converted, but for its output layer."""
    config = transformers.Qwen3Config(**TEXT, tie_word_embeddings=tie)
    model = transformers.Qwen3ForCausalLM(config).bfloat16()
    for name, parameter in parameters.items():
        model.register_parameter(name, parameter)
    zerocast.nn.convert(model, "mxfp8", filter_fqns=["lm_head"])
    return model


@pytest.mark.parametrize("says_tied", [False, True])
def test_an_output_layer_that_is_not_tied_as_the_configuration_says_is_refused(tmp_path, says_tied):
    """Servers go by ``tie_word_embeddings``: a trained head would be left out, or be missing."""
    model = _qwen3(tie=not says_tied)
    model.config.tie_word_embeddings = says_tied
    message = message_of(InputError, save_pretrained, model, tmp_path, dialect="modelopt/mxfp8")
    assert f"has tie_word_embeddings={says_tied}" in message
    assert f"set config.tie_word_embeddings={not says_tied}" in message
    assert not any(tmp_path.iterdir())

    model.config.tie_word_embeddings = not says_tied
    save_pretrained(model, tmp_path, dialect="modelopt/mxfp8")
    assert configuration(tmp_path)["tie_word_embeddings"] is not says_tied
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) is says_tied


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_refused_in_high_precision_too(tmp_path, name, value):
    """By its name, as a weight in codes is; a buffer may hold infinities."""
    model = _qwen3()
    model.register_buffer("mask", torch.full((4,), float("-inf")))
    save_pretrained(model, tmp_path / "finite", dialect="modelopt/mxfp8")
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    with pytest.raises(zerocast.NonFiniteError, match=f"{name} holds a NaN or an infinity"):
        save_pretrained(model, tmp_path / "other", dialect="modelopt/mxfp8")
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_value_that_is_not_finite_on_one_rank_is_refused_on_all(dtype):
    """A frozen weight is each rank's own memory, and no rank may wait for one that has raised."""

    def run(comm):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)).bfloat16()
        model[1].requires_grad_(False)
        zerocast.nn.convert(model, "mxfp8")
        if comm.rank == 1:
            model[1].weight[3] = float("nan")
        export = zerocast.export.Export(model, "modelopt/mxfp8", dtype=dtype, group=comm)
        return message_of(zerocast.NonFiniteError, lambda: [*export.buckets()])

    assert all("1.weight holds a NaN" in said for said in zerocast.comm.run_in_process(2, run))


def test_deltas_of_values_that_are_not_finite_are_refused():
    """As whole tensors are, and before any is sent on."""
    model = _qwen3()
    refit = Refit(model, "modelopt/mxfp8", bucket_bytes=1 << 30)
    held = Receiver()
    update(refit, held)
    with torch.no_grad():
        model.model.norm.weight[0] = float("inf")
    with pytest.raises(zerocast.NonFiniteError, match=r"model\.norm\.weight"):
        list(refit.deltas(held.version))


def test_a_number_is_stored_under_the_name_of_transformers(tmp_path):
    """A parameter without dimensions, such as CLIP's ``logit_scale``."""
    model = _qwen3(scale=torch.nn.Parameter(torch.tensor(2.5).bfloat16()))
    save_pretrained(model, tmp_path, dialect="modelopt/mxfp8")
    assert load_file(tmp_path / "model.safetensors")["scale"].item() == 2.5
