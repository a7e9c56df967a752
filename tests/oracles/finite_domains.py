"""The finite domains of the arithmetic, visited whole: what ``scripts/prove.py`` runs.

Masters are rounded to BF16 first (docs/numerics.md, section 1), so an element has 65,280 finite
values and an amax 32,640. A claim visits all pairs that a tensor can hold, or, "by thresholds", the
values on both sides of each place where a code changes: products with a positive number and
roundings keep the order of values, so between two such places the code is the same.

The expected bytes are worked out in NumPy's FP32 from docs/numerics.md and from nothing else:
scales by the scalar oracles beside this file, codes by the midpoints of the formats' values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

import zerocast
from tests.oracles.scalar_numerics import E2M1_VALUES, F32, FLOAT8_VALUES, FLT_MAX, float8_scale
from tests.oracles.scalar_nvfp4 import stored_scale
from tests.oracles.scalar_schemes import mx_scales
from tests.support.same_bytes import assert_same_bytes
from zerocast import QuantizedTensor
from zerocast.recipes import QParams, Recipe

MAGNITUDES = (np.arange(0x7F80, dtype=np.uint32) << 16).view(F32)
"""BF16's finite magnitudes, ascending."""
BOTH_SIGNS = np.stack([MAGNITUDES, -MAGNITUDES], axis=1).ravel()
"""+0, -0, and so on: the first 2 (k + 1) are what a tensor whose amax is number k can hold."""


@dataclass(frozen=True)
class Format:
    """An element format: its magnitudes by code, and where codes begin."""

    values: np.ndarray
    sign: int

    @property
    def thresholds(self) -> np.ndarray:
        """FP32 [codes - 1]: the least number that has each code from 1 on. A number halfway between
        two values goes to the even code.
        """
        middle = ((self.values[:-1] + self.values[1:]) / 2).astype(F32)
        goes_down = np.arange(len(middle)) % 2 == 0
        return np.where(goes_down, np.nextafter(middle, F32(np.inf)), middle)

    def codes(self, values: np.ndarray) -> np.ndarray:
        """uint8, of FP32 numbers that are not NaN."""
        codes = np.searchsorted(self.thresholds, np.abs(values), side="right")
        return (codes + np.signbit(values) * self.sign).astype(np.uint8)

    def steps(self, ascending: np.ndarray, by_thresholds: bool) -> tuple[Any, np.ndarray]:
        """Of numbers which are visited, and their codes: all, or those beside each place where a
        code begins, and both ends.
        """
        last, begins = len(ascending) - 1, np.searchsorted(ascending, self.thresholds)
        counts = np.diff(begins, prepend=0, append=last + 1)
        codes = np.repeat(np.arange(len(counts), dtype=np.uint8), counts)
        beside = np.unique(np.concatenate([begins - 1, begins, [0, last]]).clip(0, last))
        visited = beside if by_thresholds else slice(None)
        return visited, codes[visited]


E4M3, E5M2 = (Format(np.array(FLOAT8_VALUES[name]), 0x80) for name in ("e4m3", "e5m2"))
E2M1 = Format(np.array(E2M1_VALUES), 8)


def compare(what: str, found: torch.Tensor, expected: np.ndarray) -> None:
    """Raise at the first byte that is another one."""
    assert_same_bytes(found.reshape(expected.shape), torch.from_numpy(expected), what)


def cast(values: np.ndarray, recipe: Recipe, *, columnwise: bool = False) -> QuantizedTensor:
    """Quantize FP32 ``values`` under the nominal dtype BF16."""
    master = torch.from_numpy(np.ascontiguousarray(values))
    return zerocast.quantize(master, recipe, dtype=torch.bfloat16, columnwise=columnwise)


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The codes of 4 bits of each byte, the low ones first."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


# --- the claims: each takes the number of an item, and returns how many pairs it has decided ---


