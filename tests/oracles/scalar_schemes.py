"""The FP8 schemes, one element at a time: a companion of ``scalar_numerics.py``.

Written from docs/numerics.md in NumPy's FP32 scalars and Python's integers; no code of zerocast and
no tensor operation. A matrix is a dictionary from (row, column) to its rounded element.
"""

from collections.abc import Callable
from math import frexp, isfinite, isnan, ldexp

import numpy as np

from tests.oracles.scalar_numerics import (
    F32,
    FLOAT8_VALUES,
    ROUND_MASTER,
    Expected,
    e2m1,
    e2m1_value,
    float8,
    float8_scale,
    largest,
    pack,
    padded,
)

Matrix = dict[tuple[int, int], np.float32]
Scales = dict[tuple[int, int], np.generic | int]
"""By block."""


def rounded(master: np.ndarray, dtype: str) -> Matrix:
    """The master, rounded first."""
    return {ij: ROUND_MASTER[dtype](master[ij]) for ij in np.ndindex(master.shape)}


def transposed(x: Matrix) -> Matrix:
    """The other way round."""
    return {(j, i): v for (i, j), v in sorted(x.items(), key=lambda item: item[0][::-1])}


def shape_of(x: Matrix) -> tuple[int, int]:
    """Rows and columns."""
    last = max(x)
    return last[0] + 1, last[1] + 1


