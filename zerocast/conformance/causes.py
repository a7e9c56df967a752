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

from zerocast.conformance.packs import Pack, differing
from zerocast.export import DIALECTS, Dialect
from zerocast.formats import (
    E2M1,
    E4M3,
    ELEMENT_FORMATS,
    FLT_MAX,
    encode,
    encode_e8m0,
    pack_nibbles,
)
from zerocast.layout import BlockGrid
from zerocast.numerics import Float8Numerics, MXNumerics, NVFP4Numerics

Changes = frozenset[str]
Restated = tuple[torch.Tensor, ...]
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


def causes(pack: Pack, given: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int] | None:
    """Return what explains every byte that a package gave, and of each how many bytes would be
    others without it; None where nothing does.

    Args:
        pack: of values to encode, or of weights.
        given: what the package made of cases, by their names: codes; or the tensors of the dialect,
            in its order.
    """
    dialect = DIALECTS.get(pack.subject)
    known = CHANGES[type(dialect.recipe.numerics) if dialect else None]

    def left(changes: Changes) -> int:
        count = 0
        for case in (each for each in pack.cases if each.name in given):
            x = case.input.float()
            made = restated(dialect, x, changes) if dialect else (values(pack.subject, x, changes),)
            pairs = zip(given[case.name], made, strict=True)
            count += sum(int(differing(theirs, ours).sum()) for theirs, ours in pairs)
        return count

    changes: Changes = frozenset()
    unexplained = left(changes)
    while unexplained:  # add what explains most
        others = [each for each in known if each not in changes]
        rest, best = min(
            ((left(changes | {each}), each) for each in others), default=(unexplained, "")
        )
        if rest >= unexplained:
            return None
        unexplained, changes = rest, changes | {best}
    for each in known:
        if each in changes and not left(changes - {each}):
            changes -= {each}
    return {known[each]: left(changes - {each}) for each in known if each in changes}


def values(name: str, x: torch.Tensor, changes: Changes = frozenset()) -> torch.Tensor:
    """Return the codes, uint8, of ``x``, FP32, in the format called ``name``."""
    fmt, bits = ELEMENT_FORMATS.get(name), x.view(torch.int32)
    if fmt is None:
        codes = encode_e8m0(x).int()
        if "nearest power" in changes:
            nearest = (bits.long() + 2**22 >> 23).clamp(max=255)
            codes = torch.where(bits < 2**23, bits > 2**22, nearest)  # up from above 2^-127
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


def restated(dialect: Dialect, x: torch.Tensor, changes: Changes = frozenset()) -> Restated:
    """Return codes and scales, and of NVFP4 the tensor scale, of ``x``, FP32 [M, K]: the bytes that
    ``dialect`` stores, with ``changes`` to its formula. Shapes and dtypes may be others.
    """
    numerics = dialect.recipe.numerics
    blocks = Blocks(x, dialect.recipe.planes(x.shape, columnwise=False)[0].grid)
    if isinstance(numerics, Float8Numerics):
        codes, scales = _float8(blocks, numerics, changes)
        if dialect.scale_dtype == torch.float8_e8m0fnu:
            scales = (scales.view(torch.int32) >> 23).to(torch.uint8)
        return codes, scales
    if isinstance(numerics, MXNumerics):
        return _mx(blocks, numerics, changes)
    assert dialect.tensor_scale is not None
    return _nvfp4(blocks, dialect.tensor_scale.inverted, changes)


class Blocks:
    """``x``, FP32 [M, K], and the amaxes of its blocks, [blocks_h, blocks_w]."""

    def __init__(self, x: torch.Tensor, grid: BlockGrid) -> None:
        self.x, self._grid = x, grid
        missing = (0, -grid.cols % grid.block_w, 0, -grid.rows % grid.block_h)
        tiles = torch.nn.functional.pad(x.abs(), missing).unflatten(1, (-1, grid.block_w))
        self.amax = tiles.unflatten(0, (-1, grid.block_h)).amax((1, 3))

    def spread(self, of_blocks: torch.Tensor) -> torch.Tensor:
        """[M, K]: for each element the value of its block."""
        rows = of_blocks.repeat_interleave(self._grid.block_h, 0)[: self._grid.rows]
        return rows.repeat_interleave(self._grid.block_w, 1)[:, : self._grid.cols]


def _over(number: float, by: torch.Tensor) -> torch.Tensor:
    """``number / by``, rounded once; torch's operator multiplies by a rounded inverse."""
    return torch.full_like(by, number) / by


