"""The numerics restated, one element at a time, in NumPy's FP32 scalars.

Written from the formulas of docs/numerics.md and from nothing else: no tensor operation, no code of
zerocast, no float8 cast of a library. It is slow and it is the second opinion on every byte.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import product
from math import isfinite, isnan, ldexp

import numpy as np

F32 = np.float32
FLT_MAX = F32(3.4028235e38)


# --- rounding of the master ---


def round_bf16(x: np.float32) -> np.float32:
    """To nearest, ties to even, in the bits: BF16 is the upper half of a float32."""
    bits = int(x.view(np.uint32))
    if isnan(x):
        return F32(np.nan)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return np.uint32(bits).view(F32)


def round_fp16(x: np.float32) -> np.float32:
    """To nearest, ties to even; 65520 and more overflow to infinity."""
    return F32(np.float16(x))


ROUND_MASTER = {"bfloat16": round_bf16, "float16": round_fp16, "float32": lambda x: x}


# --- element formats ---


def e2m1(x: np.float32) -> int:
    """Thresholds on the magnitude, some inclusive: that is rounding to nearest even."""
    if isnan(x):
        return 7
    magnitude = abs(x)
    passed = (
        magnitude > F32(0.25), magnitude >= F32(0.75), magnitude > F32(1.25),
        magnitude >= F32(1.75), magnitude > F32(2.5), magnitude >= F32(3.5), magnitude > F32(5),
    )  # fmt: skip
    return sum(passed) | (8 if np.signbit(x) else 0)


E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e2m1_value(code: int) -> np.float32:
    """With its sign."""
    return F32(-E2M1_VALUES[code & 7] if code & 8 else E2M1_VALUES[code & 7])


def float8_values(exponent_bits: int, mantissa_bits: int, largest: float) -> list[float]:
    """All finite magnitudes by code: 2^(e - bias) * 1.m, and for e = 0 the subnormals."""
    bias = 2 ** (exponent_bits - 1) - 1
    values = [
        ldexp((e > 0) * 2**mantissa_bits + m, max(e, 1) - bias - mantissa_bits)
        for e, m in product(range(2**exponent_bits), range(2**mantissa_bits))
    ]
    return [v for v in values if v <= largest]


FLOAT8_VALUES = {"e4m3": float8_values(4, 3, 448.0), "e5m2": float8_values(5, 2, 57344.0)}


def float8(x: np.float32, name: str) -> int:
    """The nearest value, ties to the even code, saturating; one code for NaN."""
    if isnan(x):
        return 0x7F
    values, magnitude = FLOAT8_VALUES[name], abs(float(x))
    below = bisect_right(values, magnitude) - 1
    code = below
    if below + 1 < len(values):
        middle = (values[below] + values[below + 1]) / 2
        if magnitude > middle or (magnitude == middle and below % 2 == 1):
            code = below + 1
    return code | (0x80 if np.signbit(x) else 0)


def e4m3_value(code: int) -> np.float32:
    """A stored block scale as FP32; they have no sign."""
    return F32(np.nan) if code == 0x7F else F32(FLOAT8_VALUES["e4m3"][code])


# --- scales, also of what is not finite ---


def float8_scale(amax: np.float32, name: str, power_2: bool, eps: float) -> np.float32:
    """The multiplier of the elements; NaN where the amax is not finite."""
    if not isfinite(amax):
        return F32(np.nan)
    if amax < F32(eps):
        amax = F32(eps)
    if amax == 0:
        return F32(1)
    scale = F32(FLOAT8_VALUES[name][-1]) / amax
    if scale == np.inf:
        scale = FLT_MAX
    if power_2:
        scale = np.uint32(int(scale.view(np.uint32)) & 0xFF800000).view(F32)
    return scale


# --- whole weights ---


@dataclass
class Expected:
    """Every stored byte of a weight, by the names of its buffers, and the values that they mean."""

    buffers: dict[str, np.ndarray] = field(default_factory=dict)
    values: np.ndarray = field(default_factory=lambda: np.zeros(0, F32))


def largest(elements: list[np.float32]) -> np.float32:
    """The largest magnitude; NaN wins over everything."""
    return F32(np.nan) if any(isnan(x) for x in elements) else max(abs(x) for x in elements)


def pack(codes: np.ndarray) -> np.ndarray:
    """[n, m] codes of 4 bits -> [n, ceil(m / 2)] bytes, the even column in the low nibble."""
    n, m = codes.shape
    packed = np.zeros((n, -(-m // 2)), np.uint8)
    for i, j in product(range(n), range(m)):
        packed[i, j // 2] |= codes[i, j] << (4 * (j % 2))
    return packed


def padded(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple
