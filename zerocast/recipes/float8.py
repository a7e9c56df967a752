"""Float8Recipe: what the FP8 schemes with one FP32 scale a block have in common.

They share numerics, :class:`zerocast.numerics.Float8Numerics`, and the choice of its parameters by
what a tensor is to a layer; each is a grid of blocks and the place of its scales.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from zerocast.numerics import Float8Numerics
from zerocast.recipes.format import Format, QParams, replace_fields
from zerocast.recipes.recipe import Recipe, Role, fixed

_KNOWN = ("power_2_scale", "amax_epsilon")
_ANY_SCALE = QParams()
_ACCUMULATION = "the output is accumulated fast and the gradients exactly"

Scheme = TypeVar("Scheme", bound="Float8Recipe")


@dataclass(frozen=True, kw_only=True)
class Float8Recipe(Recipe):
    """FP8 codes under FP32 scales, ``scale = max / amax``.

    Attributes:
        fp8_format: a :class:`Format` or its name.
        fp8_quant_fwd_inp: for inputs and outputs of layers; ``power_2_scale`` and
            ``amax_epsilon`` are known.
        fp8_quant_fwd_weight: for weights.
        fp8_quant_bwd_grad: for gradients of outputs and inputs.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: must stay None.
    """

    fp8_format: Format | str = Format.HYBRID
    fp8_quant_fwd_inp: QParams = _ANY_SCALE
    fp8_quant_fwd_weight: QParams = _ANY_SCALE
    fp8_quant_bwd_grad: QParams = _ANY_SCALE
    fp8_gemm_fprop: None = fixed(None, _ACCUMULATION)
    fp8_gemm_dgrad: None = fixed(None, _ACCUMULATION)
    fp8_gemm_wgrad: None = fixed(None, _ACCUMULATION)

    def __post_init__(self) -> None:
        super().__post_init__()
        replace_fields(self, fp8_format=Format.of(self.fp8_format))
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            QParams.check(name, getattr(self, name), _KNOWN)

    def power_2_scale(self, params: QParams) -> bool:
        """Whether tensors quantized by ``params`` have scales that are powers of two."""
        return params.power_2_scale

    @property
    def numerics(self) -> Float8Numerics:
        params = self.fp8_quant_fwd_weight
        power_2_scale = self.power_2_scale(params)
        return Float8Numerics(
            Format.of(self.fp8_format).forward, power_2_scale, params.amax_epsilon
        )

    def for_role(self: Scheme, role: Role) -> Scheme:
        if role in ("input", "output"):
            return replace(self, fp8_quant_fwd_weight=self.fp8_quant_fwd_inp)
        if role in ("grad_output", "grad_input"):
            return replace(
                self,
                fp8_format=Format.of(self.fp8_format).of_backward,
                fp8_quant_fwd_weight=self.fp8_quant_bwd_grad,
            )
        return self