def blocks(x: Matrix, h: int, w: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The elements of each block, row by row; at the edges those that there are."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i, j in sorted(x):
        found.setdefault((i // h, j // w), []).append((i, j))
    return found


def plane(scales: Scales, shape: tuple[int, int], fill: float, dtype: type) -> np.ndarray:
    """A stored plane: entry (r, c) where there is one, ``fill`` elsewhere."""
    out = np.full(shape, fill, dtype)
    for at, scale in scales.items():
        out[at] = scale
    return out


# --- FP8 under FP32 scales ---


def float8_value(code: int, name: str) -> np.float32:
    """What a code means; every code that is no finite number is NaN."""
    values = FLOAT8_VALUES[name]
    if code & 0x7F >= len(values):
        return F32(np.nan)
    return F32(-values[code & 0x7F] if code & 0x80 else values[code & 0x7F])


def cast(
    x: Matrix, h: int, w: int, scale_of: Callable[[np.float32], tuple],
    encode: Callable[[np.float32], int], value_of: Callable[[int], np.float32],
) -> tuple[np.ndarray, np.ndarray, Scales]:  # fmt: skip
    """Codes, values and stored scales, where ``scale_of`` an amax is (what is stored, what decodes,
    what encodes).
    """
    codes, values = np.zeros(shape_of(x), np.uint8), np.zeros(shape_of(x), F32)
    scales: Scales = {}
    for block, elements in blocks(x, h, w).items():
        scales[block], decoder, encoder = scale_of(largest([x[ij] for ij in elements]))
        for ij in elements:
            codes[ij] = encode(x[ij] * encoder)
            values[ij] = value_of(int(codes[ij])) * decoder
    return codes, values, scales


def cast_float8(
    x: Matrix, name: str, h: int, w: int, scale_of: Callable[[np.float32], tuple]
) -> tuple[np.ndarray, np.ndarray, Scales]:
    """To FP8 of this name."""
    return cast(x, h, w, scale_of, lambda v: float8(v, name), lambda c: float8_value(c, name))


def fp32_scales(name: str, power_2: bool, eps: float) -> Callable[[np.float32], tuple]:
    """FP8, one FP32 scale a block."""

    def scale_of(amax: np.float32) -> tuple:
        scale = float8_scale(amax, name, power_2, eps)
        return F32(1) / scale, F32(1) / scale, scale

    return scale_of


def per_tensor(master: np.ndarray, dtype: str, name: str, power_2: bool, eps: float) -> Expected:
    """One scale, and the byte transpose."""
    with np.errstate(all="ignore"):
        x, numerics = rounded(master, dtype), fp32_scales(name, power_2, eps)
        codes, values, scales = cast_float8(x, name, *master.shape, numerics)
    return Expected(
        {
            "rowwise_data": codes,
            "rowwise_scale_inv": np.array([scales[0, 0]], F32),
            "columnwise_data": np.ascontiguousarray(codes.T),
        },
        values,
    )


def rowwise(master: np.ndarray, dtype: str, name: str, power_2: bool, eps: float) -> Expected:
    """A scale a row; and, from the master again, one a column."""
    rows, cols = master.shape
    with np.errstate(all="ignore"):
        x, numerics = rounded(master, dtype), fp32_scales(name, power_2, eps)
        codes, values, by_row = cast_float8(x, name, 1, cols, numerics)
        second, _, by_col = cast_float8(x, name, rows, 1, numerics)
    return Expected(
        {
            "rowwise_data": codes,
            "rowwise_scale_inv": plane(by_row, (rows, 1), 0, F32)[:, 0],
            "columnwise_data": second,
            "columnwise_scale_inv": plane(by_col, (1, cols), 0, F32)[0],
        },
        values,
    )


def float8_blocks(
    master: np.ndarray, dtype: str, name: str, power_2: bool, eps: float, dim: int
) -> Expected:
    """128x128, or 1x128 with the transpose cast on its own."""
    rows, cols = master.shape
    tall, wide = -(-rows // 128), -(-cols // 128)
    with np.errstate(all="ignore"):
        x, numerics = rounded(master, dtype), fp32_scales(name, power_2, eps)
        h = 128 if dim == 2 else 1
        codes, values, scales = cast_float8(x, name, h, 128, numerics)
        if dim == 2:
            second = np.ascontiguousarray(codes.T)
            first_plane = plane(scales, (tall, padded(wide, 4)), 1, F32)
            flipped: Scales = {(j, i): s for (i, j), s in scales.items()}
            second_plane = plane(flipped, (wide, padded(tall, 4)), 1, F32)
        else:
            second, _, other = cast_float8(transposed(x), name, 1, 128, numerics)
            flipped = {(j, i): s for (i, j), s in scales.items()}
            first_plane = plane(flipped, (wide, padded(rows, 4)), 1, F32)
            flipped = {(j, i): s for (i, j), s in other.items()}
            second_plane = plane(flipped, (tall, padded(cols, 4)), 1, F32)
    return Expected(
        {
            "rowwise_data": codes,
            "rowwise_scale_inv": first_plane,
            "columnwise_data": second,
            "columnwise_scale_inv": second_plane,
        },
        values,
    )


# --- MX ---


def e8m0(x: np.float32) -> int:
    """A power of two that is not below ``x``, by its exponent field."""
    bits = int(x.view(np.uint32))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    if isnan(x):
        return 0xFF
    if mantissa and exponent != 0xFE and not (exponent == 0 and mantissa <= 0x400000):
        exponent += 1
    return exponent


def mx_scales(largest: float, rounding: str = "up") -> Callable[[np.float32], tuple]:
    """A power of two a block: the least that maps the amax to the ``largest`` value or below; or,
    of MXFP4, a quarter of the power of two that is not above the amax, for "even" of one whose
    leading bits are rounded.
    """

    def scale_of(amax: np.float32) -> tuple:
        if not isfinite(amax):
            return 0xFF, F32(np.nan), F32(np.nan)
        code = e8m0(amax * F32(1 / largest))
        if rounding != "up":
            significand, exponent = frexp(float(amax))  # in [0.5, 1)
            if rounding == "even" and significand >= 0.875:
                exponent += 1
            code = max(exponent - 1 - 2 + 127, 0) if amax else 0
        return code, F32(ldexp(1.0, code - 127)), F32(ldexp(1.0, 127 - code))

    return scale_of


def mxfp4(master: np.ndarray, dtype: str, rounding: str, two_dimensions: bool) -> Expected:
    """1x32 and 32x1, or 32x32 whose other copy is the transposed one."""
    rows, cols = master.shape
    wide = padded(rows, 128), padded(cols // 32, 4)
    tall = padded(-(-rows // 32), 4), padded(cols, 128)
    with np.errstate(all="ignore"):
        x, numerics = rounded(master, dtype), mx_scales(6, rounding)
        height = 32 if two_dimensions else 1
        codes, values, scales = cast(x, height, 32, numerics, e2m1, e2m1_value)
        by_row = {(i, j // 32): scales[i // height, j // 32] for i, j in x}
        if two_dimensions:
            second, shape = codes.T, tall[::-1]
            by_col = {(j, i // 32): scales[i // 32, j // 32] for i, j in x}
        else:
            second, _, by_col = cast(x, 32, 1, numerics, e2m1, e2m1_value)
            shape = tall
    buffers = {
        "rowwise_data": pack(codes),
        "rowwise_scale_inv": plane(by_row, wide, 0, np.uint8),
        "columnwise_data": pack(second),
        "columnwise_scale_inv": plane(by_col, shape, 0, np.uint8),
    }
    return Expected(buffers, values)


def mxfp8(master: np.ndarray, dtype: str, name: str, two_dimensions: bool) -> Expected:
    """1x32 and 32x1, or 32x32 whose scales stand in both planes."""
    rows, cols = master.shape
    first_shape = (padded(rows, 128), padded(cols // 32, 4))
    second_shape = (padded(-(-rows // 32), 4), padded(cols, 128))
    with np.errstate(all="ignore"):
        x, numerics = rounded(master, dtype), mx_scales(FLOAT8_VALUES[name][-1])
        if two_dimensions:
            codes, values, scales = cast_float8(x, name, 32, 32, numerics)
            by_row = {(i, j // 32): scales[i // 32, j // 32] for i, j in x}
            by_col = {(i // 32, j): scales[i // 32, j // 32] for i, j in x}
        else:
            codes, values, by_row = cast_float8(x, name, 1, 32, numerics)
            second, _, by_col = cast_float8(x, name, 32, 1, numerics)
    buffers = {
        "rowwise_data": codes,
        "rowwise_scale_inv": plane(by_row, first_shape, 0, np.uint8),
        "columnwise_scale_inv": plane(by_col, second_shape, 0, np.uint8),
    }
    if not two_dimensions:
        buffers["columnwise_data"] = second
    return Expected(buffers, values)
