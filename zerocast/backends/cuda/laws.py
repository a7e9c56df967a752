"""Which kernel computes numerics, and what it is told of it: the names and the last arguments of
the entry points in ``cuda_src/cuda``.
"""

from __future__ import annotations

from zerocast.backends.tables import float_bits, numerics_fields
from zerocast.numerics import (
    Float8DelayedNumerics,
    Float8Numerics,
    MXFP8Numerics,
    Numerics,
    NVFP4Numerics,
)


def cast_kernel(numerics: Numerics, backend: str) -> tuple[str, list[int]]:
    """The ending of the name of the kernel that casts, and its scalars.

    Raises:
        BackendError: where compiled code has no such numerics; ``backend`` is named.
    """
    fields = numerics_fields(numerics, backend)
    if isinstance(numerics, NVFP4Numerics):
        seed = fields[-1]
        if numerics.stochastic_rounding:
            return "nvfp4_drawn", [numerics.scale_max, seed]
        return "nvfp4", [numerics.scale_max]
    if isinstance(numerics, Float8DelayedNumerics):
        return f"delayed_{numerics.fmt.name}", []
    return scale_kernel(numerics, backend)


def scale_kernel(numerics: Numerics, backend: str) -> tuple[str, list[int]]:
    """The same for the kernel that makes scales from amaxes; delayed scaling has one of its own."""
    numerics_fields(numerics, backend)
    if isinstance(numerics, NVFP4Numerics):
        return "nvfp4", [numerics.scale_max]
    if isinstance(numerics, MXFP8Numerics):
        return f"mxfp8_{numerics.fmt.name}", []
    assert isinstance(numerics, Float8Numerics)
    return f"float8_{numerics.fmt.name}", [
        int(numerics.power_2_scale),
        float_bits(numerics.amax_epsilon),
    ]


def decode_kernel(numerics: Numerics, backend: str) -> tuple[str, list[int]]:
    """The same for the kernel that decodes: it needs to know what a stored scale means."""
    numerics_fields(numerics, backend)
    if isinstance(numerics, NVFP4Numerics):
        return "nvfp4", [numerics.scale_max]
    kind = "mxfp8" if isinstance(numerics, MXFP8Numerics) else "float8"
    return f"{kind}_{numerics.fmt.name}", []


def choice_kernel(numerics: NVFP4Numerics, backend: str) -> tuple[str, list[int]]:
    """The same for the kernels that choose between two scales, under 4-over-6."""
    numerics_fields(numerics, backend)
    assert numerics.four_over_six is not None
    return numerics.four_over_six, [numerics.scale_max]
