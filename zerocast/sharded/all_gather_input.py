"""AllGatherInput: the codes and scales that one rank keeps of a weight between casts, and sends in
FSDP2's all-gathers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerocast.cast.shard_spec import ShardBuffers
from zerocast.comm import Communicator
from zerocast.layout import Extent
from zerocast.recipes import Recipe
from zerocast.sharded.row_shards import RowShards
from zerocast.sharded.scale_shards import ScaleShards
from zerocast.sharded.state import State
from zerocast.tensors import QuantizedStorage, TensorParallelShard


class CastShard(QuantizedStorage):
    """A weight as its cast finds it whose codes and scales go elsewhere: the tensor amax, the
    recipe's state, and the scale of a weight that has one.

    Attributes:
        device: where the codes and scales are.
        has_columnwise: whether columnwise codes are cast, too.
        has_scales: that scales are not missed here.
    """

    device: torch.device = torch.device("cpu")
    has_columnwise: bool = False
    has_scales: bool = True

    def matrix(self, index: int) -> CastShard:
        """Return matrix ``index`` of a stack."""
        found = super().matrix(index)
        matrix = CastShard(found.shape, found.dtype, found.recipe, found.buffers, found.tp_shard)
        matrix.device, matrix.has_columnwise = self.device, self.has_columnwise
        return matrix


class AllGatherInput:
    """The codes and scales of this rank's rows of one weight, or tensor-parallel shard.

    Args:
        shape: the shape of the whole weight, also if tensor parallelism splits it.
        recipe: the scheme.
        state: the recipe's.
        comm: the ranks that share the weight.
        dtype: the nominal dtype of the gathered weight.
        device: where codes and scales are.
        columnwise: whether the gathered weight has a columnwise copy.
        tp_shard: the part of the weight that this rank holds; None for all of it.

    Attributes:
        comm, dtype: as above.
        rows: who has which rows.
        scales: who makes and sends which scales.
        storage: the tensor amax and ``state``, and the scale of a weight that has one; no codes.
        sent: by gathered plane, uint8 [rows.sent_bytes]: the codes that this rank sends.
        casts: the number of casts.
    """

    def __init__(
        self,
        shape: torch.Size,
        recipe: Recipe,
        state: State,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
        *,
        columnwise: bool,
        tp_shard: TensorParallelShard | None,
    ) -> None:
        self.comm, self.dtype, self.casts = comm, dtype, 0
        shape = shape if tp_shard is None else tp_shard.shape
        self.rows = RowShards(shape, comm.size, recipe.numerics.fmt)
        self.scales = ScaleShards(self.rows, recipe, columnwise=columnwise, tp_shard=tp_shard)
        planes = recipe.planes(shape, columnwise=columnwise)
        gathered = [plane.codes_name for plane in planes if plane.is_gathered]
        # What is made after a gather is not held before it.
        left_out = {*gathered, *recipe.state}
        for plane in planes:
            if plane.is_derived or self.scales.planes:
                left_out.update(plane.buffers)
        buffers = {
            name: spec.allocate(device)
            for name, spec in recipe.buffers(shape, columnwise=columnwise).items()
            if name not in left_out
        }
        self.storage = CastShard(shape, dtype, recipe, buffers | state, tp_shard)
        self.storage.device, self.storage.has_columnwise = device, len(gathered) > 1
        self.sent = {
            plane: torch.zeros(self.rows.sent_bytes, dtype=torch.uint8, device=device)
            for plane in gathered
        }
        self._sent_scales = torch.zeros(self.scales.sent_bytes, dtype=torch.uint8, device=device)
        self._made_scales = self.scales.allocate_made(device)

    @property
    def owners(self) -> list[tuple[int, Extent]]:
        """The ranks that have elements, ascending, and which."""
        extents = [(rank, self.rows.extent(rank)) for rank in range(self.comm.size)]
        return [(rank, extent) for rank, extent in extents if extent]

    @property
    def own(self) -> ShardBuffers:
        """The buffers that this rank's cast fills: its part of what is sent, and the scales that
        every rank makes.
        """
        size = self.rows.code_bytes(self.comm.rank)
        return ShardBuffers(
            [codes[:size] for codes in self.sent.values()],
            self.scales.own(self._sent_scales, self._made_scales, self.comm.rank),
            self.scales.by_owner,
        )

    @property
    def all_gather_inputs(self) -> list[torch.Tensor]:
        """The tensors that this rank sends, each flat: codes plane by plane, and scales, if it
        sends any.
        """
        return [*self.sent.values(), *([self._sent_scales] if self.scales.sent_bytes else [])]

    def whole_scales(self, outputs: Sequence[torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
        """Return, by matrix and plane, one scale a block, from what was gathered."""
        gathered = outputs[-1] if self.scales.sent_bytes else None
        return self.scales.whole(gathered, self._made_scales)
