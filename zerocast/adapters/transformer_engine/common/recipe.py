"""Recipes: those of zerocast, which have TransformerEngine's names, fields and defaults.

Fields are given by name. ``NVFP4BlockScaling`` has ``disable_rht=True``, and refuses False.
"""

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
from zerocast.adapters.transformer_engine.missing import raise_missing

__getattr__ = raise_missing(__name__)

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
