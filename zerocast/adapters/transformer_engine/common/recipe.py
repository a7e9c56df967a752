"""Recipes of zerocast, which have TransformerEngine's names, fields and defaults.

Fields must be given by name. ``NVFP4BlockScaling`` has ``disable_rht=True``, and refuses False.
This module adds methods such as ``nvfp4()`` to recipes and their classes, which return whether they
are of that kind of scaling.
"""

from typing import Any

from zerocast import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "QParams",
    "Recipe",
]


_SCHEMES = {
    "delayed": ("delayed",),
    "float8_current_scaling": ("current",),
    "float8_per_tensor_scaling": ("delayed", "current"),
    "float8_block_scaling": ("block",),
    "mxfp8": ("mxfp8",),
    "mxfp4": ("mxfp4",),
    "nvfp4": ("nvfp4",),
}


def _is_of(schemes: tuple[str, ...]) -> Any:
    def is_of(cls: type[Recipe]) -> bool:
        return cls.scheme in schemes

    is_of.__doc__ = f"Say whether this is a recipe of {' or '.join(schemes)} scaling."
    return classmethod(is_of)


for _name, _schemes in _SCHEMES.items():
    setattr(Recipe, _name, _is_of(_schemes))
