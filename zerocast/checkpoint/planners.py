"""SharePlanner: tells DCP which pieces a rank writes."""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from zerocast.checkpoint.boxes import Box, Share

Shares = Mapping[str, Share]
"""The part of each tensor that this rank has, by name."""


class SharePlanner(DefaultSavePlanner):
    """Plans to save :data:`Shares`."""

    def __init__(self, shares: Shares) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shares = shares

    def create_local_plan(self) -> SavePlan:
        """Return one item for each piece."""
        return SavePlan(
            [
                WriteItem(
                    MetadataIndex(name, box.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk_of(box), TensorProperties(share.dtype), torch.Size(share.shape)
                    ),
                )
                for name, share in self.shares.items()
                for box in share.pieces
            ]
        )

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the piece that an item is about."""
        return piece_of(self.shares, index)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP has it."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, a view."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def piece_of(shares: Shares, index: MetadataIndex) -> torch.Tensor:
    """Return the piece of :data:`Shares` that begins where an item of DCP says."""
    assert index.offset is not None
    pieces = shares[index.fqn].pieces
    return next(piece for box, piece in pieces.items() if box.offsets == tuple(index.offset))
