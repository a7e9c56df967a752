"""The amax groups of a conversion: which of the converted weights share a tensor amax.

Patterns name them, or they are those that servers are known to fuse
(:mod:`zerocast.cast.amax_groups`). A label is of one conversion: blocks of a model that are
converted one after the other have weights of the same names, and separate groups.
"""

import itertools
from collections.abc import Container, Mapping, Sequence

import torch

from zerocast.arguments import present
from zerocast.cast import CastPlan
from zerocast.cast.amax_groups import Groups, amax_group_labels, fused_weights, is_auto
from zerocast.comm import SingleRank
from zerocast.layout import Source
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor, rebuild_derived

_conversions = itertools.count()


def group_labels(
    model: torch.nn.Module,
    amax_groups: Groups,
    layers: Mapping[str, torch.Tensor | None],
    included: Container[torch.Tensor | None],
    recipe: Recipe,
) -> dict[torch.Tensor, str]:
    """Return by weight the label of its group.

    Args:
        layers: the weights of layers that are converted, by the names that patterns match.
        included: the weights of other modules that are converted and can be in groups.

    Raises:
        InputError: for a wrong pattern.
    """
    labels: list[tuple[torch.Tensor, str]] = []
    if not is_auto(amax_groups):
        found = amax_group_labels(amax_groups, list(layers))
        pairs = zip(layers.values(), found, strict=True)
        labels = [(present(weight), label) for weight, label in pairs if label is not None]
    elif recipe.scales_tensor and recipe.columnwise_source is not Source.TRANSPOSED_MASTER:
        weights = set(layers.values())
        for i, fused in enumerate(fused_weights(model)):
            own = [each for each in fused.values() if each in weights or each in included]
            if len({(each.dtype, each.device) for each in own}) == 1 < len(set(own)):
                labels += [(each, str(i)) for each in own]
    number = next(_conversions)
    return {weight: f"{number}, {label}" for weight, label in reversed(labels)}


def share_amaxes(weights: Sequence[QuantizedTensor]) -> None:
    """Cast those of ``weights`` that are in amax groups again from the same values, now with their
    groups' amaxes.
    """
    by_device: dict[torch.device, list[QuantizedTensor]] = {}
    for weight in weights:
        if not weight.is_meta and weight.quantized_storage.amax_group is not None:
            by_device.setdefault(weight.device, []).append(weight)
    for device, group in by_device.items():
        values = [weight.quantized_storage.high_precision_init_val for weight in group]
        masters = [None if v is None else v.to(device, torch.float32) for v in values]
        for weight in group:
            weight.recipe.rewind(weight.quantized_storage.buffers)  # the same cast, not one more
        CastPlan(group, masters, [0] * len(group), SingleRank()).cast()
        rebuild_derived([weight.quantized_storage for weight in group])
        for weight, value in zip(group, values, strict=True):
            weight.quantized_storage.high_precision_init_val = value
