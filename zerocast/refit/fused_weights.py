"""Casts whole weights that a server fuses, for trainers that gather weights before the cast."""

from collections.abc import Mapping

import torch

from zerocast.cast import CastPlan
from zerocast.comm import SingleRank
from zerocast.export.dialects import Dialect, stored_name
from zerocast.tensors import empty


def encode_fused(
    weights: Mapping[str, torch.Tensor], dialect: Dialect
) -> dict[str, dict[str, torch.Tensor]]:
    """Cast whole matrices in one amax group, and return the stored tensors of each weight.

    The result maps the names of ``weights`` to dicts from names in the checkpoint to tensors.
    """
    dialects = {n: dialect.of_weight(n, None, value.shape) for n, value in weights.items()}
    cast = [
        empty(
            value.shape,
            dialects[name].recipe,
            dtype=value.dtype,
            device=value.device,
            columnwise=False,
        )
        for name, value in weights.items()
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
    return {
        name: {
            stored_name(name, part): tensor
            for part, tensor in dialects[name].encode(weight.quantized_storage).items()
        }
        for name, weight in zip(weights, cast, strict=True)
    }
