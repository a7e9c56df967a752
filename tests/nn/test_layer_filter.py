"""auto_filter_small_kn leaves out what the published table calls too small."""

import pytest
import torch

from zerocast.nn import convert
from zerocast.nn.layer_filter import AUTO_FILTER, why_small
from zerocast.recipes import Float8CurrentScaling, Float8RowwiseScaling
from zerocast.tensors import QuantizedTensor

CURRENT, ROWWISE = Float8CurrentScaling(), Float8RowwiseScaling()


def linear(k: int, n: int) -> torch.nn.Linear:
    """[N, K], without drawing numbers."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight = torch.nn.Parameter(torch.empty(n, k))
    return layer


@pytest.mark.parametrize(
    ("recipe", "k", "n", "small"),
    [
        (CURRENT, 4096, 1024, True),
        (CURRENT, 4112, 1024, False),
        (CURRENT, 4096, 1040, False),
        (CURRENT, 16, 16, True),
        (ROWWISE, 8192, 2048, True),
        (ROWWISE, 1024, 8192, True),
        (ROWWISE, 2048, 4096, True),
        (ROWWISE, 2064, 4096, False),
        (ROWWISE, 2048, 4112, False),
        (ROWWISE, 1040, 4112, False),
    ],
)
def test_the_published_bounds(recipe, k, n, small):
    """torchao's: tensorwise K <= 4096 and N <= 1024; rowwise N <= 2048, K <= 1024, or K <= 2048 and
    N <= 4096.
    """
    assert (why_small(recipe, (n, k)) is not None) == small


def test_convert_leaves_small_layers():
    """The report says why; other filters work beside it."""
    model = torch.nn.ModuleDict(
        {"small": linear(64, 32), "large": linear(16, 1040), "head": linear(16, 1040)}
    )
    report = convert(model, CURRENT, filter_fqns=["head", AUTO_FILTER])
    assert report.converted == ("large",)
    assert isinstance(model["large"].weight, QuantizedTensor)
    reason = report.left["small"]
    assert reason == (
        "too small to gain by quantized products: K = 64 and N = 32, and the H100 table that "
        "torchao publishes has no gain where K <= 4096 and N <= 1024; without "
        "'auto_filter_small_kn' it is converted"
    )
    assert "head" in report.left
    assert reason in str(report)


def test_a_layer_called_after_the_filter_is_not_left_by_its_name():
    """The word is an instruction and not a part of names."""
    model = torch.nn.ModuleDict({AUTO_FILTER: linear(16, 1040)})
    assert convert(model, CURRENT, filter_fqns=[AUTO_FILTER]).converted == (AUTO_FILTER,)
