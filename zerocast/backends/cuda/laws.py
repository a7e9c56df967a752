"""Which kernel computes a law, and what it is told of it: the names and the last arguments of the
entry points in ``cuda_src/cuda``.
"""

from __future__ import annotations

from zerocast.backends.tables import float_bits, law_fields
from zerocast.ops import Float8DelayedLaw, Float8Law, Law, MXFP8Law, NVFP4Law


def cast_kernel(law: Law, backend: str) -> tuple[str, list[int]]:
    """The ending of the name of the kernel that casts, and its scalars.

    Raises:
        BackendError: where compiled code has no such law; ``backend`` is named.
    """
    fields = law_fields(law, backend)
    if isinstance(law, NVFP4Law):
        seed = fields[-1]
        if law.stochastic_rounding:
            return "nvfp4_drawn", [law.scale_max, seed]
        return "nvfp4", [law.scale_max]
    if isinstance(law, Float8DelayedLaw):
        return f"delayed_{law.fmt.name}", []
    return scale_kernel(law, backend)


def scale_kernel(law: Law, backend: str) -> tuple[str, list[int]]:
    """The same for the kernel that makes scales from amaxes; delayed scaling has one of its own."""
    law_fields(law, backend)
    if isinstance(law, NVFP4Law):
        return "nvfp4", [law.scale_max]
    if isinstance(law, MXFP8Law):
        return f"mxfp8_{law.fmt.name}", []
    assert isinstance(law, Float8Law)
    return f"float8_{law.fmt.name}", [int(law.power_2_scale), float_bits(law.amax_epsilon)]


def decode_kernel(law: Law, backend: str) -> tuple[str, list[int]]:
    """The same for the kernel that decodes: it needs to know what a stored scale means."""
    law_fields(law, backend)
    if isinstance(law, NVFP4Law):
        return "nvfp4", [law.scale_max]
    kind = "mxfp8" if isinstance(law, MXFP8Law) else "float8"
    return f"{kind}_{law.fmt.name}", []


def choice_kernel(law: NVFP4Law, backend: str) -> tuple[str, list[int]]:
    """The same for the kernels that choose between two scales, under 4-over-6."""
    law_fields(law, backend)
    assert law.four_over_six is not None
    return law.four_over_six, [law.scale_max]
