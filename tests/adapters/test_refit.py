"""Adapters of refit: what they give where the other project need not be installed.

tests/integration/test_refit_frameworks.py, test_vllm_refit.py and test_vllm.py run them with the
projects themselves.
"""

from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.models import Pair
from tests.support.same_bytes import assert_same_bytes
from zerocast.adapters.refit import slime, verl
from zerocast.export import DIALECTS
from zerocast.refit import Refit

DIALECT = DIALECTS["deepseek/fp8-ue8m0"]


def refit(**options) -> Refit:
    """Of a model of two layers with biases and a norm."""
    torch.manual_seed(0)
    model = Pair(norm=True).bfloat16()
    zerocast.nn.convert(model, zerocast.Float8BlockScaling())
    return Refit(model, DIALECT, bucket_bytes=1, **options)


def assert_same_tensors(found, expected) -> None:
    """In name, order and bytes."""
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, tensor), (_, other) in zip(found, expected, strict=True):
        assert_same_bytes(tensor, other, name)


def test_no_adapter_is_longer_than_40_lines():
    """So that it can be read, and copied, where an interface moves on."""
    folder = Path(zerocast.__file__).parent / "adapters" / "refit"
    lengths = {file.name: len(file.read_text().splitlines()) for file in folder.glob("*.py")}
    assert len(lengths) == 5
    assert max(lengths.values()) <= 40, lengths


def test_verl_sends_whole_tensors():
    """From the generator that an engine returns."""
    found, adapter = refit(), verl.EngineWeights(refit())
    weights, peft_config = adapter.get_per_tensor_param(layered_summon=False)
    assert peft_config is None
    assert_same_tensors(list(weights), list(found.named_tensors()))


@pytest.mark.parametrize("name", ["deepseek/fp8", "modelopt/mxfp8", "modelopt/nvfp4"])
def test_slime_and_miles_get_the_bytes_of_a_dialect(name):
    """What the configuration names stays; gate and up have one tensor scale under NVFP4; all are
    ``quantize`` of the weights, stacked.
    """
    dialect = DIALECTS[name]
    generator = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(128, 96, generator=generator).bfloat16() * k for k in (1, 3))
    params = [
        ("l.gate_proj.weight", gate), ("l.up_proj.weight", up), ("l.up_proj.bias", up[0]),
        ("l.router.weight", gate),
    ]  # fmt: skip
    config = dialect.quantization_config(["l.router"])
    args = (None, "decoder.layers.0.mlp.linear_fc1.weight", params, config)
    found = dict(slime.quantize_params(dialect)(*args))
    whole = zerocast.quantize(torch.cat([gate, up]), dialect.recipe)
    stored = dialect.encode(whole.quantized_storage)
    for part, tensor in stored.items():
        halves = tensor.chunk(2) if tensor.dim() else (tensor, tensor)
        assert_same_bytes(found.pop(f"l.gate_proj.{part}"), halves[0], part)
        assert_same_bytes(found.pop(f"l.up_proj.{part}"), halves[1], part)
    assert_same_bytes(found.pop("l.up_proj.bias"), up[0], "bias")
    assert_same_bytes(found.pop("l.router.weight"), gate, "router")
    assert not found
