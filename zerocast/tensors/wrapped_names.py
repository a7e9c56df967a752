"""The names of a model's modules and parameters as they are without its wrappers.

torch.compile and torch's checkpoint_wrapper put a part of their own into the names of what they
wrap. zerocast saves, compares, sends and draws by names, so it leaves these parts out wherever it
takes names, as ``torch.distributed.checkpoint.state_dict.get_model_state_dict`` does.
"""

from collections.abc import Iterator

import torch

INNER = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and torch's checkpoint_wrapper have what they wrap: no module of a model."""


def without_wrappers(name: str) -> str:
    """Return the name that a module or parameter has without wrappers."""
    return ".".join(part for part in name.split(".") if part not in INNER)


def named_modules(
    model: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules of a model; a wrapper has the name of what it wraps."""
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield without_wrappers(name), module


def named_parameters(
    model: torch.nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of a model."""
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield without_wrappers(name), parameter
