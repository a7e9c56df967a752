"""A recipe in a layer's state, as plain values: dictionaries, numbers and strings.

torch's functions for state dicts of sharded models take nothing else beside tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerocast.errors import InputError
from zerocast.recipes import RECIPES, QParams, Recipe

_CLASS = "class"


def recipe_to_values(recipe: Recipe) -> dict[str, Any]:
    """``recipe`` as the name of its class and its fields. A user's own function among them stays
    what it is.
    """
    values: dict[str, Any] = {_CLASS: type(recipe).__name__}
    for field in dataclasses.fields(recipe):
        value = getattr(recipe, field.name)
        values[field.name] = vars(value).copy() if isinstance(value, QParams) else value
    return values


def recipe_from_values(values: Mapping[str, Any]) -> Recipe:
    """The recipe that :func:`recipe_to_values` took apart.

    Raises:
        InputError: where its class is none of zerocast's.
    """
    classes = {cls.__name__: cls for cls in RECIPES.values()}
    name = values.get(_CLASS)
    if name not in classes:
        raise InputError(
            f"a saved layer must name one of the recipes {sorted(classes)}, got {name!r}; take its "
            f"'_extra_state' out of the state dict to start anew."
        )
    fields: dict[str, Any] = {
        key: QParams(**value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key != _CLASS
    }
    return classes[name](**fields)
