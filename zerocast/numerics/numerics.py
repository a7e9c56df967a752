"""Scaling numerics: define how an amax becomes a scale, and how a value becomes a code under that
scale.

Amaxes are the int32 bit patterns of non-negative FP32 values: these have the order of integers, so
an integer maximum is exact and the same in every communicator, and NaN (canonical, ``0x7FC00000``)
is the largest and is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from zerocast.errors import InputError
from zerocast.numerics.element import E2M1, E4M3, ElementFormat

NUMERICS_VERSION = 2
"""Changes with any change of the bytes for some input; ranks of one cast must agree on it."""

INFINITY_BITS = 0x7F800000
"""The int32 bit pattern of +infinity: an amax that is not smaller is not finite."""

NAN_BITS = 0x7FC00000
"""The canonical NaN, which replaces every NaN in an amax buffer."""

ScaleFormula = Literal["reciprocal", "quotient", "inverse first"]
"""The ways in which FP8's scale and the stored inverse are computed from an amax."""

ScaleRounding = Literal["up", "floor", "even"]
"""The ways in which an E8M0 scale is rounded to a power of two."""


@dataclass(frozen=True, slots=True)
class Float8Numerics:
    """FP8 with one FP32 scale a block: ``scale = max / amax``, ``code = FP8(x * scale)``, stored
    ``1 / scale``.

    With ``formula`` "quotient" the stored inverse is ``amax / max``; with "inverse first" it is so,
    too, and the scale is made from it, ``1 / (amax / max)``.

    The order of the cases is: an amax that is not finite gives a NaN ``scale_inv`` and NaN codes;
    an amax below ``amax_epsilon`` is replaced by it; amax 0 gives scale 1; an infinite scale
    becomes FLT_MAX; ``power_2_scale`` clears the 23 mantissa bits of the scale. The tensor amax is
    not used.
    """

    fmt: ElementFormat
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    formula: ScaleFormula = "reciprocal"

    scale_dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Float8DelayedNumerics:
    """FP8 with one FP32 scale a tensor, made from the amaxes of *earlier* casts.

    The cast multiplies by ``state.scale`` and takes the amax of what it casts in the same pass.
    When the amax ``a`` has been reduced, :meth:`Backend.compute_scale` closes the cast::

        cast_scale = scale;  scale_inv = 1 / scale      # NaN where a is not finite
        if a is finite and not 0:
            the history takes a as its newest entry and drops its oldest; entries stay in order,
            newest first, 0 where there is none yet
            m = max(history), or a itself ("most_recent"), or what the callable makes of the history
            if m is finite and positive:
                scale = min((max * 2^-margin) / m, FLT_MAX)

    Attributes:
        fmt: the format of the codes.
        margin: the number of powers of two that the scale keeps below the largest.
        amax_compute_algo: ``"max"``, ``"most_recent"``, or a function from the history, FP32
            [history length], to an FP32 tensor of one element.
    """

    fmt: ElementFormat
    margin: int = 0
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"

    scale_dtype = torch.float32

    def amax_by_callable(self, history: torch.Tensor) -> torch.Tensor:
        """Return the amax, FP32 [1], that the function computes from ``history``.

        Raises:
            InputError: where that is not a tensor of one element on the history's device, or the
                function does not take a history.
        """
        assert callable(self.amax_compute_algo)
        try:
            amax = self.amax_compute_algo(history)
        except TypeError as error:
            raise InputError(
                "amax_compute_algo must be a function of the amax history, an FP32 tensor of one "
                f"dimension, got {self.amax_compute_algo!r}, which raised TypeError: {error}."
            ) from error
        given = getattr(amax, "shape", type(amax).__name__), getattr(amax, "device", None)
        if not isinstance(amax, torch.Tensor) or amax.numel() != 1 or given[1] != history.device:
            raise InputError(
                "amax_compute_algo must return a tensor of one element on the history's device, "
                f"{history.device}, got {given[0]} on {given[1]}; end it with .max() or reshape(1)."
            )
        return amax.detach().reshape(1).float()