@dataclass(frozen=True)
class Float8:
    """FP8 with one scale a tensor: an item is an amax."""

    element: Format
    name: str
    params: QParams
    by_thresholds: bool = False
    items: int = len(MAGNITUDES)

    def scales(self, amax: np.float32) -> tuple[np.float32, np.float32]:
        """What multiplies elements, and what is stored."""
        scale = float8_scale(amax, self.name, self.params.power_2_scale, 0)
        if amax == 0 or self.params.scale_formula not in ("inverse first", "quotient"):
            return scale, F32(1) / scale
        inverse = amax / F32(self.element.values[-1])
        is_first = self.params.scale_formula == "inverse first"
        return min(F32(1) / inverse, FLT_MAX) if is_first else scale, inverse

    def visit(self, item: int) -> int:
        scale, inverse = self.scales(MAGNITUDES[item])
        amaxes = MAGNITUDES[: item + 1]
        visited, codes = self.element.steps(amaxes * scale, self.by_thresholds)
        values = np.stack([amaxes[visited], -amaxes[visited]], axis=1)
        expected = np.stack([codes, codes | np.uint8(self.element.sign)], axis=1)
        recipe = zerocast.Float8CurrentScaling(
            fp8_format=self.name, fp8_quant_fwd_weight=self.params
        )
        weight = cast(values, recipe)
        what = f"{self.name} under amax {MAGNITUDES[item]!r}, {self.params}"
        compare(f"scale of {what}", weight.rowwise_scale_inv, np.array([inverse]))
        compare(what, weight.rowwise_data, expected)
        return 2 * (item + 1)


@cache
def scales_of_magnitudes(largest: float, rounding: str) -> np.ndarray:
    """uint8, of blocks whose amax is each of :data:`MAGNITUDES`: powers of two."""
    scale_of = mx_scales(largest, rounding)
    return np.array([scale_of(amax)[0] for amax in MAGNITUDES], np.uint8)


