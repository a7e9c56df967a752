"""AutocastLinear: a layer that opens a region of autocast around itself.

The note in :mod:`zerocast.integrations.torchtitan.options` says why.
"""

from __future__ import annotations

import logging

import torch

from zerocast.comm import SingleRank
from zerocast.errors import InputError
from zerocast.nn import Linear
from zerocast.nn.autocast import autocast, text_of
from zerocast.nn.regions import UNTRACEABLE
from zerocast.recipes import Recipe
from zerocast.sharded import precompute_scales_for_fsdp

logger = logging.getLogger(__name__)

_NO_AMAXES = SingleRank()
"""Over whom regions reduce amaxes: nobody, for no scheme that is served remembers any."""


class AutocastLinear(Linear):
    """:class:`zerocast.nn.Linear`, inside and outside of any region.

    Attributes:
        product_recipe: by which its products are quantized; None for products in high precision,
            with the decoded weight where that was gathered in codes.
    """

    product_recipe: Recipe | None = None

    def forward(self, input: torch.Tensor, *, fp8_output: bool = False) -> torch.Tensor:
        """[..., K] -> [..., M], as :meth:`zerocast.nn.Linear.forward`."""
        if self.product_recipe is None:
            return super().forward(input, fp8_output=fp8_output)
        if torch.compiler.is_compiling() and self._traced_recipe() != UNTRACEABLE:
            return super().forward(input, fp8_output=fp8_output)
        with autocast(recipe=self.product_recipe, amax_reduction_group=_NO_AMAXES):
            return super().forward(input, fp8_output=fp8_output)

    def _traced_recipe(self) -> str:
        """A compiled checkpoint cannot enter regions, so the graph has the recipe itself."""
        recipe = self.product_recipe
        return super()._traced_recipe() if recipe is None else text_of(recipe)

    def get_extra_state(self) -> None:
        """Nothing: torchtitan takes every entry of a state dict for a tensor. So where gradients
        are rounded stochastically, their draws are counted from 0 again on resuming.
        """


def product_recipe(recipe: Recipe, fqn: str, out_features: int) -> Recipe | None:
    """``recipe``, for the products of the layer ``fqn``; None, with a line in the log, where it
    cannot hold the gradient of the output though it can hold the weight.
    """
    try:
        recipe.for_role("grad_output").check_shape((1, out_features))
    except InputError:
        logger.info(
            "%s: its products stay in high precision; %s cannot hold the gradient of its output, "
            "[..., %d]",
            fqn,
            type(recipe).__name__,
            out_features,
        )
        return None
    return recipe


def precompute(model_parts: torch.nn.Module | list[torch.nn.Module]) -> None:
    """After a step of the optimizer: one all-reduce for the scales of each part of the model that
    gathers codes.
    """
    for part in [model_parts] if isinstance(model_parts, torch.nn.Module) else model_parts:
        if any(isinstance(m, AutocastLinear) and m.low_bit_all_gather for m in part.modules()):
            precompute_scales_for_fsdp(part)
