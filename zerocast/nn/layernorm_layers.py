"""LayerNormLinear and LayerNormMLP: a norm and what follows it, named as in TransformerEngine.

The result of the norm is quantized by the operation that computes it, and so is that of the
activation.
"""

from typing import Any, ClassVar, Literal, get_args

import torch

from zerocast.arguments import (
    check_choice,
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_shape,
    check_text,
)
from zerocast.nn.layer_product import ProductInputs
from zerocast.nn.linear import linear_parameters, quantized_if_asked, reset_linear
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.traced_layer import eager_in_regions
from zerocast.numerics import FusedOp
from zerocast.recipes import Recipe

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu"]
"""The activations between the products of an MLP:

    gelu        x * Phi(x), which torch calls gelu (TransformerEngine's gelu is the next one)
    gelu_tanh   its approximation by tanh
    relu        max(x, 0)
    silu        x / (1 + exp(-x))
    swiglu      silu(x[..., :F]) * x[..., F:], of an input that is twice as wide
"""


class NormalizedModule(QuantizedModule):
    """A module that starts with a norm over the last dimension: its parameters and its product.

    Args:
        features: K, of the norm.
        eps, normalization, return_layernorm_output, zero_centered_gamma, params_dtype, device,
            name: as for :class:`LayerNormLinear`.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        normalization: str,
        return_layernorm_output: bool,
        zero_centered_gamma: bool,
        params_dtype: torch.dtype | None,
        device: torch.device | str | None,
        name: str,
    ) -> None:
        super().__init__()
        check_choice("normalization", normalization, ("LayerNorm", "RMSNorm"))
        self.normalization = normalization
        self.return_layernorm_output = check_flag(
            "return_layernorm_output", return_layernorm_output
        )
        self.zero_centered_gamma = check_flag("zero_centered_gamma", zero_centered_gamma)
        self.name = check_text("name", name)
        self.eps = check_number("eps", eps)
        shape = check_shape("the number of features", (features,))
        device, dtype = check_device("device", device), check_dtype("dtype", params_dtype)
        weight = torch.empty(shape, device=device, dtype=dtype)
        self.layer_norm_weight = torch.nn.Parameter(weight)
        bias = torch.nn.Parameter(torch.empty_like(weight))
        self.layer_norm_bias = bias if normalization == "LayerNorm" else None
        self._reset_norm()

    def _reset_norm(self) -> None:
        """Set gamma to 1, and the bias to 0."""
        torch.nn.init.constant_(self.layer_norm_weight, 0 if self.zero_centered_gamma else 1)
        if self.layer_norm_bias is not None:
            torch.nn.init.zeros_(self.layer_norm_bias)

    def _normed_product(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        fp8_output: bool = False,
    ) -> tuple[torch.Tensor, Any]:
        """Compute product number 0, of what the norm makes; return that, too, where it is
        wanted.
        """
        is_layernorm = self.normalization == "LayerNorm"
        op = FusedOp("layernorm" if is_layernorm else "rmsnorm", self.eps, self.zero_centered_gamma)
        parameters = (self.layer_norm_weight, self.layer_norm_bias)
        norm = tuple(each for each in parameters if each is not None)
        given = ProductInputs(0, input, weight, bias, op, norm, self.return_layernorm_output)
        return self._product(given, fp8_output=fp8_output)

    def _repr_norm(self) -> str:
        gamma = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return f"normalization={self.normalization!r}, eps={self.eps}{gamma}"


class LayerNormLinear(NormalizedModule):
    """``Linear(norm(x))``, with the norm over the last dimension.

    Parameters are ``layer_norm_weight`` [K], ``layer_norm_bias`` [K] (None for "RMSNorm"),
    ``weight`` [M, K] and ``bias`` [M]; torch's layers start theirs in the same way.

    Args:
        in_features: K.
        out_features: M.
        eps: added to the variance.
        bias: whether the linear layer adds a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        return_layernorm_output: whether the forward returns what the norm made, too.
        zero_centered_gamma: multiply by ``1 + layer_norm_weight``, which starts at 0.
        params_dtype: the dtype of the parameters: FP32, BF16 or FP16.
        device: where they are.
        recipe, columnwise, name: those of :class:`zerocast.nn.Linear`.

    Raises:
        InputError: for another normalization, and those of :class:`zerocast.nn.Linear`.
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
        super().__init__(
            in_features,
            eps,
            normalization,
            return_layernorm_output,
            zero_centered_gamma,
            params_dtype,
            device,
            name,
        )
        self.in_features, self.out_features = in_features, out_features
        weight, self.bias = linear_parameters(in_features, out_features, bias, device, params_dtype)
        self.weight = quantized_if_asked(weight, recipe, columnwise=columnwise)

    def reset_parameters(self) -> None:
        """Draw new values for all parameters."""
        self._reset_norm()
        reset_linear(self.weight, self.bias)

    @eager_in_regions
    def forward(
        self, input: torch.Tensor, *, fp8_output: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., K] -> [..., M], and what the norm made, [..., K], where that was asked for."""
        out, normed = self._normed_product(input, self.weight, self.bias, fp8_output=fp8_output)
        return (out, normed) if self.return_layernorm_output else out

    def extra_repr(self) -> str:
        """Return features, bias and norm."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}, {self._repr_norm()}"


