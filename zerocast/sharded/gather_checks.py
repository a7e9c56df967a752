"""What FSDP2 can be asked for that a gather in codes cannot serve: refused at the first gather.

Nothing tells a parameter how ``fully_shard`` was called before FSDP2 gathers it for the first time,
in the first forward. All ranks are told the same then, and raise the same before anything travels.
"""

from __future__ import annotations

import torch

from zerocast.errors import UnsupportedError
from zerocast.recipes import NOMINAL_DTYPES
from zerocast.sharded.dtensor import is_divided, keeps_a_part


def check_placement(name: str, weight: torch.Tensor) -> None:
    """Raise :class:`UnsupportedError` where FSDP2 cannot gather ``weight``, the parameter of a
    layer, in codes.
    """
    if not is_divided(weight):
        raise UnsupportedError(
            f"{name}: a low-bit all-gather needs a master that FSDP2 shards over the ranks, got "
            f"one that every rank holds whole; call torch.distributed.fsdp.fully_shard, or convert "
            f"with weights='quantized' or 'high_precision'."
        )
    if keeps_a_part(weight):
        raise UnsupportedError(
            f"{name}: after a forward torch's FSDP2 can keep all of a weight that was all-gathered "
            f"in codes, or this rank's rows, got an int for reshard_after_forward, by which it "
            f"would keep the rows of several ranks; give fully_shard True or False."
        )


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise :class:`UnsupportedError` where a quantized weight cannot present ``dtype``."""
    if dtype not in NOMINAL_DTYPES:
        raise UnsupportedError(
            f"{name}: a weight that is all-gathered in codes presents FP32, BF16 or FP16, got "
            f"{dtype}; give fully_shard a MixedPrecisionPolicy with such a param_dtype."
        )
