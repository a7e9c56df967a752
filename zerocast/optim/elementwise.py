"""Which optimizers may be cut over ranks: those that update each element from that element alone.

A shard knows nothing of the other ranks' elements, so an optimizer that looks at a whole tensor (a
norm of it, its rows, its inverse) would give other weights on another number of ranks. No list of
names can say which do, so a class is
tried: it steps a small tensor whole, and again in two pieces.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.errors import InputError, UnsupportedError

_ELEMENTS = 48
_CUT = 17  # odd, and uneven, so that no statistic of the pieces equals that of the whole
_STEPS = 3


def check_elementwise(
    optimizer_class: type[torch.optim.Optimizer], defaults: dict[str, Any], device: torch.device
) -> None:
    """Let ``optimizer_class(params, **defaults)`` pass where it is element-wise.

    Fused implementations may round an element differently when its tensor is cut; such differences
    pass, dependence on other elements does not.

    Raises:
        InputError: where it is no optimizer class, or refuses ``defaults``.
        UnsupportedError: where it is not element-wise, or cannot step a flat tensor.
    """
    if not (
        isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)
    ):
        raise InputError(
            f"optimizer_class must be a class of torch optimizers such as torch.optim.AdamW, got "
            f"{optimizer_class!r}; give its options to ZeroOptimizer by name."
        )
    generator = torch.Generator("cpu").manual_seed(0)
    # Magnitudes grow along the tensor, gradients twice as fast, so the pieces' statistics differ.
    slope = torch.logspace(-2, 1, _ELEMENTS, dtype=torch.float32, device="cpu")

    def draw() -> torch.Tensor:
        return torch.randn(_ELEMENTS, generator=generator, dtype=torch.float32, device="cpu")

    values = (draw() * slope).to(device)
    gradients = [(draw() * slope.square()).to(device) for _ in range(_STEPS)]
    try:
        optimizer_class([values.new_zeros(2, 2)], **defaults)  # of a shape that all take
    except (TypeError, ValueError) as error:
        raise InputError(f"{optimizer_class.__name__} refused its options: {error}") from error
    try:
        whole = _run(optimizer_class, defaults, values, gradients, [_ELEMENTS])
        pieces = _run(optimizer_class, defaults, values, gradients, [_CUT, _ELEMENTS - _CUT])
    except Exception as error:
        raise UnsupportedError(
            "ZeroOptimizer needs an optimizer that steps flat FP32 shards element by element, and "
            f"{optimizer_class.__name__} failed on one ({type(error).__name__}: {error}); use one "
            "such as torch.optim.AdamW."
        ) from error
    if not torch.allclose(whole, pieces, rtol=1e-5, atol=0.0):
        i = int((whole - pieces).abs().argmax())
        raise UnsupportedError(
            "ZeroOptimizer needs an element-wise optimizer, because a shard knows nothing of "
            f"other ranks' elements, and {optimizer_class.__name__} is not: it gave element {i} of "
            f"a tensor {pieces[i].item():.9g} in two pieces and {whole[i].item():.9g} in one; use "
            "one such as torch.optim.AdamW."
        )


@torch.no_grad()
def _run(
    optimizer_class: type[torch.optim.Optimizer],
    defaults: dict[str, Any],
    values: torch.Tensor,
    gradients: list[torch.Tensor],
    sizes: list[int],
) -> torch.Tensor:
    params = [piece.clone() for piece in values.split(sizes)]
    optimizer = optimizer_class(params, **defaults)
    for gradient in gradients:
        for param, piece in zip(params, gradient.split(sizes), strict=True):
            param.grad = piece.clone()
        optimizer.step()
    return torch.cat(params)