class LayerNormMLP(NormalizedModule):
    """``fc2(activation(fc1(norm(x))))``: a transformer's MLP with the norm before it.

    Parameters are ``layer_norm_weight`` [H], ``layer_norm_bias`` [H] (None for "RMSNorm"),
    ``fc1_weight`` [F, H] ([2F, H] for "swiglu"), ``fc1_bias``, ``fc2_weight`` [H, F] and
    ``fc2_bias``; torch's layers start theirs in the same way.

    Args:
        hidden_size: H.
        ffn_hidden_size: F.
        eps: added to the variance.
        bias: whether both linear layers add a bias.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        activation: ``"gelu"``, ``"gelu_tanh"``, ``"relu"``, ``"silu"`` or ``"swiglu"``, as
            :data:`zerocast.nn.layernorm_layers.Activation` defines them.
        return_layernorm_output: whether the forward returns what the norm made, too.
        zero_centered_gamma: multiply by ``1 + layer_norm_weight``, which starts at 0.
        params_dtype: the dtype of the parameters: FP32, BF16 or FP16.
        device: where they are.
        recipe, columnwise, name: those of :class:`zerocast.nn.Linear`, for both weights.

    Raises:
        InputError: for another normalization or activation, and those of
            :class:`zerocast.nn.Linear`.
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
        super().__init__(
            hidden_size,
            eps,
            normalization,
            return_layernorm_output,
            zero_centered_gamma,
            params_dtype,
            device,
            name,
        )
        check_choice("activation", activation, get_args(Activation))
        check_shape("hidden_size and ffn_hidden_size", (hidden_size, ffn_hidden_size))
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.activation: Any = activation  # one of FusedOp's functions
        width = ffn_hidden_size * (2 if activation == "swiglu" else 1)
        fc1, self.fc1_bias = linear_parameters(hidden_size, width, bias, device, params_dtype)
        fc2, self.fc2_bias = linear_parameters(
            ffn_hidden_size, hidden_size, bias, device, params_dtype
        )
        self.fc1_weight = quantized_if_asked(fc1, recipe, columnwise=columnwise)
        self.fc2_weight = quantized_if_asked(fc2, recipe, columnwise=columnwise)

    def reset_parameters(self) -> None:
        """Draw new values for all parameters."""
        self._reset_norm()
        reset_linear(self.fc1_weight, self.fc1_bias)
        reset_linear(self.fc2_weight, self.fc2_bias)

    @eager_in_regions
    def forward(self, input: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """[..., H] -> [..., H], and what the norm made, [..., H], where that was asked for."""
        hidden, normed = self._normed_product(input, self.fc1_weight, self.fc1_bias)
        activation = FusedOp(self.activation)
        out, _ = self._product(ProductInputs(1, hidden, self.fc2_weight, self.fc2_bias, activation))
        return (out, normed) if self.return_layernorm_output else out

    def extra_repr(self) -> str:
        """Return sizes, bias, norm and activation."""
        sizes = f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}"
        bias = f"bias={self.fc1_bias is not None}"
        return f"{sizes}, {bias}, {self._repr_norm()}, activation={self.activation!r}"
