"""Checks that a scheme accepts a shape."""

from collections.abc import Sequence

from zerocast.errors import InputError
from zerocast.recipes.recipe import require_elements


def require_matrix(name: str, shape: Sequence[int], multiple: int, reason: str) -> None:
    """Raise :class:`InputError` unless ``shape`` is [M, K] with K a multiple of ``multiple``, for
    the ``reason`` given.
    """
    require_elements(name, shape, "shape [M, K]")
    if len(shape) != 2:
        raise InputError(
            f"{name} needs a 2-D weight [M, K], got shape {tuple(shape)}; reshape it to a matrix "
            "first."
        )
    if shape[1] % multiple:
        raise InputError(
            f"{name} needs K, the last dimension, to be a multiple of {multiple} ({reason}), got "
            f"K = {shape[1]} in shape {tuple(shape)}; pad the weight or leave it in high precision."
        )
