"""LayerNormLinear and LayerNormMLP: a norm, and the linear layers that it feeds.

Named, with their parameters, as in TransformerEngine. What the norm or the activation makes is an
input of a GEMM and of nothing else, so under :class:`zerocast.autocast` it is quantized where it is
made, and only its codes are kept for the backward.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from zerocast.nn.activation import Activation, activate, check_activation, widths
from zerocast.nn.initialization import linear_parameters, quantized_if_asked, reset_linear
from zerocast.nn.normalization import Normalization, check_normalization, normalize
from zerocast.nn.quantized_functions import QuantizedActivation, QuantizedNorm
from zerocast.nn.quantized_module import QuantizedModule, eager_in_regions
from zerocast.ops import Activation as Function
from zerocast.recipes import Recipe


class _Normalized(QuantizedModule):
    """A module that starts with a norm: its parameters and its product."""

    eps: float
    normalization: Normalization
    zero_centered_gamma: bool

    def _make_norm(
        self, features: int, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        weight = torch.empty(features, device=device, dtype=dtype)
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
        function: Literal["layernorm", "rmsnorm"] = (
            "layernorm" if self.normalization == "LayerNorm" else "rmsnorm"
        )
        codes, normed = QuantizedNorm.apply(
            input.reshape(-1, input.shape[-1]),
            self.layer_norm_weight,
            self.layer_norm_bias,
            Function(function, self.eps, self.zero_centered_gamma),
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


class LayerNormLinear(_Normalized):
    """``Linear(norm(x))``, with the norm over the last dimension.

    Parameters are ``layer_norm_weight`` [K], ``layer_norm_bias`` [K] (None for "RMSNorm"),
    ``weight`` [M, K] and ``bias`` [M]; they start as torch's layers start theirs.

    Args:
        in_features: K.
        out_features: M.
        eps: added to the variance.
        bias: whether the linear layer adds a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: whether the forward returns what the norm made, too.
        zero_centered_gamma: multiply by ``1 + layer_norm_weight``, which starts at 0.
        params_dtype: of the parameters: FP32, BF16 or FP16.
        device: where they are.
        recipe, columnwise, name: as in :class:`zerocast.nn.Linear`.

    Raises:
        InputError: for another normalization, and as :class:`zerocast.nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        recipe: Recipe | None = None,
        columnwise: bool = True,
        name: str = "",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.normalization = check_normalization(normalization)
        self.return_layernorm_output = return_layernorm_output
        self.zero_centered_gamma = zero_centered_gamma
        self.name = name
        self._make_norm(in_features, device, params_dtype)
        self._reset_norm()
        weight, self.bias = linear_parameters(in_features, out_features, bias, device, params_dtype)
        self.weight = quantized_if_asked(weight, recipe, columnwise=columnwise)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self._reset_norm()
        reset_linear(self.weight, self.bias)

    @eager_in_regions
    def forward(
        self, input: torch.Tensor, *, fp8_output: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., K] -> [..., M], and what the norm made, [..., K], where that was asked for."""
        wants_norm = self.return_layernorm_output
        out, normed = self._normed_linear(
            input, self.weight, self.bias, wants_norm=wants_norm, fp8_output=fp8_output
        )
        if not wants_norm:
            return out
        assert normed is not None
        return out, normed

    def extra_repr(self) -> str:
        """Features, bias and norm."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}, {self._repr_norm()}"


class LayerNormMLP(_Normalized):
    """``fc2(activation(fc1(norm(x))))``: a transformer's MLP with the norm before it.

    Parameters are ``layer_norm_weight`` [H], ``layer_norm_bias`` [H] (None for "RMSNorm"),
    ``fc1_weight`` [F, H] ([2F, H] for "swiglu"), ``fc1_bias``, ``fc2_weight`` [H, F] and
    ``fc2_bias``; they start as torch's layers start theirs.

    Args:
        hidden_size: H.
        ffn_hidden_size: F.
        eps: added to the variance.
        bias: whether both linear layers add a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"``, ``"silu"`` or ``"swiglu"``, as
            :data:`zerocast.nn.activation.Activation` defines them.
        return_layernorm_output: whether the forward returns what the norm made, too.
        zero_centered_gamma: multiply by ``1 + layer_norm_weight``, which starts at 0.
        params_dtype: of the parameters: FP32, BF16 or FP16.
        device: where they are.
        recipe, columnwise, name: as in :class:`zerocast.nn.Linear`, for both weights.

    Raises:
        InputError: for another normalization or activation, and as :class:`zerocast.nn.Linear`.
    """

    gemms: ClassVar[int] = 2

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        recipe: Recipe | None = None,
        columnwise: bool = True,
        name: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_hidden_size, self.eps = hidden_size, ffn_hidden_size, eps
        self.normalization = check_normalization(normalization)
        self.activation: Activation = check_activation(activation)
        self.return_layernorm_output = return_layernorm_output
        self.zero_centered_gamma = zero_centered_gamma
        self.name = name
        self._make_norm(hidden_size, device, params_dtype)
        self._reset_norm()
        width = widths(self.activation) * ffn_hidden_size
        fc1, self.fc1_bias = linear_parameters(hidden_size, width, bias, device, params_dtype)
        fc2, self.fc2_bias = linear_parameters(
            ffn_hidden_size, hidden_size, bias, device, params_dtype
        )
        self.fc1_weight = quantized_if_asked(fc1, recipe, columnwise=columnwise)
        self.fc2_weight = quantized_if_asked(fc2, recipe, columnwise=columnwise)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self._reset_norm()
        reset_linear(self.fc1_weight, self.fc1_bias)
        reset_linear(self.fc2_weight, self.fc2_bias)

    @eager_in_regions
    def forward(self, input: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., H] -> [..., H], and what the norm made, [..., H], where that was asked for."""
        wants_norm = self.return_layernorm_output
        hidden, normed = self._normed_linear(
            input, self.fc1_weight, self.fc1_bias, wants_norm=wants_norm
        )
        out = self._activated_linear(hidden)
        if not wants_norm:
            return out
        assert normed is not None
        return out, normed

    def _activated_linear(self, hidden: torch.Tensor) -> torch.Tensor:
        """Product number 1, of what the activation makes."""
        weight, bias = self.fc2_weight, self.fc2_bias
        quantizing = self._quantizing(1, hidden, weight)
        if quantizing is None:
            return self._linear(1, activate(self.activation, hidden), weight, bias)
        codes = QuantizedActivation.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            Function(self.activation),
            quantizing.quantizer,
            quantizing.watch,
        )
        return self._linear(1, codes, weight, bias, leading=hidden.shape[:-1])

    def extra_repr(self) -> str:
        """Sizes, bias, norm and activation."""
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        bias = f"bias={self.fc1_bias is not None}"
        return f"{sizes}, {bias}, {self._repr_norm()}, activation={self.activation!r}"
