"""The names of a model's modules and parameters without those of wrappers.

torch.compile and torch's checkpoint_wrapper add a component to the names of what they wrap.
zerocast uses names to save, compare, send and draw random bits. It removes these components from
all names, as ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` does.
"""

from collections.abc import Iterator

import torch

INNER = ("_orig_mod", "_checkpoint_wrapped_module")
"""The attributes in which torch.compile and torch's checkpoint_wrapper hold the wrapped module."""


def without_wrappers(name: str) -> str:
    """Return the name that a module or parameter has without wrappers."""
    return ".".join(part for part in name.split(".") if part not in INNER)


def named_modules(
    model: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a model with their names; a wrapper has the name of what it wraps."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield without_wrappers(name), module


def named_parameters(
    model: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a model with their names."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield without_wrappers(name), parameter
