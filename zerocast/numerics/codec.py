"""Encodes and decodes elements in plain torch: the numerics in their slowest and most obvious form.

These are the rounding rules that the C++ headers restate for speed. They use no float8 cast of any
library: torch's own overflow where ours saturate (E5M2), and the signs of NaN differ between
libraries.

Source of the formats: OCP "Microscaling Formats (MX)" v1.0 for E2M1, E4M3, E5M2 and E8M0;
saturation and NaN as in TransformerEngine 2.20.
"""

import torch

from zerocast.numerics.element import E4M3, ElementFormat


def encode(x: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Round FP32 values to the nearest code of ``fmt``, ties to even, saturating.

    Args:
        x: [...] FP32.

    Returns:
        [...] uint8 codes; the sign of zero is kept, NaN becomes ``fmt.nan_code``.
    """
    # float64 holds x * 2^k exactly, so torch.round (ties to even) is the only rounding here.
    magnitude = x.double().abs().clamp(max=2.0 * fmt.max)
    # Zero and subnormals share the exponent of the smallest normal; frexp gives zero another one.
    exponent = torch.frexp(magnitude.clamp(min=fmt.min_normal)).exponent - 1
    step = torch.ldexp(torch.ones_like(magnitude), exponent - fmt.mantissa_bits)
    rounded = torch.round(torch.nan_to_num(magnitude / step)).to(torch.int64)
    # Codes of magnitudes are consecutive integers, and rounding up past the last mantissa lands on
    # the next exponent.
    code = rounded + ((exponent + fmt.bias - 1) << fmt.mantissa_bits)
    code = code.clamp(max=fmt.max_code) | (torch.signbit(x).to(torch.int64) << (fmt.bits - 1))
    return torch.where(x.isnan(), fmt.nan_code, code).to(torch.uint8)


def decode(code: torch.Tensor, fmt: ElementFormat) -> torch.Tensor:
    """Decode [...] uint8 codes of ``fmt`` to [...] FP32 values (exact, E5M2 infinities too)."""
    code = code.to(torch.int64)
    sign = 1.0 - 2.0 * (code >> (fmt.bits - 1)).double()
    field = (code >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    fraction = (code & (2**fmt.mantissa_bits - 1)).double()
    normal = 2.0**fmt.mantissa_bits + fraction
    significand = torch.where(field == 0, fraction, normal)
    value = sign * torch.ldexp(significand, field.clamp(min=1) - fmt.bias - fmt.mantissa_bits)
    magnitude = code & (2 ** (fmt.bits - 1) - 1)
    if fmt.bits == 8:
        value = torch.where(magnitude > fmt.max_code, torch.nan, value)
        if fmt is not E4M3:  # E5M2 follows IEEE: the code after the largest finite one is infinity
            value = torch.where(magnitude == fmt.max_code + 1, sign * torch.inf, value)
    return value.float()


def encode_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Round non-negative FP32 block scales *up* to a power of two: [...] FP32 -> [...] uint8
    exponents, NaN 0xFF.

    Values of at most 2^-127, the subnormal 0x400000, become code 0; nothing rounds up into the NaN
    code.
    """
    bits = x.view(torch.int32).to(torch.int64)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    round_up = (mantissa != 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return torch.where(x.isnan(), 0xFF, exponent + round_up).to(torch.uint8)


def decode_e8m0(code: torch.Tensor) -> torch.Tensor:
    """Decode [...] uint8 E8M0 codes to [...] FP32 powers of two; code 255 is NaN."""
    return torch.where(code == 0xFF, torch.nan, torch.exp2(code.double() - 127)).float()


def reciprocal_e8m0(code: torch.Tensor) -> torch.Tensor:
    """Return [...] the FP32 multipliers ``1 / decode_e8m0(code)``; 254 gives the subnormal
    2^-127.
    """
    return torch.where(code == 0xFF, torch.nan, torch.exp2(127 - code.double())).float()
