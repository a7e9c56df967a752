"""LayerFilter: finds the layers that are not converted, by the user's choice or because of their
size.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from zerocast.arguments import did_you_mean
from zerocast.errors import InputError
from zerocast.layout import FULL
from zerocast.recipes import Recipe
from zerocast.tensors.wrapped_names import named_modules, named_parameters

AUTO_FILTER = "auto_filter_small_kn"
"""Among ``filter_fqns``: leave out the layers that are too small."""

_ROWWISE = ((None, 2048), (1024, None), (2048, 4096))
_TENSORWISE = ((4096, 1024),)
"""Pairs of a largest K and a largest N: codes gain no speed in layers of at most these, and None
stands for any size. The first pairs are for recipes whose scales belong to rows, the second ones
for all others. Source, for NVIDIA's H100: torchao, ``float8/README.md`` ("Performance"), and the
thresholds that its ``_auto_filter_for_recipe`` draws from it."""

Filter: TypeAlias = Sequence[str] | Callable[[torch.nn.Module, str], bool]
"""Parts of the names of layers to leave out; or a function (layer, name) that says whether to
convert it, as torchao's ``module_filter_fn``."""


class LayerFilter:
    """The filter that ``filter_fqns`` describes for the layers of ``model``, in any of its forms.

    Attributes:
        leaves_small: whether layers are left out that are too small to gain.

    Raises:
        InputError: for anything else, and for a part that no name contains: a layer that was meant
            to stay as it is would be converted.
    """

    def __init__(self, given: Filter, model: torch.nn.Module) -> None:
        self._parts: tuple[str, ...] = ()
        self._selects = None
        self.leaves_small = False
        if callable(given):
            self._selects = given
            return
        is_list = isinstance(given, list | tuple | set | frozenset)
        if not is_list or not all(isinstance(part, str) for part in given):
            raise InputError(
                f"filter_fqns must be a sequence of strings such as ['head'], or a function of a "
                f"layer and its name that says whether to convert it, got {given!r}."
            )
        self._parts, self.leaves_small = read_filter(tuple(given))
        names = [name for name, _ in named_modules(model, remove_duplicate=False)]
        names += [name for name, _ in named_parameters(model, remove_duplicate=False)]
        for part in self._parts:
            if not any(part in name for name in names):
                raise InputError(
                    f"each part of a name in filter_fqns must be in one of the model's names, got "
                    f"{part!r}, which is in none of them; correct it, or remove it. "
                    f"{AUTO_FILTER!r} filters by size.{did_you_mean(part, names)}"
                )

    def why_not(self, layer: torch.nn.Module, names: Sequence[str]) -> str | None:
        """Say why a layer of these names stays as it is; None where it does not."""
        for part in self._parts:
            if any(part in name for name in names):
                return f"its name contains {part!r} of filter_fqns"
        if self._selects is not None and not all(self._selects(layer, name) for name in names):
            return "filter_fqns, a function, excludes it"
        return None


def read_filter(filter_fqns: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """Return the parts of names to leave out, and whether small layers are, too."""
    return tuple(p for p in filter_fqns if p != AUTO_FILTER), AUTO_FILTER in filter_fqns


def why_small(recipe: Recipe, shape: Sequence[int]) -> str | None:
    """Say why a layer whose weight is of this shape [N, K] does not gain; None where it may."""
    n, k = shape
    for most_k, most_n in _ROWWISE if recipe.block == (1, FULL) else _TENSORWISE:
        if (most_k is None or k <= most_k) and (most_n is None or n <= most_n):
            named = (("K", most_k), ("N", most_n))
            bounds = " and ".join(f"{name} <= {most}" for name, most in named if most is not None)
            return (
                f"too small to gain by quantized products: K = {k} and N = {n}, and the H100 table "
                f"that torchao publishes has no gain where {bounds}; without {AUTO_FILTER!r} it is "
                f"converted"
            )
    return None
