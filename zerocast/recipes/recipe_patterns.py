"""RecipePatterns: finds the recipe of each weight of a model, by patterns of names.

Note: what a pattern reaches
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Patterns are compared in their order, and the first that fits a name decides. A linear layer is
compared by its name. Weights of other modules are compared by the names of the parameter and of its
module. A pattern converts stacks of matrices (experts), too: parameters of three or more
dimensions with two matrices or more. There are two exceptions:

* The pattern ``*`` alone converts linear layers only. So one recipe means the same as ``*`` with
  this recipe.
* Embeddings and other matrices, and stacks of a single matrix, are converted only if ``include``
  names them. ``*`` decides for these, too.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from zerocast.arguments import did_you_mean, shown
from zerocast.errors import InputError
from zerocast.recipes.named import as_recipe
from zerocast.recipes.recipe import Recipe

Recipes: TypeAlias = Recipe | str | Mapping[str, Recipe | str | None]
"""A recipe or its name; or these by patterns of names, in order. None leaves a weight as it is."""

ALL = "*"
"""The pattern that one recipe stands for."""


class RecipePatterns:
    """The patterns of a conversion.

    Args:
        given: as :func:`zerocast.nn.convert` takes it.

    Attributes:
        are_given: whether patterns were given, and not one recipe.

    Raises:
        InputError: for anything else.
    """

    def __init__(self, given: Recipes) -> None:
        self.are_given = isinstance(given, Mapping)
        if not isinstance(given, Mapping):
            given = {ALL: as_recipe(given)}
        if not given or not all(isinstance(pattern, str) for pattern in given):
            raise InputError(
                "a mapping of recipes must have patterns of names as its keys, such as "
                f"{{'*.experts.*': 'nvfp4', 'lm_head': None, '*': 'mxfp8'}}, got {shown(given)}."
            )
        self._recipes = {
            pattern: None if recipe is None else as_recipe(recipe, what=f"recipe[{pattern!r}]")
            for pattern, recipe in given.items()
        }
        self._have_decided = set[str]()
        self._seen: list[Sequence[str]] = []  # the names of each layer and weight

    def recipe_for(self, names: Sequence[str]) -> tuple[Recipe | None, str | None]:
        """Return the recipe of the layer or weight of these ``names``; or None, and why."""
        self._seen.append(names)
        pattern = self._first(names)
        if pattern is None:
            return None, "no pattern of names in recipe fits it; add one that does"
        self._have_decided.add(pattern)
        recipe = self._recipes[pattern]
        return recipe, f"{pattern!r} in recipe leaves it as it is" if recipe is None else None

    def reach(self, stack: torch.Tensor, names: Sequence[str]) -> bool:
        """Return whether a pattern decides for a parameter of another module that ``include`` does
        not name.
        """
        self._seen.append(names)
        is_stack = stack.dim() > 2 and stack.shape[:-2].numel() > 1
        return is_stack and self._first(names) not in (None, ALL)

    def check_all_decide(self) -> None:
        """Raise :class:`InputError` for a pattern other than ``*`` that no :meth:`recipe_for` has
        returned, or that fits only weights that it does not leave and that :meth:`reach` denies.
        """
        for pattern, recipe in self._recipes.items():
            if pattern in self._have_decided or pattern == ALL:
                continue
            fits = [names for names in self._seen if fnmatch.filter(names, pattern)]
            if not fits:
                near = did_you_mean(pattern, [names[0] for names in self._seen])
                raise InputError(
                    "each pattern in recipe must fit the whole name of a linear layer, or of a "
                    f"weight that can be included, got {pattern!r}, which fits none; correct it, "
                    f"or remove it.{near}"
                )
            firsts = [self._first(names) for names in fits]
            if earlier := [first for first in firsts if first != pattern]:
                raise InputError(
                    f"the first pattern in recipe that fits a name decides, got {pattern!r} after "
                    f"{earlier[0]!r}, which fits {fits[0][0]}, too; put the special pattern first."
                )
            if recipe is not None:
                raise InputError(
                    "a pattern in recipe converts linear layers and stacks of two or more "
                    f"matrices, got {pattern!r}, which fits {fits[0][0]}, another weight; name "
                    "that in include, too."
                )

    def _first(self, names: Sequence[str]) -> str | None:
        """Return the first pattern that fits any of ``names``."""
        fits = (p for p in self._recipes if any(fnmatch.fnmatchcase(n, p) for n in names))
        return next(fits, None)
