"""Reads param groups: the parameters of an optimizer, and their options."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from zerocast.errors import InputError

Param = torch.Tensor | tuple[str, torch.Tensor]
"""A parameter, or a (name, parameter) pair, as ``model.named_parameters()`` yields."""

ParamGroups: TypeAlias = Sequence[dict[str, Any]]
"""Param groups, or the options of each."""


def trainable_groups(
    params: Iterable[Param] | Iterable[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[Param]]:
    """Return torch's param groups without frozen parameters and without duplicates in a group, and
    the frozen parameters.

    A group that becomes empty is kept, so that the caller's groups keep their indices.

    Raises:
        InputError: if a group is not a dict with the key 'params'.
    """
    given: list[Any] = [params] if isinstance(params, torch.Tensor) else list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    frozen: list[Param] = []
    trainable = []
    for g, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise InputError(
                f"param_groups[{g}] must be a dict with the key 'params', got {group!r}; give "
                "parameters, or groups such as {'params': [...], 'lr': 1e-3}, not both."
            )
        listed, once = group["params"], dict[int, Param]()
        for param in [listed] if isinstance(listed, torch.Tensor) else listed:
            once.setdefault(id(_tensor(param)), param)
        # Other objects than tensors stay, and torch refuses them.
        kept = [p for p in once.values() if getattr(_tensor(p), "requires_grad", True)]
        frozen += [p for p in once.values() if not getattr(_tensor(p), "requires_grad", True)]
        trainable.append(group | {"params": kept})
        if not kept and any(isinstance(p, tuple) for p in once.values()):
            trainable[-1]["param_names"] = []  # torch cannot infer it any more
    return trainable, frozen


def unfrozen(frozen: Iterable[Param]) -> InputError | None:
    """Return the error for a parameter that was ``frozen`` and now has a gradient."""
    for param in frozen:
        tensor = _tensor(param)
        if tensor.requires_grad and tensor.grad is not None:
            name = param[0] if isinstance(param, tuple) else f"a parameter {tuple(tensor.shape)}"
            return InputError(
                f"{name} has a gradient, and did not require one when the ZeroOptimizer was made, "
                "which left it out; make a new optimizer once parameters are unfrozen, or freeze "
                "them after it was made."
            )
    return None


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a param group, without its parameters and their names."""
    return {name: group[name] for name in group if name not in ("params", "param_names")}


def option_lines(param_groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a text for each param group, of the options that can be compared between ranks."""
    plain = [{name: v for name, v in group.items() if _is_plain(v)} for group in param_groups]
    return [f"param_groups[{g}] with {group}" for g, group in enumerate(plain)]


def _is_plain(value: object) -> bool:
    """Return whether equal values have equal texts on every rank, unlike functions and tensors."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _tensor(param: Param) -> torch.Tensor:
    return param[1] if isinstance(param, tuple) else param
