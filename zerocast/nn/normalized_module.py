"""NormalizedModule: a norm, and the linear product that it feeds.

What the norm makes is an input of a GEMM and of nothing else, so under :class:`zerocast.autocast`
it is quantized where it is made, and only its codes are kept for the backward.
"""

from __future__ import annotations

from typing import Literal

import torch

from zerocast.arguments import check_device, check_dtype, check_shape
from zerocast.nn.normalization import Normalization, normalize
from zerocast.nn.quantized_functions import QuantizedNorm
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.traced_product import source_to_text
from zerocast.numerics import Activation


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
            text = source_to_text(function, self.eps, self.zero_centered_gamma)
            return self._traced(0, input, weight, bias, text, norm, wants_norm)
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
            Activation(function, self.eps, self.zero_centered_gamma),
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
