"""Whole weights that a server fuses, cast together; for trainers that gather them first."""

from collections.abc import Mapping

import torch

from zerocast.cast import CastPlan
from zerocast.comm import SingleRank
from zerocast.export import Dialect
from zerocast.tensors import empty


def encode_fused(
    weights: Mapping[str, torch.Tensor], dialect: Dialect
) -> dict[str, dict[str, torch.Tensor]]:
    """Return, by name, what is stored of each of ``weights``, whole matrices, by the last part of
    its name; under NVFP4 they share a tensor amax.
    """
    cast = [
        empty(value.shape, dialect.recipe, dtype=value.dtype, device=value.device, columnwise=False)
        for value in weights.values()
    ]
    plan = CastPlan(
        cast,
        list(weights.values()),
        [0] * len(cast),
        SingleRank(),
        names=list(weights),
        amax_groups=[list(weights)],
    )
    plan.cast()
    stored = (dialect.encode(weight.quantized_storage) for weight in cast)
    return dict(zip(weights, stored, strict=True))
