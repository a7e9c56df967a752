"""Which derivatives a layer has beyond the gradient of a backward, and which are refused.

A product with a decoded weight is one of torch's own operations, and has all of its derivatives:
gradients of gradients, forward mode, the transforms of torch.func. A product of operands that are
quantized on the way has its gradient only, whose own quantization has none; torch would take the
rest for constants, or end in a message that names nobody.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from zerocast.errors import UnsupportedError

Backward = Callable[..., Any]


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is under way."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def refuse_transforms(name: str) -> None:
    """Raise :class:`UnsupportedError` under such a transform, for a layer of this ``name``."""
    if is_transformed():
        raise UnsupportedError(
            f"{name} quantizes its operands under zerocast.autocast, where it has the gradient of "
            f"a backward and nothing else, and torch.func or forward-mode differentiation asks for "
            f"more; leave the region, or use zerocast.autocast(enabled=False), where a weight is "
            f"decoded and has all derivatives."
        )


def first_derivatives_only(backward: Backward) -> Backward:
    """Let a ``backward`` of an autograd.Function refuse to be differentiated itself."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() or any(map(_is_batched, grads)):
            raise UnsupportedError(
                "the backward of a layer under zerocast.autocast quantizes gradients and has no "
                "derivative, so create_graph=True, is_grads_batched=True and what uses them "
                "(Hessians, penalties on gradients) need the layer's forward outside of the "
                "region, or under zerocast.autocast(enabled=False)."
            )
        return backward(ctx, *grads)

    return run


def _is_batched(grad: torch.Tensor | None) -> bool:
    """Whether many gradients go through one backward, by either of torch's ways."""
    functorch = torch._C._functorch
    return grad is not None and (
        functorch.is_functorch_wrapped_tensor(grad) or functorch.is_legacy_batchedtensor(grad)
    )
