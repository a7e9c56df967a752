"""Causes: why the bytes of a package differ, found by reproducing them.

The formulas of docs/numerics.md are implemented again in plain torch, with changes that other
implementations make to them. A set of changes explains a difference if the changed formula gives
every byte of the package in all cases of a pack. Each change in the set must be necessary for that.
If there is no such set, the difference is unexplained.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch

from zerocast.backends.reference.arithmetic import divide
from zerocast.backends.reference.planes import by_elements
from zerocast.export import DIALECTS, Dialect
from zerocast.lab.conformance.case_packs import Pack, blocks_of, differing
from zerocast.layout import BlockGrid
from zerocast.numerics import (
    E2M1,
    E4M3,
    ELEMENT_FORMATS,
    FLT_MAX,
    Float8Numerics,
    MXNumerics,
    NVFP4Numerics,
    encode,
    encode_e8m0,
    pack_nibbles,
)

Restated = tuple[torch.Tensor, ...]
TINY = 2.0**-126
"""The smallest FP32 value that is not subnormal."""


class FormulaChanges:
    """The changes that are made to a formula, in words.

    A formula calls this with each change that it knows, which records the change.

    Attributes:
        made: the changes that are made.
        known: those, and the changes that the formula has asked for, in order.
        tensor_amax: the FP32 amax for scales of the whole tensor; None for that of the input.
    """

    def __init__(self, *made: str, tensor_amax: torch.Tensor | None = None) -> None:
        self.made, self.known, self.tensor_amax = made, dict.fromkeys(made), tensor_amax

    def __call__(self, change: str) -> bool:
        """Return whether ``change`` is made, and record that the formula knows it."""
        self.known[change] = None
        return change in self.made


def changes_of(subject: str) -> list[str]:
    """Return the known changes to the formula of a format or a dialect."""
    changes = FormulaChanges()
    values = torch.zeros(1, 32, dtype=torch.float32, device="cpu")
    restated(subject, values, changes)
    return list(changes.known)


def causes(pack: Pack, given: Mapping[str, Sequence[torch.Tensor]]) -> dict[str, int] | None:
    """Return the changes that explain every byte of a package, with the number of bytes that would
    differ without each; None if no changes do.

    Args:
        pack: a pack of values to encode, or of weights.
        given: by the name of each case, the package's results: codes, or the tensors of the dialect
            in its order.
    """
    pairs = [(case.input.float(), given[case.name]) for case in pack.cases if case.name in given]
    return changes_giving(pack.subject, pairs)


def changes_giving(
    subject: str,
    pairs: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
    tensor_amax: torch.Tensor | None = None,
) -> dict[str, int] | None:
    """Return the changes to the formula of a format or a dialect that give every byte, as
    :func:`causes` does.

    Args:
        subject: the name of the format or dialect.
        pairs: inputs, FP32, and what they have become: codes, or the tensors of the dialect in its
            order.
        tensor_amax: the FP32 amax of the whole weight, if the input is a part of it; or of a group
            of weights.
    """

    def left(made: set[str]) -> int:
        changes = FormulaChanges(*made, tensor_amax=tensor_amax)
        both = (zip(given, restated(subject, x, changes), strict=True) for x, given in pairs)
        return sum(int(differing(*pair).sum()) for case in both for pair in case)

    known = changes_of(subject)
    for number in (1, 2):  # two changes may explain what neither does
        made = set[str]()
        while unexplained := left(made):  # add what explains most
            rest, best = min((left(made.union(each)), each) for each in combinations(known, number))
            if rest >= unexplained:
                break
            made.update(best)
        if not unexplained:
            break
    else:
        return None
    for each in known:
        if not left(made - {each}):
            made.discard(each)
    return {each: left(made - {each}) for each in known if each in made}


def restated(subject: str, x: torch.Tensor, does: FormulaChanges) -> Restated:
    """Return the result of the changed formula of a format or a dialect for ``x``, FP32.

    It consists of codes, for a weight [M, K] also scales, and for NVFP4 the tensor scale. The bytes
    are those that are stored; shapes and dtypes may differ.
    """
    if subject not in DIALECTS:
        return (_values(subject, x, does),)
    dialect, grid = DIALECTS[subject], blocks_of(subject, x.shape)
    formulas = {Float8Numerics: _float8, MXNumerics: _mx, NVFP4Numerics: _nvfp4}
    return formulas[type(dialect.recipe.numerics)](x, grid, dialect, does)


def block_amaxes(x: torch.Tensor, grid: BlockGrid) -> torch.Tensor:
    """Return the block amaxes of ``x``, [M, K], as [blocks_h, blocks_w]."""
    blocks = grid.block_h, grid.block_w
    return torch.nn.functional.max_pool2d(x.abs()[None], blocks, ceil_mode=True)[0]


def _values(name: str, x: torch.Tensor, does: FormulaChanges) -> torch.Tensor:
    """Return the uint8 codes of ``x``, FP32, in the format ``name``."""
    if (fmt := ELEMENT_FORMATS.get(name)) is None:
        codes, bits = encode_e8m0(x).int(), x.view(torch.int32)
        if does("its scales are rounded to the nearest power of two, ties up"):
            nearest = (bits.long() + 2**22 >> 23).clamp(max=255)  # subnormal: 1 above 2^-127
            codes = torch.where(bits < 2**23, bits > 2**22, nearest)
        return torch.where(x == 0, 255 * does("its scale of 0 is NaN"), codes).to(torch.uint8)
    codes, sign = encode(x, fmt).int(), x.signbit().int() << fmt.bits - 1
    if does("beyond its range it has infinity, or NaN where the format has none"):
        # Where the code after the largest would be nearer, or as near and even.
        end = fmt.max + math.ldexp(0.5, fmt.max_exponent - fmt.mantissa_bits)
        beyond = (x.abs() > end) | ((x.abs() == end) & (fmt.max_code % 2 == 1))
        codes = torch.where(beyond, fmt.max_code + 1 | sign, codes)
    keeps_sign = does("its NaN keeps the sign")
    nan = (0x7E if does("its NaN is 0x7E") else fmt.nan_code) | sign * keeps_sign
    nan = 8 - sign if does("its NaN is the zero of the other sign") else nan
    return torch.where(x.isnan(), _bits_of_nan(x) if does(BITS_OF_NAN) else nan, codes).to(
        torch.uint8
    )


def _float8(x: torch.Tensor, grid: BlockGrid, dialect: Dialect, does: FormulaChanges) -> Restated:
    numerics: Any = dialect.recipe.numerics
    divides = does("it divides elements by the stored scale")
    zero_scale = does("its scale of zeros is 0, and their codes are 0 / 0, NaN")
    epsilon = 2.0**-23 * does("it stores 2^-23 for a scale of 0")
    epsilon = 2.0**-7 if does("it stores 2^-7 for a scale of 0") else epsilon
    divided = does("it stores 1 / (448 / amax)")
    amax = block_amaxes(x, grid)
    if does.tensor_amax is not None and dialect.recipe.has_one_block:
        amax = does.tensor_amax.reshape(1, 1)
    amax = amax.clamp(min=numerics.amax_epsilon)
    inverse, is_zero = amax / E4M3.max, amax == 0
    inverse = _bf16(inverse) if does("it rounds amax / 448 to BF16") else inverse
    in_bf16 = does("it rounds what is cast to codes to BF16")
    scale = divide(1, inverse) if numerics.formula == "inverse first" else divide(E4M3.max, amax)
    scale = E4M3.max * (1 / amax) if does("it computes 448 / amax as 448 * (1 / amax)") else scale
    scale = scale if does("it lets 448 / amax become infinite") else scale.clamp(max=FLT_MAX)
    scale = torch.where(is_zero, math.inf if zero_scale else 1.0, scale)
    if numerics.power_2_scale:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    inverse = 1 / scale if numerics.power_2_scale or divided else inverse
    if does("it stores no scale below 2^-126"):
        inverse = inverse.clamp(min=TINY)
        scale = 1 / inverse
    if epsilon:
        inverse = torch.where(inverse == 0, epsilon, inverse)
    elif not zero_scale:
        inverse = torch.where(is_zero, 1.0, inverse)
    scaled = x / by_elements(inverse, grid) if divides else x * by_elements(scale, grid)
    scaled = _bf16(scaled) if in_bf16 else scaled
    if dialect.scale_dtype == torch.float8_e8m0fnu:
        inverse = (inverse.view(torch.int32) >> 23).to(torch.uint8)
    return _float8_codes(scaled), inverse


def _float8_codes(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn)


def _mx(x: torch.Tensor, grid: BlockGrid, dialect: Dialect, does: FormulaChanges) -> Restated:
    numerics: Any = dialect.recipe.numerics
    fmt, amax = numerics.fmt, block_amaxes(x, grid)
    bits = amax.view(torch.int32)
    even = does("it rounds a scale by adding 2^21 to the bits of the amax")
    even = even or numerics.scale_rounding == "even"
    down = does("it rounds scales down to a power of two")
    even &= not down
    stored = (bits + 2**21 * even >> 23).sub(fmt.max_exponent).clamp(min=0)
    if numerics.scale_rounding == "up" and not (even or down):
        stored = encode_e8m0(amax * amax.new_tensor(1 / fmt.max)).int()
    if does("its scales below 2^-127 wrap around to those near 2^128"):
        exponents = torch.frexp(amax)[1] - 1 + 127 - fmt.max_exponent
        stored = torch.where(amax > 0, exponents % 256, stored)
    if does("its scale of amaxes below 6 * 2^-126 is 2^-126"):
        stored = torch.where(amax > 0, stored.clamp(min=1), stored)
    if does("its scale of zeros is that of an amax of 2"):
        stored = torch.where(amax == 0, 128 - fmt.max_exponent, stored)
    infinite = does("its scale of an amax that rounds up to 2^128 is infinite, and stored as 1")
    over = (bits + 2**21 >> 23 == 255) & infinite
    multiplier = torch.exp2(127.0 - stored.double()).float()
    if does("it does not scale a block whose scale is stored as 0, which is 2^-127"):
        multiplier = torch.where(stored == 0, 1.0, multiplier)
    if does("it divides by no scale below 2^-126"):
        multiplier = multiplier.clamp(max=1 / TINY)
    scaled = x * by_elements(torch.where(over, 0.0, multiplier), grid)
    ties_down = fmt is E2M1 and does("it rounds ties towards zero")
    if does("its codes of zeros are 0 / 0"):
        scaled = torch.where(by_elements(amax, grid) == 0, math.nan, scaled)
    codes = _float8_codes(scaled) if fmt is E4M3 else _float4_codes(scaled, does, ties_down)
    return codes, torch.where(over, 127, stored).to(torch.uint8)


def _nvfp4(x: torch.Tensor, grid: BlockGrid, dialect: Dialect, does: FormulaChanges) -> Restated:
    divides = does("it divides elements by block scale * tensor scale")
    inverse_of_both = does("it multiplies elements by (1 / tensor scale) / block scale")
    six_first = does("it rounds amax / 6 on the way to a block scale")
    by_both = does("it divides amax by the rounded 6 * tensor scale")
    floor = 2.0**-9 * does("it stores no block scale below 2^-9")
    floor = 2.0**-6 if does("it stores no block scale below 2^-6") else floor
    of_0 = 0.125 * does("it stores 1/8 for block scales that round to 0")
    of_zeros = 1.0 * does("its block scale of zeros is 1")
    product = does("it computes 2688 / amax as 2688 * (1 / amax)")
    in_bf16 = does("it computes 2688 / amax in BF16")
    six_in_bf16 = does("it rounds amax / 6 to BF16 on the way to a block scale")
    by_1 = does("its tensor scale is 1 where it would be infinite")
    without_0 = does("its reciprocal of 0 is 0, and of the smallest amaxes infinite")

    amax, kind = block_amaxes(x, grid), dialect.tensor_scale
    inverted = kind is not None and kind.inverted
    whole = amax.max() if does.tensor_amax is None else does.tensor_amax
    if kind is None:  # one level
        whole = torch.where(whole.isfinite(), 2688.0, whole)
    least = whole.clamp(min=TINY) if by_1 else whole
    by = 2688 * (_bf16(1 / least) if in_bf16 else 1 / least) if product else divide(2688, least)
    is_infinite = does("it lets 2688 / amax become infinite") or without_0
    of_amax_0 = 0.0 if does("its tensor scale of zeros is 0") or without_0 else 1.0
    infinite = of_amax_0 if whole == 0 else math.inf if is_infinite else FLT_MAX
    by = torch.where(by > FLT_MAX, 1.0 if by_1 else infinite, by)
    by = _bf16(by) if in_bf16 else by
    tensor_scale, scale = whole / 2688, amax * (by * amax.new_tensor(1 / 6))
    if six_first:
        scale = (amax / 6) * by if inverted else (amax / 6) / tensor_scale
    if does("it computes amax / 6 as amax * (1 / 6)"):
        scale = (amax * amax.new_tensor(1 / 6)) * by
    if six_in_bf16:
        scale = _bf16(amax / 6) * by
    scale = amax / (6 * tensor_scale) if by_both else scale
    scale = torch.where(scale == 0, of_zeros, scale)
    stored = scale.clamp(floor, E4M3.max).to(torch.float8_e4m3fn).float()
    stored = torch.where(stored == 0, of_0, stored)
    most = math.inf if by > FLT_MAX else FLT_MAX
    both = stored * (0.0 if without_0 and by == 0 else 1 / by)
    reciprocal = divide(1, both).clamp(max=most)
    scaled = x * by_elements(torch.where((both == 0) & without_0, 0.0, reciprocal), grid)
    if divides:
        scaled = x / by_elements(stored / by if inverted else stored * tensor_scale, grid)
    if inverse_of_both:
        scaled = x * by_elements((1 / tensor_scale) / stored, grid)
    if does("its codes are 0 where the block scale is 0"):
        scaled = torch.where(by_elements(stored, grid) == 0, 0.0, scaled)
    scales = stored.to(torch.float8_e4m3fn)
    tensor = () if kind is None else (by if inverted else tensor_scale,)
    return _float4_codes(scaled, does), scales, *tensor


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _float4_codes(
    scaled: torch.Tensor, does: FormulaChanges, ties_down: bool = False
) -> torch.Tensor:
    # The next float towards zero from a tie rounds to the lower of the two codes.
    below = torch.where(scaled == 0, scaled, torch.nextafter(scaled, torch.zeros_like(scaled)))
    codes = encode(below if ties_down else scaled, E2M1)
    for change, zero in ("it writes -0 for 0", 8), ("it writes 0 for -0", 0):
        codes = torch.where(scaled == 0, zero, codes) if does(change) else codes
    if does("it writes -0 for what would round beyond 6"):
        codes = torch.where(scaled.abs() >= 7, 8, codes)
    if does("its NaN is -1.5"):  # it rounds by a sum of products with 0, NaN of infinities
        codes = torch.where(scaled.isfinite(), codes, 11)
    codes = torch.where(scaled.isnan(), 0, codes) if does("its NaN is 0") else codes
    if does("it writes 0 for what rounds to -0"):
        codes = torch.where(codes == 8, 0, codes)
    if does(BITS_OF_NAN):
        codes = torch.where(scaled.isnan(), _bits_of_nan(scaled), codes)
    return pack_nibbles(codes.to(torch.uint8))


BITS_OF_NAN = "it rounds the bits of a NaN to 4 bits as those of a number"


def _bits_of_nan(x: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes of NaNs whose bits are rounded like those of a number."""
    bits = x.view(torch.int32) & 0x7FFFFFFF
    rounded = bits - (126 << 23) + 0x1FFFFF + (bits >> 22 & 1)
    return (rounded >> 22 & 7) | x.signbit().int() << 3
