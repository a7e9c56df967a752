"""MXFP8: FP8 codes under one power of two for 32 elements.

Blocks of 32x32 are the option under which one copy of the codes serves both directions.
"""

from dataclasses import dataclass
from typing import Any

from zerocast.layout import Source
from zerocast.numerics import MXNumerics
from zerocast.recipes.format import Format, replace_fields
from zerocast.recipes.mx import MXRecipe


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(MXRecipe):
    """MXFP8 weights [M, K], or stacks of these, with K a multiple of 32; M is free.

    Stored are ``rowwise_data`` uint8 [M, K], ``rowwise_scale_inv`` (E8M0 codes) uint8 [M padded to
    128, K / 32 padded to 4], ``columnwise_data`` uint8 [M, K] and ``columnwise_scale_inv`` uint8
    [ceil(M / 32) padded to 4, K padded to 128]. Padding is 0.

    Attributes:
        fp8_format: a :class:`Format` or its name.
        enable_2d_quantization: weights in blocks of 32x32, whose rowwise codes are the columnwise
            ones, too: ``columnwise_data`` is not stored. Activations and gradients keep blocks of
            one dimension.
        margin, per_matrix: must stay 0, and True.
    """

    scheme = "mxfp8"

    fp8_format: Format | str = Format.E4M3

    def __post_init__(self) -> None:
        super().__post_init__()
        replace_fields(self, fp8_format=Format.of(self.fp8_format))

    @property
    def numerics(self) -> MXNumerics:
        return MXNumerics(Format.of(self.fp8_format).forward)

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        fmt = Format.of(self.fp8_format)
        fmt = fmt.of_backward if gradients else fmt
        return {"fp8_format": fmt, "enable_2d_quantization": False}

    @property
    def columnwise_source(self) -> Source:
        return Source.SHARED if self.enable_2d_quantization else Source.MASTER
