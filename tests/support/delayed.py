"""The rule of delayed scaling, told again in Python's own floats, to judge states by."""

import ctypes
import math

FLT_MAX = (2.0 - 2.0**-23) * 2.0**127
AMAXES = (1.0, 3.5, 0.0, 2.0**-149, 448.0, 1e-30, math.inf, 0.1, math.nan, FLT_MAX, 2.0**-126)
"""Ordinary ones, zero, tiny ones of which the scale overflows, and what is not finite."""


def fl(x: float) -> float:
    """``x`` rounded to FP32."""
    return ctypes.c_float(x).value


class PlainDelayed:
    """One tensor's history and scale.

    A double holds a quotient of two FP32 values exactly enough to be rounded once more.
    """

    def __init__(
        self, length: int, largest: float, margin: int = 0, algorithm: str = "max"
    ) -> None:
        self.history = [0.0] * length
        self.scale = 1.0
        self._largest = largest * 2.0**-margin
        self._algorithm = algorithm

    def step(self, amaxes: list[float]) -> None:
        """One reduction, of what every rank's casts have seen."""
        if not all(math.isfinite(a) for a in amaxes) or not any(amaxes):
            return
        newest = max(amaxes)
        self.history = [newest, *self.history[:-1]]
        stands_for = max(self.history) if self._algorithm == "max" else newest
        self.scale = min(fl(self._largest / stands_for), FLT_MAX)

    def scale_inv(self, amax: float) -> float:
        """Of a tensor with this amax that is cast now."""
        return fl(1 / self.scale) if math.isfinite(amax) else math.nan
