"""Delayed scaling, one cast after another: a companion of ``scalar_numerics.py``."""

from collections.abc import Callable, Sequence
from math import inf, isfinite, ldexp, nan

import numpy as np

from tests.oracles.scalar_numerics import F32, FLOAT8_VALUES, FLT_MAX, Expected, float8, largest
from tests.oracles.scalar_schemes import float8_value, rounded

AMAXES = (1.0, 3.5, 0.0, 2.0**-149, 448.0, 1e-30, inf, 0.1, nan, float(FLT_MAX), 2.0**-126)
"""Ordinary ones, zero, tiny ones of which the scale overflows, and what is not finite."""


class Delayed:
    """What a tensor remembers, and one cast after another."""

    def __init__(
        self, name: str, length: int, margin: int = 0, algorithm: str | Callable = "max"
    ) -> None:
        self.name, self.margin, self.length, self.algorithm = name, margin, length, algorithm
        self.scale = F32(1)
        self.newest_first: list[np.float32] = []

    @property
    def history(self) -> np.ndarray:
        """[length] FP32, newest first, zeros behind."""
        history = np.zeros(self.length, F32)
        history[: len(self.newest_first)] = self.newest_first
        return history

    def scale_inv(self, amax: float) -> np.float32:
        """Of a tensor with this amax that is cast now."""
        return F32(1) / self.scale if isfinite(amax) else F32(np.nan)

    def cast(self, master: np.ndarray, dtype: str) -> Expected:
        """Under the scale so far; then the amax of what was cast makes the next."""
        with np.errstate(all="ignore"):
            x, used = rounded(master, dtype), self.scale
            amax = largest(list(x.values()))
            decoder = self.scale_inv(amax)
            codes = np.zeros(master.shape, np.uint8)
            values = np.zeros(master.shape, F32)
            for ij in x:
                codes[ij] = float8(x[ij] * used, self.name)
                values[ij] = float8_value(int(codes[ij]), self.name) * decoder
        self.reduce([amax])
        return Expected(
            {
                "rowwise_data": codes,
                "columnwise_data": np.ascontiguousarray(codes.T),
                "rowwise_scale_inv": np.array([decoder], F32),
                "scale": np.array([self.scale], F32),
                "cast_scale": np.array([used], F32),
                "amax_history": self.history,
                "amax": np.array([amax], F32),
            },
            values,
        )

    def reduce(self, amaxes: Sequence[float]) -> None:
        """What every rank's casts have seen makes the next scale; where one is not finite, or all
        are zero, nothing does.
        """
        if not all(map(isfinite, amaxes)) or not any(amaxes):
            return
        newest = F32(max(amaxes))
        self.newest_first = [newest, *self.newest_first][: self.length]
        if self.algorithm == "max":
            m = max(self.newest_first)
        elif self.algorithm == "most_recent":
            m = newest
        else:
            m = self.algorithm(self.newest_first)
        if isfinite(m) and m > 0:
            scaled_max = F32(ldexp(FLOAT8_VALUES[self.name][-1], -self.margin))
            with np.errstate(all="ignore"):
                self.scale = min(scaled_max / m, FLT_MAX)
