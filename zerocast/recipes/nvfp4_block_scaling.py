"""NVFP4: E2M1 codes, one E4M3 scale a block, one FP32 amax for the tensor.

Weights have square blocks of 16x16: one scale serves the weight and its transpose, so the
columnwise copy is a re-packing of the gathered rowwise one and never a second quantization.
Activations and gradients have blocks of 1x16, and their columnwise copy is the rowwise cast of
their transpose. The numerics is :class:`zerocast.numerics.NVFP4Numerics`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.arguments import check_choice, check_integer
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import Block, BlockGrid, ScaleLayout, Source
from zerocast.numerics import NVFP4Numerics
from zerocast.recipes.format import Format, QParams, refuse_hadamard, replace_fields
from zerocast.recipes.recipe import BufferSpec, Recipe, fixed

BLOCK = 16
"""Elements along a row of a block, and down a square one."""

# The block-scaled GEMMs of cuBLAS read scales in tiles of 128 rows by 4 columns, so the stored
# planes are whole tiles.
TILE_ROWS, TILE_COLS = 128, 4

_KNOWN = ("stochastic_rounding", "fp4_2d_quantization")
_NEAREST, _NEAREST_2D = QParams(), QParams(fp4_2d_quantization=True)
_DRAWN = QParams(stochastic_rounding=True)
_SCOPES = ("none", "weights", "activations", "all")


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4 weights in 16x16 blocks, activations and gradients in 1x16.

    The tensor is a matrix [M, K] with K a multiple of 16, or a stack of these; M is free. Stored
    are ``rowwise_data`` uint8 [M, K / 2], ``rowwise_scale_inv`` (E4M3 codes) uint8 [M padded to
    128, K / 16 padded to 4], ``amax`` FP32 [1], and as derived copies ``columnwise_data`` [K,
    ceil(M / 2)] and ``columnwise_scale_inv`` [K padded to 128, ceil(M / 16) padded to 4], behind
    the leading dimensions of a stack. Padding is 0. Under
    stochastic rounding there is ``rounding_counter`` int64 [2], too: the hash of the weight's name,
    and how often it was cast.

    Attributes:
        fp4_quant_fwd_inp: for inputs and outputs of layers; ``stochastic_rounding`` and
            ``fp4_2d_quantization`` are known.
        fp4_quant_fwd_weight: for weights.
        fp4_quant_bwd_grad: for gradients.
        disable_rht: must stay True: the random Hadamard transform is not built.
        disable_stochastic_rounding: round to nearest everywhere, whatever :class:`QParams` say.
        disable_2d_quantization: 1x16 everywhere, whatever :class:`QParams` say.
        nvfp4_4over6: ``"weights"`` lets each block of a weight take the better one of two scales,
            which map its amax to 6 or to 4; ``"none"`` does not.
        nvfp4_4over6_e4m3_use_256: ``"weights"`` or ``"all"``: under 4-over-6 the scales' largest
            value is 256, which leaves room for those that are half as large again; else 448.
        nvfp4_4over6_err_mode: ``"MAE"`` or ``"MSE"``: by which error the better one is judged.
        seed: the seed of stochastic rounding, 64 bits.
        one_level: weights have the tensor scale 1, whatever their amax: block scales are ``amax /
            6`` in E4M3, as MLX has them. Blocks whose amax is at most 6 * 2^-10 are 0.
        per_matrix: must stay True.
        fp4_format, fp8_format: must stay ``"e2m1"``, of codes, and E4M3, of their scales.
        row_scaled_activation: must stay False.
    """

    scheme = "nvfp4"
    scales_tensor = True

    fp4_quant_fwd_inp: QParams = _NEAREST
    fp4_quant_fwd_weight: QParams = _NEAREST_2D
    fp4_quant_bwd_grad: QParams = _DRAWN
    disable_rht: bool = True
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    seed: int = 0
    one_level: bool = False
    per_matrix: bool = fixed(True, "a block lies in one matrix")
    fp4_format: str = fixed("e2m1", "NVFP4 has one format of codes")
    fp8_format: str = fixed(Format.E4M3, "NVFP4 has one format of scales")
    row_scaled_activation: bool = fixed(False, "an activation has one amax, as a weight has")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("fp4_quant_fwd_inp", "fp4_quant_fwd_weight", "fp4_quant_bwd_grad"):
            QParams.check(name, getattr(self, name), _KNOWN)
        if not self.disable_rht:
            refuse_hadamard("NVFP4BlockScaling(disable_rht=False)")
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            check_choice(name, getattr(self, name), _SCOPES)
        if self.nvfp4_4over6 in ("activations", "all"):
            raise UnsupportedError(
                f"4-over-6 is for weights: it reads the tensor once more, got "
                f"nvfp4_4over6={self.nvfp4_4over6!r}; choose 'weights' or 'none'."
            )
        mode = self.nvfp4_4over6_err_mode
        if not isinstance(mode, str) or mode.upper() not in ("MAE", "MSE"):
            raise InputError(f"nvfp4_4over6_err_mode must be 'MAE' or 'MSE', got {mode!r}.")
        replace_fields(self, nvfp4_4over6_err_mode=mode.upper())
        check_integer("seed", self.seed, 0, 2**64 - 1)
        if self.one_level and self.chooses_scales:
            raise UnsupportedError(
                "one_level is for NVFP4 without 4-over-6, whose choice needs the tensor amax; "
                "leave one of them out."
            )

    @property
    def numerics(self) -> NVFP4Numerics:
        use_256 = self.chooses_scales and self.nvfp4_4over6_e4m3_use_256 in ("weights", "all")
        return NVFP4Numerics(
            scale_max=256 if use_256 else 448,
            four_over_six=self.nvfp4_4over6_err_mode.lower() if self.chooses_scales else None,
            stochastic_rounding=self._draws,
            seed=self.seed if self._draws else 0,
            one_level=self.one_level,
        )

    @property
    def _draws(self) -> bool:
        """Whether weights are rounded stochastically."""
        return self.fp4_quant_fwd_weight.stochastic_rounding and not (
            self.disable_stochastic_rounding
        )

    @property
    def state(self) -> tuple[str, ...]:
        return ("rounding_counter",) if self._draws else ()

    @property
    def chooses_scales(self) -> bool:
        return self.nvfp4_4over6 == "weights"

    @property
    def _has_flat_blocks(self) -> bool:
        """Whether blocks are 1x16."""
        return self.disable_2d_quantization or not self.fp4_quant_fwd_weight.fp4_2d_quantization

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        params = self.fp4_quant_bwd_grad if gradients else self.fp4_quant_fwd_inp
        return {"fp4_quant_fwd_weight": params, "nvfp4_4over6": "none", "one_level": False}

    def check_shape(self, shape: Sequence[int]) -> None:
        self._check_matrix(shape, BLOCK, "a row is whole blocks and whole bytes")

    @property
    def block(self) -> Block:
        return 1 if self._has_flat_blocks else BLOCK, BLOCK

    @property
    def columnwise_source(self) -> Source:
        return Source.TRANSPOSED_MASTER if self._has_flat_blocks else Source.ROWWISE

    def scale_layout(self, grid: BlockGrid) -> ScaleLayout:
        return ScaleLayout(
            grid, row_repeat=grid.block_h, row_multiple=TILE_ROWS, col_multiple=TILE_COLS
        )

    def own_buffers(self) -> dict[str, BufferSpec]:
        specs = {"amax": BufferSpec((1,), torch.float32)}
        if self._draws:
            specs["rounding_counter"] = BufferSpec((2,), torch.int64)
        return specs
