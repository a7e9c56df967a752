"""NVIDIA's ModelOpt, as it is, beside the dialects that are named after it."""

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

SHAPE = (130, 256)


def weight() -> torch.Tensor:
    """BF16, rows of magnitudes from 1e-3 to 10, one of them and parts of another 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator) * torch.logspace(-3, 1, SHAPE[0])[:, None]
    x[3, :40:2], x[5] = 0.0, 0.0
    return x.bfloat16()


def stored(name: str) -> tuple[dict[str, torch.Tensor], zerocast.QuantizedTensor]:
    """What the dialect has of the weight, and the weight in codes."""
    whole = zerocast.quantize(weight(), DIALECTS[name].recipe, columnwise=False)
    return DIALECTS[name].encode(whole.quantized_storage), whole


@pytest.mark.parametrize(
    ("dialect", "reader"), [("modelopt/fp8", "FP8QTensor"), ("modelopt/mxfp8", "MXFP8QTensor")]
)
def test_modelopt_decodes_what_is_stored(dialect, reader):
    """To exactly ``dequantize()``."""
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    parts, whole = stored(dialect)
    read = getattr(qtensor, reader)(torch.Size(SHAPE), torch.float32, parts["weight"])
    decoded = read.dequantize(dtype=torch.float32, scale=parts["weight_scale"])
    assert_same_bytes(decoded, whole.dequantize(torch.float32), dialect)


def test_modelopt_quantizes_alike():
    """Its own cast to NVFP4 has the same scale of the tensor, and scales of blocks that are not 0.
    It divides by them where ours multiplies, so codes of values beside a tie may differ by one; and
    it decodes by products in another order, which is the last bit of FP32.
    """
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    parts, whole = stored("modelopt/nvfp4")
    made, scales, tensor_scale = qtensor.NVFP4QTensor.quantize(weight(), 16, try_tensorrt=False)
    assert_same_bytes(tensor_scale, parts["weight_scale_2"], "scale of the tensor")
    is_zero = weight().view(SHAPE[0], -1, 16).eq(0).all(-1)
    assert is_zero.sum() >= 16
    own_scales, their_scales = (each.view(torch.uint8) for each in (parts["weight_scale"], scales))
    assert_same_bytes(their_scales[~is_zero], own_scales[~is_zero], "scales")
    difference = (made._quantized_data != parts["weight"]).float().mean()
    assert difference < 1e-3, f"{difference:.1e} of the bytes of codes differ"

    ours = qtensor.NVFP4QTensor(torch.Size(SHAPE), torch.float32, parts["weight"])
    decoded = ours.dequantize(
        dtype=torch.float32,
        scale=parts["weight_scale"],
        double_scale=parts["weight_scale_2"],
        block_sizes={-1: 16},
    )
    torch.testing.assert_close(decoded, whole.dequantize(torch.float32), rtol=2**-22, atol=0)
