"""Writes ``other_projects.json``: weights quantized by torchao and compressed-tensors.

Run as ``python -m tests.oracles.make_other_projects`` where torchao 0.18.0 and compressed-tensors
0.20.0 are installed; tests read the file and need neither. No code of zerocast runs here.

Both projects scale NVFP4 in blocks of 1x16 where a weight of ours has 16x16, so each row of every
16x16 block is given the same amax, and one scale is right for both.
"""

import json
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

Quantize = Callable[[torch.Tensor], dict[str, str]]

FILE = Path(__file__).with_name("other_projects.json")

SHAPES = {"two blocks": (32, 16), "one row more than a block, K = 80": (17, 80)}


def weight(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """[M, K] BF16 of normal data in which the rows of a 16x16 block share their amax."""
    generator = torch.Generator().manual_seed(seed)
    rows, cols = shape
    blocks = torch.rand(-(-rows // 16), cols // 16, generator=generator) * 0.1 + 0.01
    amax = blocks.bfloat16().float().repeat_interleave(16, dim=0)[:rows, :, None]
    x = torch.randn(rows, cols // 16, 16, generator=generator) * amax / 3
    x = x.clamp(-0.98 * amax, 0.98 * amax)
    place = torch.randint(0, 16, (rows, cols // 16, 1), generator=generator)
    sign = torch.randint(0, 2, (rows, cols // 16, 1), generator=generator) * 2.0 - 1
    return x.scatter(2, place, amax * sign).view(shape).bfloat16()


def torchao_nvfp4(x: torch.Tensor) -> dict[str, str]:
    """Two-level scaling with the scale of the tensor's own amax."""
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    tensor_scale = per_tensor_amax_to_scale(x.abs().max())
    quantized = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor_scale)
    return {"codes": hexadecimal(quantized.qdata), "scales": hexadecimal(quantized.scale)}


def compressed_tensors_nvfp4(x: torch.Tensor) -> dict[str, str]:
    """The preset scheme "NVFP4", its scales from the minima and maxima of groups of 16."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4", targets=["Linear"])
    groups = x.float().view(x.shape[0], -1, 16)
    tensor_scale = generate_gparam(groups.amin(), groups.amax())
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    scale, _ = calculate_qparams(low, high, scheme.weights, global_scale=tensor_scale)
    state = {"weight": x.float(), "weight_scale": scale, "weight_global_scale": tensor_scale}
    compressed = NVFP4PackedCompressor.compress(state, scheme)
    return {
        "codes": hexadecimal(compressed["weight_packed"]),
        "scales": hexadecimal(compressed["weight_scale"]),
    }


def torchao_float8(x: torch.Tensor, dtype: torch.dtype, power_2: bool) -> dict[str, str]:
    """The tensorwise cast of torchao's float8 training; ``scale`` is what it multiplies by."""
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    scale = tensor_to_scale(x, dtype, round_scales_to_power_of_2=power_2)
    codes = to_fp8_saturated(x.float() * scale, dtype)
    return {"codes": hexadecimal(codes), "scale": hexadecimal(scale.reshape(1))}


def torchao_rowwise(x: torch.Tensor, power_2: bool) -> dict[str, str]:
    """The axiswise casts of torchao's float8 training, with a scale a row, and one a column."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    recorded = {}
    for plane, dim in (("rowwise", -1), ("columnwise", 0)):
        scale = tensor_to_scale(
            x,
            torch.float8_e4m3fn,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=dim,
            round_scales_to_power_of_2=power_2,
        )
        codes = to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
        recorded[f"{plane} codes"] = hexadecimal(codes)
        recorded[f"{plane} scales"] = hexadecimal(scale.flatten())
    return recorded


def torchao_mxfp8(x: torch.Tensor, dtype: torch.dtype) -> dict[str, str]:
    """MX blocks of 32 along the rows, and along the columns; scales rounded up ("RCEIL")."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    recorded = {}
    for plane, data in (("rowwise", x), ("columnwise", x.t().contiguous())):
        scales, codes = to_mx(data, dtype, 32, ScaleCalculationMode.RCEIL)
        if plane == "columnwise":
            scales, codes = scales.t(), codes.t()
        recorded[f"{plane} codes"] = hexadecimal(codes)
        recorded[f"{plane} scales"] = hexadecimal(scales)
    return recorded


def torchao_mxfp4(x: torch.Tensor, mode: str) -> dict[str, str]:
    """MX blocks of 32 along the rows, and along the columns, whose codes are a byte each here."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.kernels import unpack_uint4
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    how = ScaleCalculationMode(mode)
    scales, codes = to_mx(x, torch.float4_e2m1fn_x2, 32, how)
    recorded = {"rowwise codes": hexadecimal(codes), "rowwise scales": hexadecimal(scales)}
    if x.shape[0] % 32 == 0:
        scales, codes = to_mx(x.t().contiguous(), torch.float4_e2m1fn_x2, 32, how)
        recorded["columnwise codes"] = hexadecimal(unpack_uint4(codes.view(torch.uint8)).t())
        recorded["columnwise scales"] = hexadecimal(scales.t())
    return recorded


def compressed_tensors_mxfp4(x: torch.Tensor) -> dict[str, str]:
    """The preset scheme "MXFP4A16", its scales from the minima and maxima of groups of 32."""
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme("MXFP4A16", targets=["Linear"])
    groups = x.float().view(x.shape[0], -1, 32)
    scale, _ = calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), scheme.weights)
    state = {"weight": x.float(), "weight_scale": scale.float()}
    compressed = MXFP4PackedCompressor.compress(state, scheme)
    return {
        "rowwise codes": hexadecimal(compressed["weight_packed"]),
        "rowwise scales": hexadecimal(compressed["weight_scale"]),
    }


def mxfp4(x: torch.Tensor) -> dict[str, dict[str, str]]:
    """By each rounding of scales that torchao has and we have, and by compressed-tensors."""
    modes = {"up": "rceil", "floor": "floor", "even": "even"}
    recorded = {name: torchao_mxfp4(x, mode) for name, mode in modes.items()}
    return recorded | {"even, compressed-tensors": compressed_tensors_mxfp4(x)}


def blocks_of_every_mantissa() -> torch.Tensor:
    """[128, 32] BF16, whose rows have amaxes of all mantissas, and many elements on ties."""
    generator = torch.Generator().manual_seed(11)
    amax = torch.ldexp(
        1 + torch.arange(128) / 128, torch.randint(-40, 40, (128,), generator=generator)
    )[:, None]
    x = torch.randint(-16, 17, (128, 32), generator=generator) / 16 * amax
    x[:, 7] = amax[:, 0]
    return x.bfloat16()


def weight_of_many_magnitudes() -> torch.Tensor:
    """[32, 64] BF16, rows and columns of which are scaled by up to 2^6 each way."""
    generator = torch.Generator().manual_seed(9)
    rows, cols = torch.randint(-6, 7, (32, 1), generator=generator), torch.arange(64) % 7 - 3
    return torch.ldexp(torch.randn(32, 64, generator=generator), rows + cols).bfloat16()


def hexadecimal(x: torch.Tensor) -> str:
    """The bytes of ``x``, row-major and little-endian."""
    return x.detach().contiguous().view(torch.uint8).numpy().tobytes().hex()


def main() -> None:
    """Quantize every weight by every function and write the file."""
    float8: dict[str, Quantize] = {
        "e4m3": lambda x: torchao_float8(x, torch.float8_e4m3fn, power_2=False),
        "e5m2": lambda x: torchao_float8(x, torch.float8_e5m2, power_2=False),
        "e4m3, power of two": lambda x: torchao_float8(x, torch.float8_e4m3fn, power_2=True),
    }
    nvfp4 = {"torchao": torchao_nvfp4, "compressed-tensors": compressed_tensors_nvfp4}
    weights = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        x = weight(shape, seed)
        weights[name] = {
            "shape": shape,
            "bf16": hexadecimal(x),
            "nvfp4": {project: quantize(x) for project, quantize in nvfp4.items()},
            "float8": {kind: quantize(x) for kind, quantize in float8.items()},
        }
    x = weight_of_many_magnitudes()
    blocks = {
        "shape": x.shape,
        "bf16": hexadecimal(x),
        "rowwise": torchao_rowwise(x, power_2=False),
        "rowwise, power of two": torchao_rowwise(x, power_2=True),
        "mxfp8": torchao_mxfp8(x, torch.float8_e4m3fn),
        "mxfp8, e5m2": torchao_mxfp8(x, torch.float8_e5m2),
    }
    y = blocks_of_every_mantissa()
    mx = {
        name: {"shape": each.shape, "bf16": hexadecimal(each), "mxfp4": mxfp4(each)}
        for name, each in (("many magnitudes", x), ("every mantissa", y))
    }
    made_with = {name: version(name) for name in ("torch", "torchao", "compressed-tensors")}
    record = {"made with": made_with, "weights": weights, "blocks": blocks, "mx": mx}
    FILE.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
