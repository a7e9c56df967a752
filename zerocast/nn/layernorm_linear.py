"""LayerNormLinear: a norm and a linear layer, named as in TransformerEngine."""

from __future__ import annotations

import torch

from zerocast.arguments import check_flag, check_number, check_text
from zerocast.nn.linear import linear_parameters, quantized_if_asked, reset_linear
from zerocast.nn.norm import NormalizedModule, check_normalization
from zerocast.nn.traced_layer import eager_in_regions
from zerocast.recipes import Recipe


class LayerNormLinear(NormalizedModule):
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
        recipe: Recipe | str | None = None,
        columnwise: bool = True,
        name: str = "",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.eps = in_features, out_features, eps
        self.normalization = check_normalization(normalization)
        self.return_layernorm_output = check_flag(
            "return_layernorm_output", return_layernorm_output
        )
        self.zero_centered_gamma = check_flag("zero_centered_gamma", zero_centered_gamma)
        self.name = check_text("name", name)
        check_number("eps", eps)
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
