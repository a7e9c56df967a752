"""MXFP4: E2M1 codes under one power of two for 32 elements.

In blocks of 32x32 the columnwise copy is a re-packing of the gathered rowwise one.
"""

from dataclasses import dataclass
from typing import Any, get_args

from zerocast.arguments import check_choice
from zerocast.layout import BlockGrid, ScaleLayout, Source
from zerocast.numerics import E2M1, MXNumerics, ScaleRounding
from zerocast.recipes.mx import MXRecipe
from zerocast.recipes.recipe import fixed


@dataclass(frozen=True, kw_only=True)
class MXFP4BlockScaling(MXRecipe):
    """MXFP4 weights [M, K], or stacks of these, with K a multiple of 32; M is free.

    Stored are ``rowwise_data`` uint8 [M, K / 2], ``rowwise_scale_inv`` (E8M0 codes) uint8 [M padded
    to 128, K / 32 padded to 4], ``columnwise_data`` uint8 [M, K / 2] and ``columnwise_scale_inv``
    uint8 [ceil(M / 32) padded to 4, K padded to 128]. In blocks of 32x32 the columnwise copy is
    derived, as NVFP4's: ``columnwise_data`` [K, ceil(M / 2)] and ``columnwise_scale_inv`` [K padded
    to 128, ceil(M / 32) padded to 4]. Padding is 0.

    Attributes:
        scale_rounding: how a scale becomes a power of two: ``"up"``, so that nothing saturates;
            ``"floor"``, as the OCP specification says; ``"even"``, as up where the block's amax
            would round past 6, else as floor.
        enable_2d_quantization: weights in blocks of 32x32. Activations and gradients keep blocks of
            one dimension.
        margin, per_matrix: must stay 0, and True.
        fp4_format: must stay ``"e2m1"``.
    """

    scheme = "mxfp4"

    scale_rounding: ScaleRounding = "up"
    fp4_format: str = fixed("e2m1", "MXFP4 has one format of codes")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("scale_rounding", self.scale_rounding, get_args(ScaleRounding))

    @property
    def numerics(self) -> MXNumerics:
        return MXNumerics(E2M1, self.scale_rounding)

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        return {"enable_2d_quantization": False}

    @property
    def columnwise_source(self) -> Source:
        return Source.ROWWISE if self.enable_2d_quantization else Source.MASTER

    def columnwise_scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        if self.enable_2d_quantization:
            return self.scale_layout(grid)
        return super().columnwise_scale_layout(grid)
