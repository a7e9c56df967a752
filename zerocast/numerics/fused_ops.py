"""Fused operations: a function or a norm of a matrix, rounded once, as operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Function = Literal[
    "identity", "relu", "gelu", "gelu_tanh", "silu", "swiglu", "layernorm", "rmsnorm"
]
"""The operation on a tensor; :class:`FusedOp` has the formulas."""


class FusedOp(NamedTuple):
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

    where ``gamma`` is the weight, 1 + weight, or 1 without a weight. The result is within 2 units
    in the last place of BF16 of the float64 result; with a bias, within 2 units of the larger term
    of the sum. It is then rounded, once, to the dtype of :attr:`FusedOperand.output`.

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
        output: [M, K], FP32, BF16 or FP16, contiguous: receives the result, rounded to its dtype.
        weight, bias: [K], FP32, BF16 or FP16, contiguous, of a norm; or None.
        mean, rstd: FP32 [M] that receive the mean (layernorm) and 1 / sqrt(... + eps) of each row
            of a norm; or None.
    """

    op: FusedOp
    source: torch.Tensor
    output: torch.Tensor
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    rstd: torch.Tensor | None = None
