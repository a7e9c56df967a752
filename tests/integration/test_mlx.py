"""MLX, as it is, on a CPU, beside the dialect that is named after it."""

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS

pytestmark = pytest.mark.integration

MLX = DIALECTS["mlx/nvfp4"]
TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Halfway between the values of two codes."""


def codes_of(words: torch.Tensor) -> torch.Tensor:
    """int64 [M, K], of words [M, K / 8]."""
    return torch.stack([words.long() >> 4 * i & 15 for i in range(8)], -1).flatten(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mlx_quantizes_alike_and_decodes_what_is_stored(dtype):
    """Equal scales, and codes but at ties, of which it takes the smaller, for zeros, whose sign it
    drops, and in blocks whose scale is 0; and of ours it makes exactly ``dequantize()``.
    """
    mx = pytest.importorskip("mlx.core")
    mx.set_default_device(mx.cpu)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, 256, generator=generator) * torch.logspace(-4, 3.5, 128)[:, None]
    x = x.to(dtype)
    whole = zerocast.quantize(x, MLX.recipe, dtype=dtype, columnwise=False)
    stored = MLX.encode(whole.quantized_storage)
    given = mx.array(x.float().tolist())
    given = given.astype(mx.bfloat16) if dtype == torch.bfloat16 else given
    words, scales = mx.quantize(given, mode="nvfp4")
    assert_same_bytes(torch.tensor(scales.tolist(), dtype=torch.uint8), stored["scales"], "scales")

    theirs = codes_of(torch.tensor(words.tolist()))
    ours = codes_of(stored["weight"].view(torch.int32))
    scale = stored["scales"].view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    is_tie = ((x.float() / scale).abs()[..., None] == TIES).any(-1)
    is_zero = (ours % 8 == 0) & (theirs % 8 == 0)
    differ = (ours != theirs) & (scale > 0) & ~is_zero
    assert not (differ & ~is_tie).any()
    assert (theirs[differ] == ours[differ] - 1).all()

    decoded = mx.dequantize(
        mx.array(stored["weight"].tolist(), dtype=mx.uint32),
        mx.array(stored["scales"].tolist(), dtype=mx.uint8),
        mode="nvfp4",
        dtype=mx.float32,
    )
    expected = whole.dequantize(torch.float32)
    assert_same_bytes(torch.tensor(decoded.tolist()) + 0.0, expected + 0.0, "values")
