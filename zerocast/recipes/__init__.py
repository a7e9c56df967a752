"""How an amax becomes a scale: one scaling scheme a file, and the table of them."""

from zerocast.recipes.delayed_scaling import DelayedScaling
from zerocast.recipes.float8_block_scaling import Float8BlockScaling
from zerocast.recipes.float8_current_scaling import Float8CurrentScaling
from zerocast.recipes.float8_rowwise_scaling import Float8RowwiseScaling
from zerocast.recipes.format import Format, QParams
from zerocast.recipes.mxfp8_block_scaling import MXFP8BlockScaling
from zerocast.recipes.nvfp4_block_scaling import NVFP4BlockScaling
from zerocast.recipes.recipe import (
    NOMINAL_DTYPES,
    Buffers,
    BufferSpec,
    Recipe,
    Role,
    describe_recipe,
    reaches_across,
)

RECIPES: dict[str, type[Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "rowwise": Float8RowwiseScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
"""Every scheme, by the short name that command lines use."""

__all__ = [
    "NOMINAL_DTYPES",
    "RECIPES",
    "BufferSpec",
    "Buffers",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8RowwiseScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
    "Role",
    "describe_recipe",
    "reaches_across",
]
