"""MasterShards: this rank's shard of the values that are cast, of each weight of an export."""

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.export.entries import (
    ExportSource,
    Shard,
    StoredParameter,
    not_rows,
    own_rows,
    planned_weights,
)
from zerocast.layout import Extent
from zerocast.optim import ZeroOptimizer
from zerocast.sharded.placement import is_sharded
from zerocast.tensors import QuantizedTensor


class MasterShards:
    """The masters of an export.

    Args:
        source: the model, optimizer or plan that is exported.
        optimizer: the optimizer that holds the masters; None if there is none.
        from_masters: whether weights in codes are cast from their masters.
        comm: the ranks of the export.
    """

    def __init__(
        self,
        source: ExportSource,
        optimizer: ZeroOptimizer | None,
        from_masters: bool,
        comm: Communicator,
    ) -> None:
        self._planned, self._from_masters = planned_weights(source), from_masters
        self._optimizer, self._comm = optimizer, comm

    def of_codes(self, name: str, weight: torch.Tensor) -> Shard | None:
        """Return the shard of the master of a quantized ``weight``; None if the bytes of ``weight``
        are exported.
        """
        if not isinstance(weight, QuantizedTensor):
            raise not_rows(name, "a DTensor of codes")
        if not self._from_masters:
            return None
        if name in self._planned:
            return self._planned[name][1]
        if self._optimizer is None:
            raise InputError(
                f"from_masters=True needs optimizer=, the ZeroOptimizer that holds the master of "
                f"{name}; or leave it out, to export the bytes of the weight."
            )
        return Shard(*self._optimizer.local_master(weight), self._optimizer.comm)

    def of_plain(self, name: str, weight: torch.Tensor) -> Shard:
        """Return the part of an unquantized ``weight`` that this rank casts. It is its rows under
        FSDP2, its shard of the optimizer's master if there is one, else an equal share.
        """
        if is_sharded(weight):
            return own_rows(name, weight)
        if self._optimizer is not None and weight.requires_grad:
            return Shard(*self._optimizer.local_master(weight), self._optimizer.comm)
        size, rank = self._comm.size, self._comm.rank
        extent = Extent(weight.numel() * rank // size, weight.numel() * (rank + 1) // size)
        if isinstance(weight, StoredParameter):
            return Shard(None, extent, self._comm, weight.read)
        values = weight.detach().reshape(-1)[extent.start : extent.end]
        return Shard(values if extent else None, extent, self._comm)
