"""Fused operations: a function or a norm of a matrix and the cast of its result, as operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from zerocast.numerics.numerics import Numerics, NVFP4Numerics
from zerocast.numerics.operands import DelayedState, PlaneBuffers

Function = Literal[
    "identity", "relu", "gelu", "gelu_tanh", "silu", "swiglu", "layernorm", "rmsnorm"
]
"""The operation on a tensor before the cast; :class:`FusedOp` has the formulas."""


@dataclass(frozen=True, slots=True)
class FusedOp:
    """A function of a matrix [M, S], whose result has rows of K elements.

    With ``x`` an element of the source and, of a row, ``mean`` and ``variance`` over its K
    elements (divided by K)::

        identity      x
        relu          max(x, 0)
        gelu          x * Phi(x), Phi the distribution function of the normal distribution
        gelu_tanh     x / (1 + exp(-2 u)),   u = sqrt(2 / pi) * (x + 0.044715 * x^3)
        silu          x / (1 + exp(-x))
        swiglu        silu(x[:, :K]) * x[:, K:],   S = 2 K;  S = K for all others
        layernorm     (x - mean) / sqrt(variance + eps) * gamma + bias
        rmsnorm       x / sqrt(mean of squares + eps) * gamma

    where ``gamma`` is the weight, 1 + weight, or 1 without a weight. The result lies within 2 units
    in the last place of BF16 of the same in float64; with a bias, within 2 units of the larger term
    of the sum. It is then rounded, once, to :attr:`FusedOperand.round_to`.

    Attributes:
        function: the name of the function.
        eps: the number that a norm adds below its root.
        zero_centered_gamma: whether a norm's weight is stored less 1.
    """

    function: Function
    eps: float = 1e-5
    zero_centered_gamma: bool = False

    @property
    def is_norm(self) -> bool:
        """Whether an element depends on its whole row."""
        return self.function in ("layernorm", "rmsnorm")


@dataclass(frozen=True, slots=True)
class FusedOperand:
    """One tensor, the operation on it, and the buffers that :meth:`Backend.fused_op` writes.

    Attributes:
        op: the operation.
        source: [M, S], FP32, BF16 or FP16, contiguous.
        weight, bias: [K], FP32, BF16 or FP16, contiguous, of a norm; or None.
        round_to: the dtype to which the result is rounded before it is cast.
        output: [M, K] of ``round_to``, contiguous: receives the rounded result; or None.
        planes: the planes to cast. All codes are written, a missing last nibble as 0. The scales of
            blocks are written, and padding keeps what it holds. Codes are None where only scales
            are wanted, scales where another plane has them.
        delayed: the state whose scale multiplies the result, under :class:`Float8DelayedNumerics`.
        amax: FP32 [1] that receives the tensor amax, or None for numerics that stores none.
        tensor_amax: int32 [1], raised to the largest magnitude of the rounded result; or None.
        mean, rstd: FP32 [M] that receive the mean (layernorm) and 1 / sqrt(... + eps) of each row
            of a norm; or None.
    """

    op: FusedOp
    source: torch.Tensor
    round_to: torch.dtype
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    output: torch.Tensor | None = None
    planes: tuple[PlaneBuffers, ...] = ()
    delayed: DelayedState | None = None
    amax: torch.Tensor | None = None
    tensor_amax: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """M."""
        return self.source.shape[0]

    @property
    def cols(self) -> int:
        """K."""
        return self.source.shape[1] // (2 if self.op.function == "swiglu" else 1)


def can_fuse(numerics: Numerics) -> bool:
    """Say whether :meth:`Backend.fused_op` casts under ``numerics``, whose codes must follow from
    the rounded values and their amaxes alone. (4-over-6 chooses by errors, and stochastic rounding
    needs random bits: they take the operations of weights.)
    """
    return not (
        isinstance(numerics, NVFP4Numerics)
        and (numerics.four_over_six or numerics.stochastic_rounding)
    )
