"""The recipes that have short names, and the conversion of ``recipe`` arguments to recipes."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from zerocast.arguments import did_you_mean, shown
from zerocast.errors import InputError, ZerocastError
from zerocast.layout import FULL
from zerocast.recipes.delayed_scaling import DelayedScaling
from zerocast.recipes.float8_block_scaling import Float8BlockScaling
from zerocast.recipes.float8_current_scaling import Float8CurrentScaling
from zerocast.recipes.float8_rowwise_scaling import Float8RowwiseScaling
from zerocast.recipes.format import Format, QParams
from zerocast.recipes.mxfp4_block_scaling import MXFP4BlockScaling
from zerocast.recipes.mxfp8_block_scaling import MXFP8BlockScaling
from zerocast.recipes.nvfp4_block_scaling import NVFP4BlockScaling
from zerocast.recipes.recipe import Recipe

RECIPES: dict[str, type[Recipe]] = {
    kind.scheme: kind
    for kind in (
        DelayedScaling,
        Float8CurrentScaling,
        Float8RowwiseScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
        MXFP4BlockScaling,
        NVFP4BlockScaling,
    )
}
"""Every scheme, by the short name for it with its default fields."""

_QUOTIENT = QParams(scale_formula="quotient")

NAMED: dict[str, Recipe] = {
    **{name: scheme() for name, scheme in RECIPES.items()},
    # Those of the checkpoints that servers load, whose names these are; FP8 divides as they do.
    "nvfp4-4over6": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "nvfp4-1x16": NVFP4BlockScaling(disable_2d_quantization=True),
    "nvfp4-4over6-1x16": NVFP4BlockScaling(nvfp4_4over6="weights", disable_2d_quantization=True),
    "fp8-tensor": Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_weight=_QUOTIENT),
    "fp8-channel": Float8RowwiseScaling(fp8_quant_fwd_weight=_QUOTIENT),
    "fp8-block": Float8BlockScaling(use_f32_scales=True, fp8_quant_fwd_weight=_QUOTIENT),
}
"""Every recipe that has a short name: the schemes with their default fields, and variants."""


def as_recipe(
    recipe: Recipe | str, *, names: Mapping[str, Recipe] | None = None, what: str = "recipe"
) -> Recipe:
    """Return the scheme that an argument means: itself, or the one of that name.

    Args:
        recipe: as it was given.
        names: the names that are known; those of :data:`NAMED` by default.
        what: the name of the argument.

    Raises:
        InputError: for an unknown name, or anything else; it lists the known names.
    """
    if isinstance(recipe, Recipe):
        return recipe
    names = NAMED if names is None else names
    if isinstance(recipe, str) and recipe in names:
        return names[recipe]
    known = ", ".join(map(repr, names))
    raise InputError(
        f"{what} must be a zerocast recipe such as NVFP4BlockScaling(), or the name of one "
        f"({known}), got {shown(recipe)}.{did_you_mean(recipe, names)}"
    )


def short_name(recipe: Recipe) -> str:
    """Return the text by which reports name a recipe: that of a variant is its short name."""
    names = (name for name, each in NAMED.items() if each == recipe and name not in RECIPES)
    return next(names, str(recipe))


def in_words(recipe: Recipe) -> str:
    """Return the format of a recipe's weights and what has a scale: "FP8, one scale a tensor"."""
    height, width = recipe.block
    what = "tensor" if height == FULL else "row" if width == FULL else f"{height}x{width} block"
    kind = type(recipe).__name__.removesuffix("Scaling").removesuffix("Block")
    kind = kind if kind.startswith(("NV", "MX")) else "FP8"
    kind += ", 4-over-6" if recipe.chooses_scales else ""
    return f"{kind}, one scale a {what}" + (
        ", of earlier casts" if recipe.casts_before_reduction else ""
    )


def recipe_from_text(text: str) -> Recipe:
    """Return the recipe whose :attr:`Recipe.text` this is.

    Raises:
        InputError: where no recipe has this text.
    """
    try:
        name, values = json.loads(text)
        kinds: dict[str, Any] = {kind.__name__: kind for kind in RECIPES.values()}
        fields = {key: QParams(**v) if isinstance(v, dict) else v for key, v in values.items()}
        recipe: Recipe = kinds[name](**fields)
    except ZerocastError:
        raise
    except Exception as error:  # a damaged text may make Python raise any of them
        raise InputError(
            f"a recipe's text must be one that Recipe.text gives, got {shown(text)}: "
            f"{type(error).__name__}: {error}."
        ) from error
    return recipe


def recipe_to_values(recipe: Recipe) -> dict[str, Any]:
    """Return ``recipe`` as JSON values: the name of its class, and the fields that may have another
    value; a user's own function is given by its name.
    """
    values: dict[str, Any] = {"class": type(recipe).__name__}
    for field in dataclasses.fields(recipe):
        if not field.repr:  # fixed: a field of TransformerEngine that has one value here
            continue
        value = getattr(recipe, field.name)
        if isinstance(value, QParams):
            value = vars(value)
        elif callable(value):
            value = getattr(value, "__qualname__", type(value).__qualname__)
        values[field.name] = value
    return json.loads(json.dumps(values))
