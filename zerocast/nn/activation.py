"""The activations of an MLP, as differentiable functions in high precision."""

from __future__ import annotations

from typing import Literal, cast, get_args

import torch

from zerocast.errors import InputError

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
