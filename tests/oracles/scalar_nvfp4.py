"""NVFP4 with its options, one element at a time: a companion of ``scalar_numerics.py``.

Blocks of one dimension, 4-over-6 and stochastic rounding, with Philox in Python's integers.
"""

from fractions import Fraction
from math import isfinite, isnan

import numpy as np

from tests.oracles.scalar_numerics import (
    E2M1_VALUES,
    F32,
    FLT_MAX,
    Expected,
    e2m1,
    e2m1_value,
    e4m3_value,
    float8,
    largest,
    pack,
    padded,
)
from tests.oracles.scalar_schemes import (
    Matrix,
    Scales,
    blocks,
    plane,
    rounded,
    shape_of,
    transposed,
)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox 4x32-10 in Python's integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (
            (second >> 32) ^ b ^ k, second & 0xFFFFFFFF, (first >> 32) ^ d ^ m, first & 0xFFFFFFFF,
        )  # fmt: skip
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def draw(index: int, seed: int, name_hash: int, step: int) -> int:
    """The 16 random bits of an element; of the step 32 bits count."""
    group = index // 8
    counter = (group & 0xFFFFFFFF, group >> 32, name_hash, step & 0xFFFFFFFF)
    word = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))[index % 8 // 2]
    return word >> 16 * (index % 2) & 0xFFFF


def drawn(x: np.float32, bits: int) -> int:
    """One of the two neighbours of ``x``; NaN has none."""
    if isnan(x):
        return 7
    y = min(abs(float(x)), 6.0)
    if y < 1:
        y = float(F32(F32(y) + F32(1))) - 1
    below = max(i for i, v in enumerate(E2M1_VALUES) if v <= y)
    code = below
    if y > E2M1_VALUES[below]:
        gap = E2M1_VALUES[below + 1] - E2M1_VALUES[below]
        distance = Fraction(y - E2M1_VALUES[below]) / Fraction(gap)
        code += distance + Fraction(2 * bits + 1, 2**17) >= 1
    return code | (8 if np.signbit(x) else 0)


def stored_scale(code: int, s_enc: np.float32) -> np.float32:
    """The multiplier under a stored scale."""
    return min(F32(1) / (e4m3_value(code) * (F32(1) / s_enc)), FLT_MAX)


class FourOverSix:
    """The choice of one block of up to 16 rows, between map4 and map6."""

    def __init__(self, amax: np.float32, g: np.float32, scale_max: int, mode: str) -> None:
        self.g, self.most, self.mode = g, F32(6 * scale_max), mode
        self.s_enc = F32(1) if g == 0 else min(self.most / g, FLT_MAX)
        base = (amax / F32(6)) * self.s_enc
        self.maps = [
            float8(min(base * F32(1.5), F32(448)), "e4m3"), float8(min(base, F32(448)), "e4m3"),
        ]  # fmt: skip

    def error(self, x: np.float32, code: int) -> np.float32:
        """Of one element under the stored scale ``code``."""
        q = e2m1_value(e2m1(x * stored_scale(code, self.s_enc)))
        error = abs(((q * e4m3_value(code)) * self.g) / self.most - x)
        return error * error if self.mode == "mse" else error

    def better(self, block: Matrix) -> int:
        """The stored scale, by the sums of a row, then of rows in halves."""
        sums = []
        for code in self.maps:
            by_row = [F32(0)] * 16
            for i, j in sorted(block):
                by_row[i % 16] = by_row[i % 16] + self.error(block[i, j], code)
            for half in (8, 4, 2, 1):
                by_row = [by_row[r] + by_row[r + half] for r in range(half)]
            sums.append(by_row[0])
        return self.maps[0] if sums[0] < sums[1] else self.maps[1]


def cast_nvfp4(
    x: Matrix,
    h: int,
    *,
    scale_max: int = 448,
    mode: str | None = None,
    random: tuple[int, int, int] | None = None,
) -> tuple[np.ndarray, np.ndarray, Scales, np.float32]:
    """Codes, one a byte, values, stored scales by block, and the tensor's amax.

    ``random`` is the seed, the hash of the name and the step of stochastic rounding.
    """
    cols = shape_of(x)[1]
    codes, values = np.zeros(shape_of(x), np.uint8), np.zeros(shape_of(x), F32)
    scales: Scales = {}
    g = largest(list(x.values()))
    finite = isfinite(g)
    most = F32(6 * scale_max)
    s_enc = F32(1) if g == 0 else min(most / g, FLT_MAX) if finite else F32(np.nan)
    for block, elements in blocks(x, h, 16).items():
        if not finite:
            code, enc = 0x7F, F32(np.nan)
        else:
            amax = largest([x[ij] for ij in elements])
            code = float8(min(amax * (s_enc * F32(1 / 6)), FLT_MAX), "e4m3")
            if mode is not None:
                choice = FourOverSix(amax, g, scale_max, mode)
                code = choice.better({ij: x[ij] for ij in elements})
            enc = stored_scale(code, s_enc)
        scales[block] = code
        decoder = (e4m3_value(code) * g) * F32(1 / (6 * scale_max))
        for i, j in elements:
            y = x[i, j] * enc
            codes[i, j] = e2m1(y) if random is None else drawn(y, draw(i * cols + j, *random))
            values[i, j] = e2m1_value(int(codes[i, j])) * decoder
    return codes, values, scales, g


def nvfp4(master: np.ndarray, dtype: str, h: int, **options) -> Expected:
    """16x16 with its transpose, or 1x16 with the cast of the transpose.

    Rows of the transposed cast are whole bytes: an odd one is filled up with a zero, whose nibble
    is 0 under any scale.
    """
    rows, cols = master.shape
    with np.errstate(all="ignore"):
        x = rounded(master, dtype)
        codes, values, scales, g = cast_nvfp4(x, h, **options)
        if h == 16:
            second, by_col = codes.T, {(j, i // 16): scales[i // 16, j // 16] for i, j in x}
        else:
            y = transposed(x) | ({(j, rows): F32(0) for j in range(cols)} if rows % 2 else {})
            second, _, by_col, _ = cast_nvfp4(y, h, **options)
            second = second[:, :rows]
    by_row = {(i, j // 16): scales[i // h, j // 16] for i, j in x}
    buffers = {
        "rowwise_data": pack(codes),
        "rowwise_scale_inv": plane(by_row, (padded(rows, 128), padded(cols // 16, 4)), 0, np.uint8),
        "amax": np.array([g], F32),
        "columnwise_data": pack(second),
        "columnwise_scale_inv": plane(
            by_col, (padded(cols, 128), padded(-(-rows // 16), 4)), 0, np.uint8
        ),
    }
    if options.get("random") is not None:
        _, name_hash, step = options["random"]
        buffers["rounding_counter"] = np.array([name_hash, step], np.int64)
    return Expected(buffers, values)
