"""Translates torchtitan's options: the recipe of each name, and the options that are refused."""

from __future__ import annotations

from zerocast import (
    Float8CurrentScaling,
    Float8RowwiseScaling,
    InputError,
    MXFP8BlockScaling,
    QParams,
    Recipe,
    UnsupportedError,
)
from zerocast.recipes import NAMED, as_recipe

_POWER_OF_2 = QParams(power_2_scale=True)

TORCHTITAN_RECIPES: dict[str, Recipe] = {
    "tensorwise": Float8CurrentScaling(),
    # These are recipes of torchao, which rounds the scales of this one to powers of two.
    "rowwise": Float8RowwiseScaling(
        fp8_quant_fwd_inp=_POWER_OF_2,
        fp8_quant_fwd_weight=_POWER_OF_2,
        fp8_quant_bwd_grad=_POWER_OF_2,
    ),
    "mxfp8_cublas_rceil": MXFP8BlockScaling(),
    "mxfp8_rceil": MXFP8BlockScaling(),
}
"""Recipes by torchtitan's names. Only "rowwise" is also in ``zerocast.recipes.NAMED``; here it
has the meaning that it has in torchtitan."""

_MIXED = "it computes the gradient of the weight from operands in high precision"
_REFUSED = {
    "rowwise_with_gw_hp": f"{_MIXED}; 'rowwise' quantizes those as well",
    "mxfp8_rceil_wgrad_with_hp": f"{_MIXED}; 'mxfp8_rceil' quantizes those as well",
    "mxfp8_cublas": "it rounds scales down, and MXFP8 here rounds them up; 'mxfp8_cublas_rceil' is "
    "that scheme",
    "delayed": "torchtitan recomputes activations in the backward, without the scales of the "
    "forward; 'tensorwise' makes its scales from the tensors at hand",
}


def recipe_named(name: str) -> Recipe:
    """Return the recipe of a ``recipe_name``: a name of torchtitan, else a short name of zerocast.

    Raises:
        UnsupportedError: for a known name that is not supported.
        InputError: for an unknown name.
    """
    if name in _REFUSED:
        raise UnsupportedError(f"recipe_name={name!r} is not supported: {_REFUSED[name]}.")
    ours = {key: recipe for key, recipe in NAMED.items() if key not in _REFUSED}
    return as_recipe(name, names={**ours, **TORCHTITAN_RECIPES}, what="recipe_name")


def check_combination(*, gathers_codes: bool, precomputes: bool, weights_only: bool) -> None:
    """Raise if options contradict each other.

    Args:
        gathers_codes: ``enable_fsdp_float8_all_gather``.
        precomputes: ``precompute_float8_dynamic_scale_for_fsdp``.
        weights_only: ``weights_only``.

    Raises:
        InputError: for an option that would have no effect.
    """
    if precomputes and not gathers_codes:
        raise InputError(
            "precompute_float8_dynamic_scale_for_fsdp=True needs "
            "enable_fsdp_float8_all_gather=True: it casts the codes that FSDP2 will gather."
        )
    if weights_only and not gathers_codes:
        raise InputError(
            "weights_only=True needs enable_fsdp_float8_all_gather=True: without it nothing would "
            "be quantized."
        )
