"""Delayed scaling, one cast after another: a companion of ``scalar_numerics.py``."""

from collections.abc import Callable
from math import isfinite, ldexp

import numpy as np

from tests.vectors.scalar_numerics import F32, FLOAT8_VALUES, FLT_MAX, Expected, float8, largest
from tests.vectors.scalar_schemes import float8_value, rounded


class Delayed:
    """What a tensor remembers, and one cast after another."""

    def __init__(self, name: str, margin: int, length: int, algorithm: str | Callable) -> None:
        self.name, self.margin, self.length, self.algorithm = name, margin, length, algorithm
        self.scale = F32(1)
        self.newest_first: list[np.float32] = []

    def cast(self, master: np.ndarray, dtype: str) -> Expected:
        """Under the scale so far; then the amax of what was cast makes the next."""
        with np.errstate(all="ignore"):
            x, used = rounded(master, dtype), self.scale
            amax = largest(list(x.values()))
            decoder = F32(1) / used if isfinite(amax) else F32(np.nan)
            codes = np.zeros(master.shape, np.uint8)
            values = np.zeros(master.shape, F32)
            for ij in x:
                codes[ij] = float8(x[ij] * used, self.name)
                values[ij] = float8_value(int(codes[ij]), self.name) * decoder
            if isfinite(amax) and amax != 0:
                self._advance(amax)
        history = np.zeros(self.length, F32)
        history[: len(self.newest_first)] = self.newest_first
        return Expected(
            {
                "rowwise_data": codes,
                "columnwise_data": np.ascontiguousarray(codes.T),
                "rowwise_scale_inv": np.array([decoder], F32),
                "scale": np.array([self.scale], F32),
                "cast_scale": np.array([used], F32),
                "amax_history": history,
                "amax": np.array([amax], F32),
            },
            values,
        )

    def _advance(self, amax: np.float32) -> None:
        self.newest_first = [amax, *self.newest_first][: self.length]
        if self.algorithm == "max":
            m = max(self.newest_first)
        elif self.algorithm == "most_recent":
            m = amax
        else:
            m = self.algorithm(self.newest_first)
        if isfinite(m) and m > 0:
            scaled_max = F32(ldexp(FLOAT8_VALUES[self.name][-1], -self.margin))
            self.scale = min(scaled_max / m, FLT_MAX)
