"""The cast of whole weights as servers use them: those that they fuse, as one weight."""

from collections.abc import Mapping

import torch

import zerocast
from zerocast.comm import SingleRank
from zerocast.sharded.master_weight import as_plain

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""The layers of models of transformers that servers make one of, in the tests' models."""


def served_together(names: Mapping[str, object] | list[str]) -> list[list[str]]:
    """The sets of weights among ``names`` that servers fuse; those that peft adapts included, which
    are in a module's ``base_layer``.
    """
    stored = {name.replace(".base_layer", ""): name for name in names}
    found = []
    for name in stored:
        module, _, layer = name.removesuffix(".weight").rpartition(".")
        for fused in FUSED:
            if layer == fused[0]:
                together = [f"{module}.{each}.weight" for each in fused]
                found.append([stored[each] for each in together if each in stored])
    return found


def cast_as_served(
    masters: Mapping[str, torch.Tensor], recipe: zerocast.Recipe, dtype: torch.dtype
) -> dict[str, zerocast.QuantizedTensor]:
    """Cast whole matrices on one rank; those that servers fuse under one tensor amax."""
    if not masters:
        return {}
    weights = {
        name: zerocast.empty(
            value.shape, recipe, dtype=dtype, columnwise=recipe.columnwise_has_shards, name=name
        )
        for name, value in masters.items()
    }
    values = [as_plain(master) for master in masters.values()]
    plan = zerocast.CastPlan(
        list(weights.values()), values, [0] * len(weights), SingleRank(),
        names=list(weights), amax_groups=served_together(masters),
    )  # fmt: skip
    plan.cast()
    plan.post_all_gather_processing()
    return weights
