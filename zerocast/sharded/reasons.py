"""Why a parameter stays in high precision, for reports."""

from __future__ import annotations

import torch

_REASON = "_zerocast_gathered_in_high_precision_because"


def note_reason(module: torch.nn.Module, reason: str) -> None:
    """Remember in ``module``, a linear layer, why its weight stays in high precision."""
    setattr(module, _REASON, reason)


def why_high_precision(module: torch.nn.Module, name: str) -> str:
    """Why the parameter ``name`` of ``module`` itself stays in high precision."""
    parameter = module._parameters[name]
    assert parameter is not None
    if name == "weight" and isinstance(module, torch.nn.Linear):
        return getattr(
            module, _REASON, "its layer was made after zerocast.nn.convert, or never given to it"
        )
    if isinstance(module, torch.nn.Embedding):
        return "an embedding is looked up, not multiplied"
    if parameter.dim() > 2:
        return (
            f"a {type(module).__name__} keeps it as one parameter of {parameter.dim()} dimensions "
            f"(experts, a convolution), and only weights of torch.nn.Linear layers are converted"
        )
    if parameter.dim() == 2:
        return (
            f"it belongs to a {type(module).__name__}, and only weights of torch.nn.Linear layers "
            f"are converted"
        )
    return "only weights of linear layers are converted, not biases or norms"
