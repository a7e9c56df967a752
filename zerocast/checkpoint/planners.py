"""DCP's planners over shares: which pieces a rank writes, and which parts of chunks it reads."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zerocast.checkpoint.boxes import Box, Share

Shares = Mapping[str, Share]
"""By name, what this rank has of each tensor."""


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
        return _piece(self.shares, index)


class ShareLoadPlanner(DefaultLoadPlanner):
    """Plans to fill the pieces of :data:`Shares`."""

    def __init__(self, shares: Shares, metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.shares, self.saved = shares, metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Return the items that fill every piece; a manifest has all elements of every tensor."""
        items: list[ReadItem] = []
        for name, share in self.shares.items():
            saved = self.saved[name]
            assert isinstance(saved, TensorStorageMetadata)
            chunks = [chunk_of(box) for box in share.pieces]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return LoadPlan(items)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the part of a piece that an item fills."""
        piece = _piece(self.shares, read_item.dest_index)
        return part_of(piece, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is the piece's own memory."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never called: there are none."""


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return a box as DCP has it."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def part_of(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a box of a tensor, a view."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _piece(shares: Shares, index: MetadataIndex) -> torch.Tensor:
    assert index.offset is not None
    pieces = shares[index.fqn].pieces
    return next(piece for box, piece in pieces.items() if box.offsets == tuple(index.offset))
