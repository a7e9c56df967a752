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
from zerocast.errors import InputError
from zerocast.recipes import Recipe, short_name
from zerocast.tensors import QuantizedTensor, rebuild_derived

_conversions = itertools.count()


def group_labels(
    model: torch.nn.Module,
    amax_groups: Groups,
    layers: Mapping[str, torch.Tensor | None],
    included: Container[torch.Tensor | None],
    recipes: Mapping[torch.Tensor, Recipe],
) -> dict[torch.Tensor, str]:
    """Return by weight the label of its group.

    Args:
        layers: the weights of layers that are converted, by the names that patterns match.
        included: the weights of other modules that are converted and can be in groups.
        recipes: those of all weights that are converted.

    Raises:
        InputError: for a wrong pattern, or a group whose weights have several recipes.
    """
    labels: list[tuple[torch.Tensor, str]] = []
    if not is_auto(amax_groups):
        found = amax_group_labels(amax_groups, list(layers))
        by_label: dict[str, dict[str, torch.Tensor]] = {}
        for (name, weight), label in zip(layers.items(), found, strict=True):
            if label is not None:
                by_label.setdefault(label, {})[name] = present(weight)
        for label, group in by_label.items():
            _one_recipe(group, recipes)
            labels += [(weight, label) for weight in group.values()]
    else:
        weights = set(layers.values())
        for i, fused in enumerate(fused_weights(model)):
            converted = {name: each for name, each in fused.items() if each in recipes}
            own = [each for each in converted.values() if each in weights or each in included]
            recipe = _one_recipe(converted, recipes)
            if recipe is None or not recipe.scales_tensor:
                continue
            if len({(each.dtype, each.device) for each in own}) == 1 < len(set(own)):
                labels += [(each, str(i)) for each in own]
    number = next(_conversions)
    return {weight: f"{number}, {label}" for weight, label in reversed(labels)}


def _one_recipe(
    group: Mapping[str, torch.Tensor], recipes: Mapping[torch.Tensor, Recipe]
) -> Recipe | None:
    """Return the recipe of the weights of a group; None if there are none.

    Raises:
        InputError: if they have several. A server that fuses them needs one.
    """
    by_recipe = {recipes[weight]: name for name, weight in group.items()}
    if len(by_recipe) > 1:
        got = " and ".join(f"{short_name(recipe)} for {name}" for recipe, name in by_recipe.items())
        raise InputError(
            f"weights that a server fuses, or that share an amax, need one recipe, got {got}; let "
            "one pattern in recipe fit them, or take them out of amax_groups, which is () for no "
            "groups."
        )
    return next(iter(by_recipe), None)


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
