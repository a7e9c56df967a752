"""The weights that ``include`` names, which are cast though the model does not quantize them."""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from zerocast.arguments import did_you_mean, shown
from zerocast.errors import InputError
from zerocast.export.entries import ExportSource, stored_tensors
from zerocast.recipes import Recipe

Include: TypeAlias = Sequence[str] | Mapping[str, Recipe]
"""Names of linear layers that are also cast, or names of their weights with recipes."""


def included_weights(source: ExportSource, names: Include) -> dict[str, Recipe | None]:
    """Return the names of the weights that ``names`` match, with the recipes that it gives.

    Raises:
        InputError: if a name matches no linear layer, or only layers whose weights are tied and
            stored under another name; or if a mapping has a name that is no parameter's.
    """
    if isinstance(names, Mapping):
        unknown = [name for name in names if name not in stored_tensors(source)]
        if unknown or not all(isinstance(each, Recipe) for each in names.values()):
            raise InputError(
                f"include must map names of parameters to recipes, got {shown(unknown or names)}, "
                "which are not stored under these names, or have no recipe."
            )
        return dict(names)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"include must be a list of names of linear layers such as ['model.layers.*'], got "
            f"{names!r}."
        )
    modules = source.named_modules() if isinstance(source, torch.nn.Module) else ()
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    found, stored = set[str](), stored_tensors(source)
    for name in names:
        matching = fnmatch.filter(linear, name)
        if not matching:
            raise InputError(
                f"each name in include must be that of a linear layer, or a pattern with * that "
                f"matches some, got {name!r}, which matches none of {', '.join(linear[:4])}, ..."
                f"{did_you_mean(name, linear)}"
            )
        weights = {f"{module}.weight" if module else "weight" for module in matching}
        if not weights & stored.keys():
            raise InputError(
                f"include names {name!r}, whose weight is tied with another and stored under that "
                f"one's name, as it is; leave it out of include, or untie it."
            )
        found |= weights
    return dict.fromkeys(found)