def _float8(blocks: Blocks, numerics: Float8Numerics, changes: Changes) -> Restated:
    amax = blocks.amax.clamp(min=numerics.amax_epsilon)
    inverse, is_zero = amax / E4M3.max, amax == 0
    scale = _over(1, inverse) if numerics.formula == "inverse first" else _over(E4M3.max, amax)
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
    divides = "divides" in changes
    scaled = blocks.x / blocks.spread(inverse) if divides else blocks.x * blocks.spread(scale)
    return _float8_codes(scaled), inverse


def _float8_codes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def _mx(blocks: Blocks, numerics: MXNumerics, changes: Changes) -> Restated:
    fmt, how = numerics.fmt, "even" if "even" in changes else numerics.scale_rounding
    bits = blocks.amax.view(torch.int32)
    stored = (bits + 2**21 * (how == "even") >> 23).sub(fmt.max_exponent).clamp(min=0)
    if how == "up":
        stored = encode_e8m0(blocks.amax * blocks.amax.new_tensor(1 / fmt.max)).int()
    multiplier = torch.exp2(127.0 - stored.double()).float()
    if "unscaled" in changes:
        multiplier = torch.where(stored == 0, 1.0, multiplier)
    multiplier = multiplier.clamp(max=1 / TINY) if "normal scale" in changes else multiplier
    if "overflow" in changes:
        over = bits + 2**21 >> 23 == 255
        stored, multiplier = torch.where(over, 127, stored), torch.where(over, 0.0, multiplier)
    scaled = blocks.x * blocks.spread(multiplier)
    codes = _float8_codes(scaled) if fmt is E4M3 else _float4_codes(scaled, changes)
    return codes, stored.to(torch.uint8)


def _nvfp4(blocks: Blocks, inverted: bool, changes: Changes) -> Restated:
    x, amax, whole = blocks.x, blocks.amax, blocks.amax.max()
    by_1 = "1 for infinity" in changes
    least = whole.clamp(min=TINY) if by_1 else whole
    by = 2688 * (1 / least) if "rounded inverse" in changes else _over(2688, least)
    by = torch.where(by > FLT_MAX, 1.0 if by_1 or whole == 0 else FLT_MAX, by)
    tensor_scale = whole / 2688
    scale = amax * (by * amax.new_tensor(1 / 6))
    if "amax / 6 first" in changes:
        scale = (amax / 6) * by if inverted else (amax / 6) / tensor_scale
    scale = amax / (6 * tensor_scale) if "amax by both" in changes else scale
    scale = torch.where(scale == 0, 1.0, scale) if "1 for zeros" in changes else scale
    floor = 2.0**-9 if "at least 2^-9" in changes else 0.0
    floor = 2.0**-6 if "at least 2^-6" in changes else floor
    stored = scale.clamp(floor, E4M3.max).to(torch.float8_e4m3fn).float()
    stored = torch.where(stored == 0, 0.125, stored) if "1/8 for 0" in changes else stored
    scaled = x * blocks.spread(_over(1, stored * (1 / by)).clamp(max=FLT_MAX))
    if "divides" in changes:
        scaled = x / blocks.spread(stored / by if inverted else stored * tensor_scale)
    if "inverse of both" in changes:
        scaled = x * blocks.spread((1 / tensor_scale) / stored)
    scales = stored.to(torch.float8_e4m3fn)
    return _float4_codes(scaled, changes), scales, by if inverted else tensor_scale


def _float4_codes(scaled: torch.Tensor, changes: Changes) -> torch.Tensor:
    # The float next to a tie, towards zero, has the lower of its codes.
    below = torch.nextafter(scaled, torch.zeros_like(scaled))
    codes = encode(below if "ties to zero" in changes else scaled, E2M1)
    codes = torch.where(scaled == 0, 8, codes) if "negative zeros" in changes else codes
    codes = torch.where(scaled == 0, 0, codes) if "positive zeros" in changes else codes
    if "bits of NaN" in changes:
        codes = torch.where(scaled.isnan(), _bits_of_nan(scaled), codes)
    return pack_nibbles(codes.to(torch.uint8))


def _bits_of_nan(x: torch.Tensor) -> torch.Tensor:
    """The codes of E2M1 that the bits of a NaN become, rounded as if it were a number."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    rounded = bits - (126 << 23) + 0x1FFFFF + (bits >> 22 & 1)
    return (rounded >> 22 & 7) | x.signbit().int() << 3
