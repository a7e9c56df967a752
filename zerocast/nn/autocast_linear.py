"""AutocastLinear: a linear layer that needs no region of autocast around the model."""

from __future__ import annotations

import torch

from zerocast.comm import SingleRank
from zerocast.nn.autocast import autocast, text_of
from zerocast.nn.linear import Linear
from zerocast.nn.regions import UNTRACEABLE, is_traced
from zerocast.recipes import Recipe

_NO_AMAXES = SingleRank()
"""The group over which its regions reduce amaxes: no other rank, because a recipe that keeps any
cannot be served (delayed scaling)."""


class AutocastLinear(Linear):
    """:class:`zerocast.nn.Linear` that opens a region of autocast around itself.

    Attributes:
        product_recipe: the recipe by which its products are quantized; None for products in high
            precision, with the decoded weight if that was gathered in codes.
    """

    product_recipe: Recipe | None = None

    def forward(self, input: torch.Tensor, *, fp8_output: bool = False) -> torch.Tensor:
        """[..., K] -> [..., M], as :meth:`zerocast.nn.Linear.forward`."""
        if self.product_recipe is None:
            return super().forward(input, fp8_output=fp8_output)
        if is_traced() and self._traced_recipe() != UNTRACEABLE:
            return super().forward(input, fp8_output=fp8_output)
        with autocast(recipe=self.product_recipe, amax_reduction_group=_NO_AMAXES):
            return super().forward(input, fp8_output=fp8_output)

    def _traced_recipe(self) -> str:
        """Return the text of its own recipe: a compiled checkpoint cannot enter regions."""
        recipe = self.product_recipe
        return super()._traced_recipe() if recipe is None else text_of(recipe)

    def get_extra_state(self) -> None:
        """Return nothing: torchtitan takes every entry of a state dict for a tensor. So if
        gradients are rounded stochastically, their draws are counted from 0 again on resuming.
        """
