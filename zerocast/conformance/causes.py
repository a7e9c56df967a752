"""Causes: why the bytes of a package are others, found by doing as it does.

The formulas of docs/NUMERICS.md are stated once more, in plain torch, with the changes that
implementations make to them. A difference has causes where the formula with some of the changes
gives every byte of the package, in all cases of a pack, and does so with none of them left out.
Otherwise it is unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from zerocast.backends.reference.arithmetic import divide
from zerocast.backends.reference.planes import by_elements
from zerocast.conformance.packs import Pack, blocks_of, differing
from zerocast.export import DIALECTS, TensorScale
from zerocast.formats.codec import encode, encode_e8m0
from zerocast.formats.element import E2M1, E4M3, ELEMENT_FORMATS, FLT_MAX
from zerocast.formats.packing import pack_nibbles
from zerocast.layout import BlockGrid
from zerocast.numerics import Float8Numerics, MXNumerics, NVFP4Numerics

Changes = frozenset[str]
Restated = tuple[torch.Tensor, ...]
NONE: Changes = frozenset()
TINY = 2.0**-126
"""The smallest FP32 value that is not subnormal."""

_ZEROS = {
    "negative zeros": "it writes -0 for 0",
    "positive zeros": "it writes 0 for -0",
    "bits of NaN": "it rounds the bits of a NaN to 4 bits as those of a number",
}
CHANGES: Mapping[type | None, Mapping[str, str]] = {
    None: {
        "no saturation": "beyond its range it has infinity, or NaN where the format has none",
        "signed NaN": "its NaN keeps the sign",
        "quiet NaN": "its NaN is 0x7E",
        "NaN is -0": "its NaN is the zero of the other sign",
        "bits of NaN": _ZEROS["bits of NaN"],
        "nearest power": "its scales are rounded to the nearest power of two, ties up",
        "no zero": "its scale of 0 is NaN",
    },
    Float8Numerics: {
        "divides": "it divides elements by the stored scale",
        "zero scale": "its scale of zeros is 0, and their codes are 0 / 0, NaN",
        "epsilon": "it stores 2^-23 for a scale of 0",
        "inverse": "it stores 1 / (448 / amax)",
        "rounded inverse": "it computes 448 / amax as 448 * (1 / amax)",
        "unbounded": "it lets 448 / amax become infinite",
        "normal scale": "it stores no scale below 2^-126",
    },
    MXNumerics: {
        "even": "it rounds a scale by adding 2^21 to the bits of the amax",
        "overflow": "its scale of an amax that rounds up to 2^128 is infinite, and stored as 1",
        "unscaled": "it does not scale a block whose scale is stored as 0, which is 2^-127",
        "normal scale": "it divides by no scale below 2^-126",
        "ties to zero": "it rounds ties towards zero",
        **_ZEROS,
    },
    NVFP4Numerics: {
        "divides": "it divides elements by block scale * tensor scale",
        "inverse of both": "it multiplies elements by (1 / tensor scale) / block scale",
        "amax / 6 first": "it rounds amax / 6 on the way to a block scale",
        "amax by both": "it divides amax by the rounded 6 * tensor scale",
        "at least 2^-9": "it stores no block scale below 2^-9",
        "at least 2^-6": "it stores no block scale below 2^-6",
        "1/8 for 0": "it stores 1/8 for block scales that round to 0",
        "1 for zeros": "its block scale of zeros is 1",
        "rounded inverse": "it computes 2688 / amax as 2688 * (1 / amax)",
        "1 for infinity": "its tensor scale is 1 where it would be infinite",
        **_ZEROS,
    },
}
"""By the kind of numerics, None of values: changes, and what is said of a package that has them."""


def changes_of(subject: str) -> Mapping[str, str]:
    """Return the changes that are known of the formula of a format or a dialect."""
    return CHANGES[type(DIALECTS[subject].recipe.numerics) if subject in DIALECTS else None]


def causes(pack: Pack, given: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int] | None:
    """Return what explains every byte that a package gave, and of each how many bytes would be
    others without it; None where nothing does.

    Args:
        pack: of values to encode, or of weights.
        given: what the package made of cases, by their names: codes; or the tensors of the dialect,
            in its order.
    """
    known, inputs = changes_of(pack.subject), {c.name: c.input.float() for c in pack.cases}

    def left(changes: Changes) -> int:
        pairs = (zip(given[name], restated(pack.subject, inputs[name], changes), strict=True)
                 for name in given)  # fmt: skip
        return sum(int(differing(*pair).sum()) for case in pairs for pair in case)

    changes, unexplained = NONE, left(NONE)
    while unexplained:  # add what explains most
        tried = [(left(changes | {each}), each) for each in known if each not in changes]
        rest, best = min(tried, default=(unexplained, ""))
        if rest >= unexplained:
            return None
        unexplained, changes = rest, changes | {best}
    for each in known:
        if not left(changes - {each}):
            changes -= {each}
    return {known[each]: left(changes - {each}) for each in known if each in changes}


def restated(subject: str, x: torch.Tensor, changes: Changes = NONE) -> Restated:
    """Return what ``x``, FP32, becomes by the formula of a format or a dialect with ``changes``:
    codes; of a weight [M, K] also scales, and of NVFP4 the tensor scale. The bytes are those that
    are stored; shapes and dtypes may be others.
    """
    if subject not in DIALECTS:
        return (_values(subject, x, changes),)
    dialect, grid = DIALECTS[subject], blocks_of(subject, x.shape)
    numerics, amax = dialect.recipe.numerics, block_amaxes(x, grid)
    if isinstance(numerics, MXNumerics):
        return _mx(x, amax, grid, numerics, changes)
    if isinstance(numerics, Float8Numerics):
        codes, scales = _float8(x, amax, grid, numerics, changes)
        if dialect.scale_dtype == torch.float8_e8m0fnu:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return codes, scales
    assert dialect.tensor_scale is not None
    return _nvfp4(x, amax, grid, dialect.tensor_scale, changes)


def block_amaxes(x: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """Return those of ``x``, [M, K]: [blocks_h, blocks_w]."""
    missing = (0, -grid.cols % grid.block_w, 0, -grid.rows % grid.block_h)
    tiles = torch.nn.functional.pad(x.abs(), missing).unflatten(1, (-1, grid.block_w))
    return tiles.unflatten(0, (-1, grid.block_h)).amax((1, 3))


def _values(name: str, x: torch.Tensor, changes: Changes) -> torch.Tensor:
    """The codes, uint8, of ``x``, FP32, in the format called ``name``."""
    if (fmt := ELEMENT_FORMATS.get(name)) is None:
        codes, bits = encode_e8m0(x).int(), x.view(torch.int32)
        if "nearest power" in changes:  # up from above 2^-127
            nearest = (bits.long() + 2**22 >> 23).clamp(max=255)
            codes = torch.where(bits < 2**23, bits > 2**22, nearest)
        return torch.where(x == 0, 255 if "no zero" in changes else 0, codes).to(torch.uint8)
    codes, sign = encode(x, fmt).int(), x.signbit().int() << fmt.bits - 1
    if "no saturation" in changes:  # from where the code after the largest would be nearer, or even
        end = fmt.max + math.ldexp(0.5, fmt.max_exponent - fmt.mantissa_bits)
        beyond = (x.abs() > end) | ((x.abs() == end) & (fmt.max_code % 2 == 1))
        codes = torch.where(beyond, fmt.max_code + 1 | sign, codes)
    nan = torch.full_like(codes, 0x7E if "quiet NaN" in changes else fmt.nan_code)
    nan = nan | sign if "signed NaN" in changes else nan
    nan = 8 - sign if "NaN is -0" in changes else nan
    nan = _bits_of_nan(x) if "bits of NaN" in changes else nan
    return torch.where(x.isnan(), nan, codes).to(torch.uint8)


def _float8(
    x: torch.Tensor, amax: torch.Tensor, grid: BlockGrid, numerics: Float8Numerics, changes: Changes
) -> Restated:
    amax = amax.clamp(min=numerics.amax_epsilon)
    inverse, is_zero = amax / E4M3.max, amax == 0
    scale = divide(1, inverse) if numerics.formula == "inverse first" else divide(E4M3.max, amax)
    scale = E4M3.max * (1 / amax) if "rounded inverse" in changes else scale
    scale = scale if "unbounded" in changes else scale.clamp(max=FLT_MAX)
    scale = torch.where(is_zero, 1.0, scale)
    if numerics.power_2_scale:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    inverse = 1 / scale if numerics.power_2_scale or "inverse" in changes else inverse
    if "normal scale" in changes:
        inverse = inverse.clamp(min=TINY)
        scale = 1 / inverse
    if "epsilon" in changes:
        inverse = torch.where(inverse == 0, 2.0**-23, inverse)
    elif "zero scale" not in changes:
        inverse = torch.where(is_zero, 1.0, inverse)
    by = by_elements(inverse if "divides" in changes else scale, grid)
    return _float8_codes(x / by if "divides" in changes else x * by), inverse


def _float8_codes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def _mx(
    x: torch.Tensor, amax: torch.Tensor, grid: BlockGrid, numerics: MXNumerics, changes: Changes
) -> Restated:
    fmt, how = numerics.fmt, "even" if "even" in changes else numerics.scale_rounding
    bits = amax.view(torch.int32)
    stored = (bits + 2**21 * (how == "even") >> 23).sub(fmt.max_exponent).clamp(min=0)
    if how == "up":
        stored = encode_e8m0(amax * amax.new_tensor(1 / fmt.max)).int()
    multiplier = torch.exp2(127.0 - stored.double()).float()
    if "unscaled" in changes:
        multiplier = torch.where(stored == 0, 1.0, multiplier)
    multiplier = multiplier.clamp(max=1 / TINY) if "normal scale" in changes else multiplier
    if "overflow" in changes:
        over = bits + 2**21 >> 23 == 255
        stored, multiplier = torch.where(over, 127, stored), torch.where(over, 0.0, multiplier)
    scaled = x * by_elements(multiplier, grid)
    codes = _float8_codes(scaled) if fmt is E4M3 else _float4_codes(scaled, changes)
    return codes, stored.to(torch.uint8)


def _nvfp4(
    x: torch.Tensor, amax: torch.Tensor, grid: BlockGrid, kind: TensorScale, changes: Changes
) -> Restated:
    whole, by_1 = amax.max(), "1 for infinity" in changes
    least = whole.clamp(min=TINY) if by_1 else whole
    by = 2688 * (1 / least) if "rounded inverse" in changes else divide(2688, least)
    by = torch.where(by > FLT_MAX, 1.0 if by_1 or whole == 0 else FLT_MAX, by)
    tensor_scale, scale = whole / 2688, amax * (by * amax.new_tensor(1 / 6))
    if "amax / 6 first" in changes:
        scale = (amax / 6) * by if kind.inverted else (amax / 6) / tensor_scale
    scale = amax / (6 * tensor_scale) if "amax by both" in changes else scale
    scale = torch.where(scale == 0, 1.0, scale) if "1 for zeros" in changes else scale
    floor = 2.0**-9 if "at least 2^-9" in changes else 0.0
    floor = 2.0**-6 if "at least 2^-6" in changes else floor
    stored = scale.clamp(floor, E4M3.max).to(torch.float8_e4m3fn).float()
    stored = torch.where(stored == 0, 0.125, stored) if "1/8 for 0" in changes else stored
    scaled = x * by_elements(divide(1, stored * (1 / by)).clamp(max=FLT_MAX), grid)
    if "divides" in changes:
        scaled = x / by_elements(stored / by if kind.inverted else stored * tensor_scale, grid)
    if "inverse of both" in changes:
        scaled = x * by_elements((1 / tensor_scale) / stored, grid)
    scales = stored.to(torch.float8_e4m3fn)
    return _float4_codes(scaled, changes), scales, by if kind.inverted else tensor_scale


def _float4_codes(scaled: torch.Tensor, changes: Changes) -> torch.Tensor:
    # The float next to a tie, towards zero, has the lower of its codes.
    below = torch.nextafter(scaled, torch.zeros_like(scaled))
    codes = encode(below if "ties to zero" in changes else scaled, E2M1)
    for zero in ("negative zeros", 8), ("positive zeros", 0):
        codes = torch.where(scaled == 0, zero[1], codes) if zero[0] in changes else codes
    if "bits of NaN" in changes:
        codes = torch.where(scaled.isnan(), _bits_of_nan(scaled), codes)
    return pack_nibbles(codes.to(torch.uint8))


def _bits_of_nan(x: torch.Tensor) -> torch.Tensor:
    """The codes of E2M1 that the bits of a NaN become, rounded as if it were a number."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    rounded = bits - (126 << 23) + 0x1FFFFF + (bits >> 22 & 1)
    return (rounded >> 22 & 7) | x.signbit().int() << 3
