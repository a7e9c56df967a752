"""Weights that servers fuse have one tensor scale in what is exported, or are refused."""

import copy

import pytest
import torch

import zerocast
from tests.support.exports import of_masters, tensors_of
from tests.support.llama import TIED_160, llama
from tests.support.models import GroupedExperts
from tests.support.ranks import run_ranks
from tests.support.weights import NVFP4
from zerocast.errors import InputError
from zerocast.export import Export, save_pretrained
from zerocast.optim import ZeroOptimizer
from zerocast.refit import Refit

SCALED = {
    "compressed-tensors/nvfp4": NVFP4,
    "modelopt/nvfp4": NVFP4,
    "compressed-tensors/fp8-tensor": zerocast.Float8CurrentScaling(fp8_format="e4m3"),
    "modelopt/fp8": zerocast.Float8CurrentScaling(fp8_format="e4m3"),
}
"""The dialects with a scale of the tensor, and recipes whose bytes they hold."""

FUSED = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]


def uneven() -> torch.nn.Module:
    """A Llama in BF16 whose projections have amaxes of their own."""
    model = llama(TIED_160).bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(1 + len(name) % 5 + 4 * ("k_proj" in name) + 2 * ("up_proj" in name))
    return model


def static(dialect: str, model: torch.nn.Module, *kept: str) -> dict[str, object]:
    """The scales of inputs that a dialect needs: of all linear layers but those ``kept``."""
    linear = [name for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    cast = [name for name in linear if not any(part in name for part in kept)]
    return {"input_scales": dict.fromkeys(cast, 1.0)} if dialect == "modelopt/fp8" else {}


def assert_shared(tensors: dict[str, torch.Tensor]) -> None:
    """The weights that servers fuse have one tensor scale, of each layer and set."""
    found: dict[str, list[float]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        parent, _, layer = module.rpartition(".")
        if tensor.numel() == 1 and part.startswith("weight_"):
            for names in FUSED:
                if layer in names:
                    found.setdefault(f"{parent}.{names[0]}", []).append(tensor.item())
    assert sorted(map(len, found.values())) == [2, 2, 3, 3]
    assert all(len(set(each)) == 1 for each in found.values())


@pytest.mark.parametrize("dialect", SCALED)
def test_by_default_a_model_is_exported_as_servers_fuse_it(dialect):
    """Converted and trained, its bytes and casts of its masters have one tensor scale for each set;
    so has a model that was never converted, or was without groups, where it is cast.
    """
    kept = ["down_proj", "lm_head"]
    options, own = {"filter_fqns": kept}, static(dialect, uneven(), *kept)
    for groups in ({}, {"amax_groups": ()}):
        model = uneven()
        zerocast.nn.convert(model, SCALED[dialect], **options, **groups)
        optimizer = ZeroOptimizer(model.named_parameters(), lr=1e-2)
        for parameter in model.parameters():
            parameter.grad = torch.ones(parameter.shape, dtype=parameter.dtype)
        optimizer.step()
        exports = [Export(model, dialect, optimizer=optimizer, from_masters=True, **own)]
        if not groups:
            exports.append(Export(model, dialect, **own))
        for export in exports:
            assert_shared(tensors_of(export))
    include = ["*self_attn*", "*gate_proj", "*up_proj"]
    assert_shared(tensors_of(uneven(), dialect, include=include, **own))


@pytest.mark.parametrize("dialect", SCALED)
def test_weights_that_servers_fuse_are_refused_with_scales_of_their_own(dialect, tmp_path):
    """On every rank, by name, before anything is written: bytes of a training without groups, and
    casts that are told to have none. Bytes that are equal by themselves are not.
    """
    base = uneven()

    def run(comm):
        model = copy.deepcopy(base)
        zerocast.nn.convert(model, SCALED[dialect], filter_fqns=["down_proj"], amax_groups=())
        optimizer = ZeroOptimizer(model.named_parameters(), group=comm, lr=0)
        own = {"dialect": dialect, "optimizer": optimizer}
        said = []
        for options in (own, {**own, "from_masters": True, "amax_groups": ()}):
            with pytest.raises(InputError, match="from_masters=True with amax_groups='auto'") as e:
                save_pretrained(model, tmp_path / "out", **options)
            said.append(str(e.value))
        with pytest.raises(InputError, match="servers fuse"):
            Refit(model, dialect, group=comm)
        return said

    layer = "model.layers.0.self_attn"
    for said in run_ranks("in_process", 2, run):
        for each in said:
            assert f"servers fuse {layer}.q_proj.weight, {layer}.k_proj.weight, {layer}.v" in each
            assert "(and others, 4 times) into one layer" in each
    assert not (tmp_path / "out").exists()

    equal = copy.deepcopy(base)
    with torch.no_grad():
        for parameter in equal.parameters():
            parameter.clamp_(-0.01, 0.01)[(0,) * parameter.dim()] = 0.01
    zerocast.nn.convert(equal, SCALED[dialect], filter_fqns=["down_proj"], amax_groups=())
    own = static(dialect, equal, "down_proj", "lm_head")
    assert_shared(tensors_of(equal, dialect, **own))


def test_a_dialect_without_a_scale_of_the_tensor_asks_for_no_groups():
    """Blocks, rows and MX scales fuse as they are."""
    for dialect, recipe in (
        ("deepseek/fp8-ue8m0", zerocast.Float8BlockScaling()),
        ("compressed-tensors/mxfp8", "mxfp8"),
        ("compressed-tensors/fp8-channel", zerocast.Float8RowwiseScaling(fp8_format="e4m3")),
    ):
        model = uneven()
        zerocast.nn.convert(model, recipe, filter_fqns=["down_proj", "lm_head"], amax_groups=())
        assert tensors_of(model, dialect)


def test_the_matrices_of_two_stacks_share_their_scales():
    """torchtitan's experts: matrix by matrix where they are cast, and refused where they are not
    grouped.
    """
    experts = GroupedExperts([1.0, 2.0, 3.0], [5.0, 10.0, 15.0])
    model = torch.nn.ModuleDict({"experts": experts})
    zerocast.nn.convert(model, NVFP4, include=["experts"], amax_groups=())
    with pytest.raises(InputError, match=r"fuse experts\.0\.w1_EFD\.weight, experts\.0\.w3_EFD"):
        Export(model, "modelopt/nvfp4")
    tensors = tensors_of(model, "modelopt/nvfp4", **of_masters(model))
    for i in range(3):
        for name in ("w1_EFD", "w3_EFD"):
            scale = tensors[f"experts.{i}.{name}.weight_scale_2"]
            assert scale == torch.tensor(5.0 * (i + 1)) / 2688
