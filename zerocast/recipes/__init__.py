"""How an amax becomes a scale: one scaling scheme a file, and the table of them."""

from zerocast.recipes.float8_current_scaling import Float8CurrentScaling
from zerocast.recipes.nvfp4_block_scaling import NVFP4BlockScaling
from zerocast.recipes.recipe import NOMINAL_DTYPES, Buffers, BufferSpec, Recipe

RECIPES: dict[str, type[Recipe]] = {"nvfp4": NVFP4BlockScaling, "fp8": Float8CurrentScaling}
"""Every scheme, by the short name that command lines use."""

__all__ = [
    "NOMINAL_DTYPES",
    "RECIPES",
    "BufferSpec",
    "Buffers",
    "Float8CurrentScaling",
    "NVFP4BlockScaling",
    "Recipe",
]
