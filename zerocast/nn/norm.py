"""LayerNorm and RMSNorm: torch's layers, with the option of a gamma that is centred at zero.

Statistics and the division are FP32 whatever the input's dtype, as in torch.
``zero_centered_gamma`` stores ``gamma - 1``, so weight decay pulls gamma towards 1, and a
low-precision gamma is finest where it starts.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.arguments import (
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_shape,
)


class _ZeroCentredNorm(torch.nn.Module):
    """A norm of torch's whose ``weight`` may be stored less 1."""

    zero_centered_gamma: bool
    weight: Any  # a parameter, or None

    def reset_parameters(self) -> None:
        """Set gamma to 1, and a bias to 0."""
        super().reset_parameters()  # type: ignore[misc]
        if self.zero_centered_gamma and self.weight is not None:
            torch.nn.init.zeros_(self.weight)

    @property
    def _gamma(self) -> torch.Tensor | None:
        is_centred = self.zero_centered_gamma and self.weight is not None
        return 1 + self.weight if is_centred else self.weight

    def extra_repr(self) -> str:
        """Return what torch says, and whether gamma is centred at zero."""
        gamma = ", zero_centered_gamma=True" if self.zero_centered_gamma else ""
        return super().extra_repr() + gamma


class LayerNorm(_ZeroCentredNorm, torch.nn.LayerNorm):
    """``torch.nn.LayerNorm``.

    Args:
        normalized_shape, eps, elementwise_affine, bias, device, dtype: those of torch's layer.
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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., *normalized_shape] -> the same."""
        return torch.nn.functional.layer_norm(
            input, self.normalized_shape, self._gamma, self.bias, self.eps or 0.0
        )


class RMSNorm(_ZeroCentredNorm, torch.nn.RMSNorm):
    """``torch.nn.RMSNorm``.

    Args:
        normalized_shape, eps, elementwise_affine, device, dtype: those of torch's layer.
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

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., *normalized_shape] -> the same."""
        return torch.nn.functional.rms_norm(input, self.normalized_shape, self._gamma, self.eps)


def _check_norm(
    normalized_shape: int | Sequence[int],
    eps: float | None,
    elementwise_affine: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> list[int]:
    """Return the normalized dimensions, if a norm can be made of all these."""
    if eps is not None:
        check_number("eps", eps)
    check_flag("elementwise_affine", elementwise_affine)
    check_device("device", device)
    check_dtype("dtype", dtype)
    dimensions = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    return list(check_shape("normalized_shape", dimensions))
