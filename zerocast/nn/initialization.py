"""How a layer's weights come to hold codes when the layer is made."""

from __future__ import annotations

import torch

from zerocast.context import current_model_init
from zerocast.errors import InputError
from zerocast.recipes import Recipe
from zerocast.tensors import quantize


def quantized_parameter(
    weight: torch.Tensor, recipe: Recipe, *, columnwise: bool = True, keep_init_val: bool = True
) -> torch.nn.Parameter:
    """``weight`` quantized; its present value is kept, on the CPU, for an optimizer's masters.

    Raises:
        InputError: where it is on the meta device, or the recipe cannot hold it.
    """
    if weight.is_meta:
        raise InputError(
            "a quantized weight is made from its initial value, so its layer needs a device with "
            "memory, got 'meta'; build it on 'cpu' and move it."
        )
    quantized = quantize(weight, recipe, columnwise=columnwise)
    if keep_init_val:
        value = weight.detach().to("cpu", copy=True).contiguous()
        quantized.storage.high_precision_init_val = value
    return torch.nn.Parameter(quantized, weight.requires_grad)


def quantized_if_asked(
    weight: torch.nn.Parameter, *, columnwise: bool = True
) -> torch.nn.Parameter:
    """``weight`` quantized inside :func:`zerocast.model_init`, and itself elsewhere."""
    asked = current_model_init()
    if not asked.enabled or asked.recipe is None:
        return weight
    return quantized_parameter(
        weight,
        asked.recipe.for_role("weight"),
        columnwise=columnwise,
        keep_init_val=asked.preserve_high_precision_init_val,
    )
