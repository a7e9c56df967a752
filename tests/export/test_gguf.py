"""Exported 4-bit weights are GGUF's, but for the order of their bytes: no cast lies between them.

Of llama.cpp's types MXFP4 has 32 elements in 17 bytes, the E8M0 scale first; NVFP4 has 64 elements
in 36 bytes, first the E4M3 scales of four blocks of 16. In both a byte holds one element of the
first half of a block, in its low bits, and one of the second half. NVFP4's tensor scale is a tensor
beside the blocks.
"""

import pytest
import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes
from zerocast.export import DIALECTS

TYPES = {
    "compressed-tensors/mxfp4": "MXFP4",
    "deepseek/v4-mxfp4": "MXFP4",
    "gpt-oss/mxfp4": "MXFP4",
    "compressed-tensors/nvfp4": "NVFP4",
    "modelopt/nvfp4": "NVFP4",
}
BLOCK = {"MXFP4": 32, "NVFP4": 16}
SCALES = {"MXFP4": 1, "NVFP4": 4}
"""At the beginning of what GGUF stores together."""
MAGNITUDES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def stored(name: str) -> tuple[zerocast.QuantizedTensor, dict[str, torch.Tensor]]:
    """A weight [96, 192] with rows of magnitudes from 1e-6 to 1e3 and of zeros, and what the
    dialect has of it.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(96, 192, generator=generator) * torch.logspace(-6, 3, 96)[:, None]
    values[7], values[8, :100] = 0, 0
    weight = zerocast.quantize(values.bfloat16(), DIALECTS[name].recipe, columnwise=False)
    return weight, DIALECTS[name].encode(weight.quantized_storage)


def repacked(name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bytes [rows, bytes of a row] of GGUF's type: nibbles in another order, scales as they
    are.
    """
    dialect, kind = DIALECTS[name], TYPES[name]
    codes = parts[dialect.codes].view(torch.uint8).flatten(1)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    first, second = nibbles.unflatten(1, (-1, 2, BLOCK[kind] // 2)).unbind(2)
    moved = (first | second << 4).unflatten(1, (-1, SCALES[kind])).flatten(2)
    scales = parts[dialect.scales].view(torch.uint8).unflatten(1, (-1, SCALES[kind]))
    return torch.cat([scales, moved], 2).flatten(1)


def decoded(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """FP32, without the tensor scale."""
    size = BLOCK[kind] // 2
    together = rows.unflatten(1, (-1, SCALES[kind] * (1 + size)))
    scales, moved = together.split([SCALES[kind], SCALES[kind] * size], 2)
    moved = moved.unflatten(2, (SCALES[kind], size))
    nibbles = torch.cat([moved & 15, moved >> 4], -1).long()
    values = MAGNITUDES[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    scale_dtype = torch.float8_e8m0fnu if kind == "MXFP4" else torch.float8_e4m3fn
    return (values * scales.view(scale_dtype).float().unsqueeze(-1)).flatten(1)


def tensor_scale(name: str, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """By which GGUF multiplies; compressed-tensors stores what divides."""
    if "weight_scale_2" in parts:
        return parts["weight_scale_2"]
    return 1 / parts["weight_global_scale"] if "weight_global_scale" in parts else torch.ones(())


@pytest.mark.parametrize("name", TYPES)
def test_exported_bytes_are_those_of_gguf_in_another_order(name):
    """As many bytes, which decode to ``dequantize()``: of MXFP4 bit for bit, of NVFP4 but for the
    last bits of FP32, since GGUF multiplies by the tensor scale last.
    """
    weight, parts = stored(name)
    rows, whole = repacked(name, parts), weight.dequantize(torch.float32)
    assert rows.nbytes == sum(parts[part].nbytes for part in DIALECTS[name].names[:2])
    values = decoded(TYPES[name], rows) * tensor_scale(name, parts)
    if TYPES[name] == "MXFP4":
        assert_same_bytes(values, whole, name)
    torch.testing.assert_close(values, whole, rtol=2**-22, atol=0)


@pytest.mark.integration
@pytest.mark.parametrize("name", TYPES)
def test_gguf_decodes_alike(name):
    """llama.cpp's own package: the values of the decoder above, but for the signs of zeros."""
    gguf = pytest.importorskip("gguf")
    rows = repacked(name, stored(name)[1])
    kind = gguf.GGMLQuantizationType[TYPES[name]]
    theirs = torch.from_numpy(gguf.dequantize(rows.numpy(), kind))
    assert_same_bytes(theirs + 0.0, decoded(TYPES[name], rows) + 0.0, name)