@dataclass(frozen=True)
class MX:
    """A block under a power of two: an item is a scale, with the largest amax that has it. Item 0
    also compares the scales of all amaxes.
    """

    element: Format
    recipe: Recipe
    rounding: str = "up"
    items: int = 255

    def visit(self, item: int) -> int:
        two = self.recipe.columnwise_block == self.recipe.block
        ways = ["rowwise"] if two else ["rowwise", "columnwise"]
        scales = scales_of_magnitudes(self.element.values[-1], self.rounding)
        if item == 0:  # Of rows of 32 of each, and of columns of one.
            row = np.repeat(MAGNITUDES, 32)[None]
            weight = cast(row, self.recipe, columnwise=not two)
            for way in ways:
                plane = getattr(weight, f"{way}_scale_inv")[0]
                found = plane[: row.size][:: 32 if way == "columnwise" else 1][: len(scales)]
                compare(f"{way} scale of {self.recipe}", found, scales)
        of_scale = np.flatnonzero(scales == item)
        if not len(of_scale):
            return 0
        numbers = 2 * (int(of_scale[-1]) + 1)
        # In tiles of 32x32 whose first row and column are the amax, so that each block of either
        # direction has it.
        tiles = -(-numbers // 961)
        values = np.full((tiles, 32, 32), MAGNITUDES[of_scale[-1]])
        values[:, 1:, 1:] = np.resize(BOTH_SIGNS[:numbers], (tiles, 31, 31))
        values = values.reshape(-1, 32)
        expected = self.element.codes(np.ldexp(values.astype(np.float64), 127 - item).astype(F32))
        weight = cast(values, self.recipe, columnwise=not two)
        for way in ways:
            plane = getattr(weight, f"{way}_scale_inv")
            plane = plane[: len(values), :1] if way == "rowwise" else plane[:tiles, :32]
            codes, what = getattr(weight, f"{way}_data"), f"{way} {self.recipe} under scale {item}"
            compare(f"scale of {what}", plane, np.full(tuple(plane.shape), item, np.uint8))
            compare(what, nibbles(codes) if self.element is E2M1 else codes, expected)
        return numbers * len(ways)


@dataclass(frozen=True)
class NVFP4:
    """NVFP4 in blocks of 1x16: an item is a tensor's amax.

    Visited are the scales of blocks of every amax, whole or by thresholds, or the codes under every
    scale, by thresholds.
    """

    recipe: Recipe
    scales_only: bool
    by_thresholds: bool = False
    items: int = len(MAGNITUDES)

    def visit(self, item: int) -> int:
        encode = F32(1) if item == 0 else min(F32(2688) / MAGNITUDES[item], FLT_MAX)
        amaxes = MAGNITUDES[: item + 1]
        # Ascending, as products with a positive number are.
        scaled = np.minimum(amaxes * (encode * (F32(1) / F32(6))), FLT_MAX)
        what = f"under tensor amax {MAGNITUDES[item]!r}"
        rows, codes = E4M3.steps(scaled, self.scales_only and self.by_thresholds)
        if self.scales_only:
            values = np.zeros((len(codes), 16), F32)
            values[:, 5] = amaxes[rows]  # alone in its block
            found = cast(values, self.recipe).rowwise_scale_inv[: len(values), 0]
            compare(f"scale {what}", found, codes)
            return item + 1
        # The largest amax that has each scale.
        largest = np.flatnonzero(np.diff(codes, append=0xFF))
        multipliers = np.array([stored_scale(code, encode) for code in codes[largest]])
        # Four neighbours around each place where a code may begin.
        places = E2M1.thresholds.astype(np.float64) / multipliers[:, None].astype(np.float64)
        around = np.searchsorted(MAGNITUDES, places)[..., None] + np.arange(-2, 2)
        probes = around.reshape(len(largest), 28).clip(0, largest[:, None])
        codes = E2M1.codes(MAGNITUDES[probes] * multipliers[:, None]).reshape(-1, 7, 4)
        ends = np.minimum(around[..., 3], largest[:, None]) == largest[:, None]
        begins = np.maximum(around[..., 0], 0) == 0
        below, above = codes[..., 0] < np.arange(1, 8), codes[..., 3] >= np.arange(1, 8)
        if not ((below | begins) & (above | ends)).all():
            raise AssertionError(f"{what}: a code begins outside of its four probes.")
        # Rows of the block's amax and half of the probes, with either sign.
        amax = np.broadcast_to(largest[:, None, None], (len(largest), 2, 2))
        values = MAGNITUDES[np.concatenate([amax, probes.reshape(-1, 2, 14)], axis=2)]
        values = np.stack([values, -values], axis=1).reshape(-1, 16)
        expected = E2M1.codes(values * np.repeat(multipliers, 4)[:, None])
        weight = cast(values, self.recipe)
        compare(f"code {what}", nibbles(weight.rowwise_data), expected)
        return 2 * int((largest + 1).sum())


Claim = Float8 | MX | NVFP4

_NVFP4 = zerocast.NVFP4BlockScaling(disable_2d_quantization=True)
CLAIMS: dict[str, Claim] = {
    "fp8-e4m3": Float8(E4M3, "e4m3", QParams()),
    "fp8-e5m2": Float8(E5M2, "e5m2", QParams()),
    "fp8-e4m3-powers": Float8(E4M3, "e4m3", QParams(power_2_scale=True)),
    "fp8-e4m3-inverse-first": Float8(E4M3, "e4m3", QParams(scale_formula="inverse first")),
    "fp8-e4m3-quotient": Float8(E4M3, "e4m3", QParams(scale_formula="quotient")),
    "mxfp8": MX(E4M3, zerocast.MXFP8BlockScaling()),
    "mxfp8-e5m2": MX(E5M2, zerocast.MXFP8BlockScaling(fp8_format="e5m2")),
    "mxfp8-32x32": MX(E4M3, zerocast.MXFP8BlockScaling(enable_2d_quantization=True)),
    "mxfp4": MX(E2M1, zerocast.MXFP4BlockScaling()),
    "mxfp4-floor": MX(E2M1, zerocast.MXFP4BlockScaling(scale_rounding="floor"), "floor"),
    "mxfp4-even": MX(E2M1, zerocast.MXFP4BlockScaling(scale_rounding="even"), "even"),
    "nvfp4-scales": NVFP4(_NVFP4, scales_only=True),
    "nvfp4-codes": NVFP4(_NVFP4, scales_only=False),
}
