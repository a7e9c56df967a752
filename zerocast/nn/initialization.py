"""How a layer's parameters start, and come to hold codes when the layer is made."""

from __future__ import annotations

import math

import torch

from zerocast.arguments import check_device, check_dtype, check_flag, check_shape
from zerocast.nn.model_init import current_model_init
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor, quantize


def quantized_parameter(
    weight: torch.Tensor,
    recipe: Recipe | str,
    *,
    columnwise: bool = True,
    keep_init_val: bool = True,
    name: str | None = None,
) -> torch.nn.Parameter:
    """``weight`` quantized; its present value is kept, on the CPU, for an optimizer's masters.

    Of a weight on the meta device that is the value which is copied into it once it has memory.
    ``name`` is what the random words of stochastic rounding depend on.

    Raises:
        InputError: where the recipe cannot hold it.
    """
    quantized = quantize(weight, recipe, columnwise=columnwise, name=name)
    if weight.is_meta:
        quantized.quantized_storage.keeps_source = keep_init_val
    elif keep_init_val:
        value = weight.detach().to("cpu", copy=True).contiguous()
        quantized.quantized_storage.high_precision_init_val = value
    return torch.nn.Parameter(quantized, weight.requires_grad)


def quantized_if_asked(
    weight: torch.Tensor, recipe: Recipe | str | None, *, columnwise: bool = True
) -> torch.Tensor:
    """``weight`` quantized by ``recipe``, or by that of :func:`zerocast.model_init`; where there is
    neither, itself.

    What a weight was quantized from is kept where a layer was given its recipe, and inside
    ``model_init`` where that was asked to.
    """
    if recipe is not None:
        return quantized_parameter(weight, recipe, columnwise=columnwise)
    asked = current_model_init()
    if not asked.enabled or asked.recipe is None:
        return weight
    return quantized_parameter(
        weight,
        asked.recipe.for_role("weight"),
        columnwise=columnwise,
        keep_init_val=asked.preserve_high_precision_init_val,
    )


def reset_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Draw weight [M, K] and bias [M] anew, as ``torch.nn.Linear`` does; a quantized weight is
    quantized.
    """
    if isinstance(weight, QuantizedTensor):
        fresh = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        torch.nn.init.kaiming_uniform_(fresh, a=math.sqrt(5))
        with torch.no_grad():
            weight.copy_(fresh)
    else:  # in place, for it may be sharded
        torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] else 0
        torch.nn.init.uniform_(bias, -bound, bound)


def check_linear(
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise :class:`InputError` where no linear layer can be made of these."""
    check_shape("in_features and out_features", (in_features, out_features))
    check_flag("bias", bias)
    check_device("device", device)
    check_dtype("dtype", dtype)


def linear_parameters(
    in_features: int,
    out_features: int,
    bias: bool,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> tuple[torch.nn.Parameter, torch.nn.Parameter | None]:
    """Weight [M, K] and bias [M], or None, as ``torch.nn.Linear`` starts them."""
    check_linear(in_features, out_features, bias, device, dtype)
    parameters = torch.nn.Linear(
        in_features, out_features, bias, device=device, dtype=dtype
    )._parameters
    weight = parameters["weight"]
    assert weight is not None
    return weight, parameters["bias"]
