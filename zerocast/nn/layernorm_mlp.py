"""LayerNormMLP: a transformer's MLP with the norm before it, named as in TransformerEngine.

What the activation makes is quantized as what the norm makes is: where it is made.
"""

from __future__ import annotations

from typing import ClassVar, Literal, cast, get_args

import torch

from zerocast.arguments import check_flag, check_number, check_shape, check_text
from zerocast.errors import InputError
from zerocast.nn.linear import linear_parameters, quantized_if_asked, reset_linear
from zerocast.nn.norm import NormalizedModule, check_normalization
from zerocast.nn.quantized_functions import QuantizedActivation
from zerocast.nn.traced_layer import eager_in_regions
from zerocast.numerics import FusedOp
from zerocast.recipes import Recipe

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"]
"""Of an MLP:

    gelu        x * Phi(x), exactly, as torch's (TransformerEngine's is the next one)
    gelu_tanh   its approximation by tanh
    relu        max(x, 0)
    silu        x / (1 + exp(-x))
    swiglu      silu(x[..., :F]) * x[..., F:], of an input that is twice as wide
"""


def check_activation(activation: str) -> Activation:
    """``activation`` where it is one.

    Raises:
        InputError: for another name.
    """
    if activation not in get_args(Activation):
        raise InputError(
            f"activation must be one of {list(get_args(Activation))}, got {activation!r}."
        )
    return cast("Activation", activation)


def widths(activation: Activation) -> int:
    """How many elements go into one that comes out."""
    return 2 if activation == "swiglu" else 1


def activate(activation: Activation, input: torch.Tensor) -> torch.Tensor:
    """[..., F], or [..., 2F] for "swiglu" -> [..., F], in the input's dtype."""
    if activation == "swiglu":
        gated, gate = input.chunk(2, dim=-1)
        return torch.nn.functional.silu(gated) * gate
    if activation == "relu":
        return torch.nn.functional.relu(input)
    if activation == "silu":
        return torch.nn.functional.silu(input)
    return torch.nn.functional.gelu(
        input, approximate="tanh" if activation == "gelu_tanh" else "none"
    )


class LayerNormMLP(NormalizedModule):
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
            :data:`zerocast.nn.layernorm_mlp.Activation` defines them.
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
        recipe: Recipe | str | None = None,
        columnwise: bool = True,
        name: str = "",
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_hidden_size, self.eps = hidden_size, ffn_hidden_size, eps
        self.normalization = check_normalization(normalization)
        self.activation: Activation = check_activation(activation)
        self.return_layernorm_output = check_flag(
            "return_layernorm_output", return_layernorm_output
        )
        self.zero_centered_gamma = check_flag("zero_centered_gamma", zero_centered_gamma)
        self.name = check_text("name", name)
        check_number("eps", eps)
        self._make_norm(hidden_size, device, params_dtype)
        self._reset_norm()
        check_shape("hidden_size and ffn_hidden_size", (hidden_size, ffn_hidden_size))
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
        if self._traces_quantized(hidden):
            return self._traced(1, hidden, weight, bias, (self.activation,))[0]
        quantizing = None
        if not torch.compiler.is_compiling():
            quantizing = self._quantizing(1, hidden, weight)
        if quantizing is None:
            return self._linear(1, activate(self.activation, hidden), weight, bias)
        codes = QuantizedActivation.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            FusedOp(self.activation),
            quantizing.quantizer,
            quantizing.watch,
        )
        return self._linear(1, codes, weight, bias, leading=hidden.shape[:-1])

    def extra_repr(self) -> str:
        """Sizes, bias, norm and activation."""
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        bias = f"bias={self.fc1_bias is not None}"
        return f"{sizes}, {bias}, {self._repr_norm()}, activation={self.activation!r}"
