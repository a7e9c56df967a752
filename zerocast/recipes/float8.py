"""Float8Recipe: the base of the FP8 schemes with one FP32 scale a block.

They share numerics, :class:`zerocast.numerics.Float8Numerics`, and the choice of its parameters by
what a tensor is to a layer; each is a grid of blocks and the place of its scales.
"""

from dataclasses import dataclass
from typing import Any

from zerocast.errors import InputError
from zerocast.numerics import Float8Numerics
from zerocast.recipes.format import Format, QParams, replace_fields
from zerocast.recipes.recipe import Recipe, fixed

_KNOWN = ("power_2_scale", "amax_epsilon", "scale_formula")
_ANY_SCALE = QParams()
_ACCUMULATION = "the output is accumulated fast and the gradients exactly"


@dataclass(frozen=True, kw_only=True)
class Float8Recipe(Recipe):
    """FP8 codes under FP32 scales, ``scale = max / amax``.

    Attributes:
        fp8_format: a :class:`Format` or its name.
        fp8_quant_fwd_inp: for inputs and outputs of layers; ``power_2_scale``, ``amax_epsilon``
            and ``scale_formula`` are known.
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
        formula = self.fp8_quant_fwd_weight.scale_formula
        if self.has_power_2_scales and formula != "reciprocal":
            raise InputError(
                f"scales that are powers of two have one formula, got scale_formula={formula!r} "
                f"for {type(self).__name__}; leave one of them out."
            )

    @property
    def has_power_2_scales(self) -> bool:
        """Whether the scales of weights are powers of two."""
        return self.fp8_quant_fwd_weight.power_2_scale

    @property
    def numerics(self) -> Float8Numerics:
        fmt, params = Format.of(self.fp8_format).forward, self.fp8_quant_fwd_weight
        formula = params.scale_formula
        return Float8Numerics(fmt, self.has_power_2_scales, params.amax_epsilon, formula)

    def of_activations(self, *, gradients: bool) -> dict[str, Any]:
        if not gradients:
            return {"fp8_quant_fwd_weight": self.fp8_quant_fwd_inp}
        fmt = Format.of(self.fp8_format).of_backward
        return {"fp8_format": fmt, "fp8_quant_fwd_weight": self.fp8_quant_bwd_grad}
