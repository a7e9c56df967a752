"""The gradient that a master gets: that of the decoded weight, unchanged, of saturated values, too;
and what saturates.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import zerocast
from tests.support.recipes import each, param
from tests.support.same_bytes import assert_same_bytes
from zerocast.sharded.placement import to_local


@pytest.fixture
def one_rank():
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Gated(torch.nn.Module):
    """A linear layer, and two matrices of a module that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 32, bias=False)
        self.matrices = torch.nn.Parameter(torch.randn(2, 64, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.matrices
        return (self.linear(x) @ gate.t()).tanh() * (self.linear(x) @ up.t())


def gradients(model: torch.nn.Module, recipe=None) -> dict[str, torch.Tensor]:
    """By parameter, the same loss each time; under autocast where a ``recipe`` is given."""
    x = torch.randn(48, 64, generator=torch.Generator().manual_seed(1))
    with zerocast.autocast(enabled=recipe is not None, recipe=recipe or "current"):
        out = model(x)
    out.square().sum().backward()
    return {name: to_local(each.grad) for name, each in model.named_parameters()}


def model_of(weights: str | None, recipe, *, include=("matrices",)) -> torch.nn.Module:
    """The same values each time; of None, plain, with those of the codes."""
    torch.manual_seed(0)
    model = Gated()
    if weights is None:
        for matrix in (model.linear.weight, *model.matrices):
            matrix.data.copy_(zerocast.quantize(matrix.detach(), recipe).dequantize())
        return model
    zerocast.nn.convert(model, recipe, weights=weights, include=include, strict=True)
    return fully_shard(model) if weights == "master" else model


@pytest.mark.parametrize("weights", ["quantized", "master"])
@each("current", "mxfp8", "mxfp4-floor", "nvfp4", "nvfp4-4over6", "nvfp4-1x16")
def test_a_master_gets_the_gradient_of_the_decoded_weight(recipe, weights, one_rank):
    """To the bit, as if the codes' values were a plain weight: nothing is masked or scaled."""
    expected = gradients(model_of(None, recipe))
    for name, gradient in gradients(model_of(weights, recipe)).items():
        assert_same_bytes(gradient, expected[name], name)


@each("current", "mxfp8", "mxfp4-floor", "nvfp4-4over6")
def test_the_gradient_under_autocast_is_the_same_wherever_codes_are_made(recipe, one_rank):
    """With quantized operands: of codes in the parameter, of codes that FSDP2 gathered, and of a
    weight in high precision, which the forward quantizes.
    """
    kinds = ("quantized", "master", "high_precision")
    found = [gradients(model_of(kind, recipe, include=()), recipe) for kind in kinds]
    for name, gradient in found[0].items():
        for other in found[1:]:
            assert_same_bytes(gradient, other[name], name)


@pytest.mark.parametrize(
    ("recipe", "saturates"),
    [
        param("nvfp4", False),
        param("nvfp4-1x16", False),
        param("mxfp4", False),
        param("mxfp4-even", False),
        param("mxfp4-floor", True),
    ],
)
def test_only_scales_that_are_rounded_down_saturate(recipe, saturates):
    """Where the code is E2M1's largest, 6, the weight is below 7 scales: it would be rounded to 6
    if there were larger codes, too. Under "floor" it is up to 8 scales.
    """
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(2))
    quantized = zerocast.quantize(weight, recipe)
    pairs = quantized.rowwise_data
    is_largest = torch.stack((pairs & 7, pairs >> 4 & 7), -1).flatten(-2) == 7
    assert is_largest.sum() > 1000
    scale = quantized.dequantize().abs() / 6
    assert bool((weight.abs() > 7 * scale)[is_largest].any()) == saturates
