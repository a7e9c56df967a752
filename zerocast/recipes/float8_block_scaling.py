"""FP8 with one FP32 scale a block: 128x128 for weights, 1x128 for activations and gradients.

Square blocks let one scale serve the weight and its transpose. A block of one row serves one
direction only, so the columnwise copy of an activation is the rowwise cast of its transpose. The
numerics is :class:`zerocast.numerics.Float8Numerics`, with powers of two unless asked otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zerocast.errors import InputError
from zerocast.layout import Block, BlockGrid, ScaleLayout, Source
from zerocast.recipes.float8 import Float8Recipe
from zerocast.recipes.format import Format, QParams
from zerocast.recipes.recipe import fixed

BLOCK = 128
"""Elements along a row of a block, and down a square one."""

_POWER_2 = QParams(power_2_scale=True)


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Float8Recipe):
    """FP8 weights [M, K], or stacks of these, in blocks; ragged edges are served.

    Stored are ``rowwise_data`` uint8 [M, K], ``columnwise_data`` uint8 [K, M], and FP32 scales
    padded with 1.0:

    =====================  =============================  =============================
    blocks                 ``rowwise_scale_inv``          ``columnwise_scale_inv``
    =====================  =============================  =============================
    2-D, 128x128           [M / 128, K / 128 up to 4s]    [K / 128, M / 128 up to 4s]
    1-D, 1x128             [K / 128, M up to 4s]          [M / 128, K up to 4s]
    =====================  =============================  =============================

    with quotients rounded up. Of 2-D blocks the columnwise copy is derived, of 1-D blocks it is the
    cast of the transposed tensor.

    Attributes:
        x_block_scaling_dim: 1 or 2, for inputs and outputs of layers.
        w_block_scaling_dim: 1 or 2, for weights.
        grad_block_scaling_dim: 1 or 2, for gradients.
        use_f32_scales: any FP32 scale for every tensor, whatever its :class:`QParams` say.
        per_matrix: must stay True.
    """

    scheme = "block"

    fp8_format: Format | str = Format.E4M3
    fp8_quant_fwd_inp: QParams = _POWER_2
    fp8_quant_fwd_weight: QParams = _POWER_2
    fp8_quant_bwd_grad: QParams = _POWER_2
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    use_f32_scales: bool = False
    per_matrix: bool = fixed(True, "a block lies in one matrix")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            given = getattr(self, name)
            if not isinstance(given, int) or given not in (1, 2):
                raise InputError(f"{name} must be 1 (1x128) or 2 (128x128), got {given!r}.")

    @property
    def has_power_2_scales(self) -> bool:
        return super().has_power_2_scales and not self.use_f32_scales

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        dim = self.grad_block_scaling_dim if gradients else self.x_block_scaling_dim
        return super().of_activations(gradients=gradients) | {"w_block_scaling_dim": dim}

    @property
    def _has_flat_blocks(self) -> bool:
        """Whether blocks are 1x128."""
        return self.w_block_scaling_dim == 1

    def check_shape(self, shape: Sequence[int]) -> None:
        self._check_matrix(shape, 1, "any K")

    @property
    def block(self) -> Block:
        return 1 if self._has_flat_blocks else BLOCK, BLOCK

    @property
    def columnwise_source(self) -> Source:
        return Source.TRANSPOSED_MASTER if self._has_flat_blocks else Source.ROWWISE

    def scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        return ScaleLayout(grid, col_multiple=4, padding=1.0, transposed=self._has_flat_blocks)
