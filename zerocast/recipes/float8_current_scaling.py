"""FP8 with one scale a tensor, made from the amax of the data being cast ("current scaling").

The whole weight is one block, whatever its shape. The numerics is
:class:`zerocast.numerics.Float8Numerics`.
"""

from dataclasses import dataclass

from zerocast.layout import FULL, Source
from zerocast.recipes.float8 import Float8Recipe


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Float8Recipe):
    """FP8 weights under one FP32 scale a tensor; N-D weights are served, as one tensor or with
    ``per_matrix`` as a stack.

    Stored are ``rowwise_data`` uint8 in the weight's shape, ``rowwise_scale_inv`` FP32 [1], and as
    a derived copy ``columnwise_data`` uint8 [K, product of the leading dimensions], whose scale is
    the same one.

    Attributes:
        use_power_2_scales: powers of two for every tensor, whatever its :class:`QParams` say.
    """

    scheme = "current"
    block = FULL, FULL
    columnwise_source = Source.ROWWISE
    scales_tensor = True

    use_power_2_scales: bool = False

    @property
    def has_power_2_scales(self) -> bool:
        return self.use_power_2_scales or super().has_power_2_scales
