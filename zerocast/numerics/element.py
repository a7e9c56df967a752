"""The element formats, which give a stored code its value.

A format is named by its exponent and mantissa widths. Everything else (largest value, subnormal
step) follows from them and from which codes are reserved, so that is how the constants below are
derived.

NOT here: scales. A code means a number only together with its block's scale, which a recipe
defines.
"""

import math
from dataclasses import dataclass

FLT_MAX = (2.0 - 2.0**-23) * 2.0**127
"""The largest finite FP32 value, 3.4028235e38, which replaces an infinite scale."""


@dataclass(frozen=True)
class ElementFormat:
    """A small floating-point format: sign, ``exponent_bits``, ``mantissa_bits``, rounding to
    nearest even.

    Attributes:
        name: the field's name for it, such as ``"e4m3"``.
        exponent_bits, mantissa_bits: field widths; with the sign they make ``bits``.
        max: the largest finite value. Larger magnitudes and infinities saturate to it.
        max_code: the code of :attr:`max`, with the sign bit clear.
        nan_code: the code of every NaN, whatever its sign.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    max_code: int
    nan_code: int

    @property
    def bits(self) -> int:
        """Stored bits an element: 4 or 8."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The exponent field of 1.0."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max_exponent(self) -> int:
        """The exponent of :attr:`max`: 2 for 6, which is 1.5 * 2^2."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_normal(self) -> float:
        """The smallest normal magnitude, exponent field 1."""
        return math.ldexp(1.0, 1 - self.bias)


# 0b0_1111_110: exponent 8, mantissa 1.75; 0b_1111_111 is NaN and there is no infinity.
E4M3 = ElementFormat("e4m3", 4, 3, max=1.75 * 2.0**8, max_code=0x7E, nan_code=0x7F)
# 0b0_11110_11: exponent 15, mantissa 1.75; the exponent field 31 holds infinity (unused here) and
# the NaNs.
E5M2 = ElementFormat("e5m2", 5, 2, max=1.75 * 2.0**15, max_code=0x7B, nan_code=0x7F)
# 0b0_11_1: exponent 2, mantissa 1.5. No NaN and no infinity: a NaN is stored as +6, and its block's
# scale is NaN.
E2M1 = ElementFormat("e2m1", 2, 1, max=1.5 * 2.0**2, max_code=0x7, nan_code=0x7)

ELEMENT_FORMATS = {f.name: f for f in (E4M3, E5M2, E2M1)}
