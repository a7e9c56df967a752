"""Quantizes the weights of Megatron-Core's linear layers."""

import fnmatch
from collections.abc import Sequence

import torch

from zerocast import InputError, Recipe
from zerocast.arguments import check_flag, check_module
from zerocast.nn import ConversionReport, convert
from zerocast.tensors.wrapped_names import named_modules


def quantize_linears(
    model: torch.nn.Module,
    recipe: Recipe | str,
    *,
    skip: Sequence[str] = (),
    first_last_layers_bf16: bool | None = None,
) -> ConversionReport:
    """Quantize the weights of Megatron-Core's column- and row-parallel linear layers.

    Each rank quantizes its part with separate scales, as TransformerEngine does. Attributes of the
    weights (``tensor_model_parallel``, ``partition_dim``, ...) are kept, and their current values
    are kept for the optimizer's masters. Layers multiply by the decoded weights.

    Args:
        model: modules of Megatron-Core, before ``DistributedDataParallel`` wraps them.
        recipe: the recipe of the weights, or its name. Weights hold rowwise codes only.
        skip: names of layers, or patterns with ``*`` and ``?``, that are not quantized.
        first_last_layers_bf16: whether to skip the first and last transformer layers, as many as
            their configuration has in ``num_layers_at_start_in_bf16`` and
            ``num_layers_at_end_in_bf16``. None for its ``first_last_layers_bf16``.

    Raises:
        InputError: for a wrong argument, or a name in ``skip`` that matches no layer. Nothing has
            been changed.
    """
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    check_module("model", model)
    if first_last_layers_bf16 is not None:
        check_flag("first_last_layers_bf16", first_last_layers_bf16)
    layers = [
        name
        for name, layer in named_modules(model)
        if isinstance(layer, ColumnParallelLinear | RowParallelLinear) and layer.weight is not None
    ]
    for pattern in skip:
        if not fnmatch.filter(layers, pattern):
            raise InputError(
                f"skip must name linear layers of the model, got {pattern!r}, which matches none "
                f"of {layers[:4]}{' ...' if len(layers) > 4 else ''}."
            )
    plain = {name for name in layers if any(fnmatch.fnmatchcase(name, each) for each in skip)}
    plain |= {name for name in layers if _is_at_an_end(model, name, first_last_layers_bf16)}
    chosen = [name for name in layers if name not in plain]
    return convert(model, recipe, filter_fqns=lambda *_: False, include=chosen)


def _is_at_an_end(model: torch.nn.Module, name: str, is_asked: bool | None) -> bool:
    """Return whether the layer is in a first or last transformer layer that is not quantized."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:end]))
        number, config = getattr(module, "layer_number", None), getattr(module, "config", None)
        is_layer = hasattr(module, "self_attention") or hasattr(module, "mixer")  # of Mamba
        if number is None or config is None or not is_layer:
            continue
        if not (config.first_last_layers_bf16 if is_asked is None else is_asked):
            return False
        last = config.num_layers - config.num_layers_at_end_in_bf16
        return bool(number <= config.num_layers_at_start_in_bf16 or number > last)
    return False
