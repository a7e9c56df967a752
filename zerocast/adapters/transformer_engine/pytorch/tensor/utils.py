"""The cast of sharded masters, with TransformerEngine's defaults."""

from collections.abc import Sequence

import torch

import zerocast
from zerocast import post_all_gather_processing, replace_raw_data
from zerocast.comm import Group

__all__ = [
    "cast_master_weights_to_fp8",
    "post_all_gather_processing",
    "quantize_master_weights",
    "replace_raw_data",
]


def quantize_master_weights(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Group,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = False,
) -> None:
    """Call :func:`zerocast.quantize_master_weights` with TransformerEngine's default: unless
    ``manual_post_all_gather_processing=True``, the next forward makes the columnwise copies.
    """
    zerocast.quantize_master_weights(
        model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
        manual_post_all_gather_processing,
    )  # fmt: skip


cast_master_weights_to_fp8 = quantize_master_weights
"""TransformerEngine's earlier name; it accepts weights of every scheme, as there."""
