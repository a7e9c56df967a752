"""Recipes say how an amax becomes a scale: one scaling scheme a file, and the table of them."""

from zerocast.recipes.delayed_scaling import DelayedScaling
from zerocast.recipes.fields import describe_recipe, recipe_fields
from zerocast.recipes.float8_block_scaling import Float8BlockScaling
from zerocast.recipes.float8_current_scaling import Float8CurrentScaling
from zerocast.recipes.float8_rowwise_scaling import Float8RowwiseScaling
from zerocast.recipes.form import Form
from zerocast.recipes.format import NOMINAL_DTYPES, Format, QParams, check_nominal
from zerocast.recipes.mxfp4_block_scaling import MXFP4BlockScaling
from zerocast.recipes.mxfp8_block_scaling import MXFP8BlockScaling
from zerocast.recipes.named import (
    NAMED,
    RECIPES,
    as_recipe,
    in_words,
    recipe_from_text,
    recipe_to_values,
    short_name,
)
from zerocast.recipes.nvfp4_block_scaling import NVFP4BlockScaling
from zerocast.recipes.recipe import BufferSpec, Recipe, Role
