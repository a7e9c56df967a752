"""LayerNorm and RMSNorm: torch's, with the option of a gamma that is centred at zero.

Statistics and the division are FP32 whatever the input's dtype, as in torch.
``zero_centered_gamma`` stores ``gamma - 1``, so weight decay pulls gamma towards 1, and a
low-precision gamma is finest where it starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from zerocast.arguments import (
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_shape,
    shown,
)
from zerocast.errors import InputError
from zerocast.nn.quantized_functions import QuantizedNorm
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.numerics import FusedOp

Normalization = Literal["LayerNorm", "RMSNorm"]


class LayerNorm(torch.nn.LayerNorm):
    """``torch.nn.LayerNorm``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: as torch's.
        zero_centered_gamma: multiply by ``1 + weight``, which starts at 0.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        self.zero_centered_gamma = check_flag("zero_centered_gamma", zero_centered_gamma)
        check_flag("bias", bias)
        shape = _check_norm(normalized_shape, eps, elementwise_affine, device, dtype)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Gamma 1 and bias 0."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            torch.nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., *normalized_shape] -> the same."""
        return normalize(
            "LayerNorm",
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            self.zero_centered_gamma,
        )

    def extra_repr(self) -> str:
        """As torch's, and whether gamma is centred at zero."""
        return super().extra_repr() + _says(self.zero_centered_gamma)


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: as torch's.
        zero_centered_gamma: multiply by ``1 + weight``, which starts at 0.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        self.zero_centered_gamma = check_flag("zero_centered_gamma", zero_centered_gamma)
        shape = _check_norm(normalized_shape, eps, elementwise_affine, device, dtype)
        super().__init__(shape, eps, elementwise_affine, device, dtype)

    def reset_parameters(self) -> None:
        """Gamma 1."""
        super().reset_parameters()
        if self.zero_centered_gamma and self.elementwise_affine:
            torch.nn.init.zeros_(self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., *normalized_shape] -> the same."""
        return normalize(
            "RMSNorm",
            input,
            self.normalized_shape,
            self.weight,
            None,
            self.eps,
            self.zero_centered_gamma,
        )

    def extra_repr(self) -> str:
        """As torch's, and whether gamma is centred at zero."""
        return super().extra_repr() + _says(self.zero_centered_gamma)


def _check_norm(
    normalized_shape: int | Sequence[int],
    eps: float | None,
    elementwise_affine: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> list[int]:
    """The normalized dimensions, where a norm can be made of all these."""
    if eps is not None:
        check_number("eps", eps)
    check_flag("elementwise_affine", elementwise_affine)
    check_device("device", device)
    check_dtype("dtype", dtype)
    dimensions = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    return list(check_shape("normalized_shape", dimensions))


def normalize(
    normalization: Normalization,
    input: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float | None,
    zero_centered_gamma: bool,
) -> torch.Tensor:
    """``(x - mean) / sqrt(var + eps) * gamma + bias``; without mean and bias for "RMSNorm"."""
    if zero_centered_gamma and weight is not None:
        weight = 1 + weight
    if normalization == "LayerNorm":
        return torch.nn.functional.layer_norm(input, shape, weight, bias, eps or 0.0)
    return torch.nn.functional.rms_norm(input, shape, weight, eps)


def check_normalization(normalization: str) -> Normalization:
    """``normalization`` where it is one.

    Raises:
        InputError: for another name.
    """
    if isinstance(normalization, str) and normalization in ("LayerNorm", "RMSNorm"):
        return normalization  # type: ignore[return-value]
    raise InputError(f"normalization must be 'LayerNorm' or 'RMSNorm', got {shown(normalization)}.")


def _says(zero_centered_gamma: bool) -> str:
    return ", zero_centered_gamma=True" if zero_centered_gamma else ""


class NormalizedModule(QuantizedModule):
    """A module that starts with a norm: its parameters and its product."""

    eps: float
    normalization: Normalization
    zero_centered_gamma: bool

    def _make_norm(
        self, features: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        shape = check_shape("the number of features", (features,))
        weight = torch.empty(
            shape, device=check_device("device", device), dtype=check_dtype("dtype", dtype)
        )
        self.layer_norm_weight = torch.nn.Parameter(weight)
        bias = torch.nn.Parameter(torch.empty_like(weight))
        self.layer_norm_bias = bias if self.normalization == "LayerNorm" else None

    def _reset_norm(self) -> None:
        """Gamma 1 and bias 0."""
        torch.nn.init.constant_(self.layer_norm_weight, 0 if self.zero_centered_gamma else 1)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def _normed_linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        wants_norm: bool,
        fp8_output: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Product number 0 of what the norm makes, and that where it is wanted."""
        function: Literal["layernorm", "rmsnorm"] = (
            "layernorm" if self.normalization == "LayerNorm" else "rmsnorm"
        )
        if self._traces_quantized(input):
            parameters = (self.layer_norm_weight, self.layer_norm_bias)
            norm = [each for each in parameters if each is not None]
            source = (function, self.eps, self.zero_centered_gamma)
            return self._traced(0, input, weight, bias, source, norm, wants_norm)
        quantizing = None
        if not torch.compiler.is_compiling():
            quantizing = self._quantizing(0, input, weight)
        if quantizing is None:
            normed: torch.Tensor | None = normalize(
                self.normalization,
                input,
                self.layer_norm_weight.shape,
                self.layer_norm_weight,
                self.layer_norm_bias,
                self.eps,
                self.zero_centered_gamma,
            )
            assert normed is not None
            return self._linear(0, normed, weight, bias, fp8_output=fp8_output), normed
        codes, normed = QuantizedNorm.apply(
            input.reshape(-1, input.shape[-1]),
            self.layer_norm_weight,
            self.layer_norm_bias,
            FusedOp(function, self.eps, self.zero_centered_gamma),
            quantizing.quantizer,
            quantizing.dtype,
            wants_norm,
            quantizing.watch,
        )
        out = self._linear(0, codes, weight, bias, leading=input.shape[:-1], fp8_output=fp8_output)
        return out, None if normed is None else normed.view(input.shape)

    def _repr_norm(self) -> str:
        gamma = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"normalization={self.normalization!r}, eps={self.eps}{gamma}"