@dataclass(frozen=True, slots=True)
class MXNumerics:
    """Codes under one E8M0 scale a block, a power of two.

    With ``a`` the block's amax, ``max = m * 2^top`` the format's largest value (``1 <= m < 2``),
    and every operation in FP32::

        S    = E8M0(a * fl(1/max))                     # "up"; NaN's code 0xFF where a is not finite
             = max(exponent field of a - top, 0)       # "floor"
             = the same of the bits of a + 2^(22 - mantissa bits of the format)     # "even"
        code = encode(x * reciprocal(S))               # NaN's code under a NaN scale

    The tensor amax is not used.
    """

    fmt: ElementFormat = E4M3
    scale_rounding: ScaleRounding = "up"

    scale_dtype = torch.uint8


@dataclass(frozen=True, slots=True)
class NVFP4Numerics:
    """E2M1 codes under one E4M3 scale a block, under one amax a tensor.

    With ``g`` the tensor amax and ``a`` the block's, every operation in FP32 and ``fl`` rounding to
    FP32::

        S_enc = min(6 * scale_max / g, FLT_MAX), or 1 where g == 0
        S_dec = E4M3(min(a * (S_enc * fl(1/6)), FLT_MAX))          # stored
        enc   = min(1 / (float(S_dec) * (1 / S_enc)), FLT_MAX)     # S_dec == 0 gives FLT_MAX
        code  = E2M1(x * enc)
        x     = E2M1(code) * ((float(S_dec) * g) * fl(1 / (6 * scale_max)))     # decoded

    A ``g`` that is not finite makes every stored scale E4M3's NaN and every code 7. With
    ``one_level`` any finite ``g`` is ``6 * scale_max`` instead, so that ``S_enc`` is 1.

    *4-over-6* gives each block the better one of two scales::

        base = (a / 6) * S_enc
        map4 = E4M3(min(base * 1.5, 448));  map6 = E4M3(min(base, 448))
        enc of each as above;  decoded of each = ((E2M1(code) * float(map)) * g) / (6 * scale_max)

    An element's error is ``|decoded - x|`` ("mae") or its square ("mse"), with codes rounded to
    nearest. The elements of a row inside the block are summed from left to right, then the rows
    (missing ones count 0) by the tree 8, 4, 2, 1: row r takes row r + 8, then r + 4, ... Map4 is
    taken only where its sum is strictly smaller.

    *Stochastic rounding* draws the code from the two neighbours of ``y = min(|x * enc|, 6)``, lower
    one ``lo`` and distance ``step`` between them: the upper one where
    ``(y - lo) / step + (draw + 1/2) * 2^-16 >= 1``, exactly, with ``fl(y + 1) - 1`` for ``y``
    below 1; the sign stays. The draw of an element is number ``index % 8`` of the 16-bit halves,
    each word's low one first, of Philox 4x32-10 with the key (low, high half of ``seed``) and
    the counter (low, high half of ``index / 8``, the hash of the weight's name, the step), where
    ``index`` is the element's flat index in the whole weight, also where this one is a shard of it;
    see :class:`Rounding`.

    Attributes:
        scale_max: the largest E4M3 scale in use: 448, or 256.
        four_over_six: None, ``"mae"`` or ``"mse"``.
        stochastic_rounding: whether codes are drawn.
        seed: 64 bits.
        one_level: whether stored scales do not depend on the tensor amax.
    """

    fmt: ElementFormat = E2M1
    scale_fmt: ElementFormat = E4M3
    scale_max: int = 448
    four_over_six: str | None = None
    stochastic_rounding: bool = False
    seed: int = 0
    one_level: bool = False

    scale_dtype = torch.uint8

    @property
    def one_level_amax(self) -> float:
        """The tensor amax under which the tensor scale is 1."""
        return self.fmt.max * self.scale_max


Numerics = Float8Numerics | Float8DelayedNumerics | MXNumerics | NVFP4Numerics
