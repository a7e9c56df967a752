"""The all-gather of codes, right for every partition.

Rank r's chunk is the bytes of its shards, weight by weight in the plan's order; chunks follow each
other in rank order. Where the weights' codes already lie in memory like that (views into one flat
buffer that ranks own range by range, as ZeRO optimizers keep them) the gather runs there in place:
nothing is copied in or out. Otherwise the chunks are put into a staging buffer and are stored from
there, nibble by nibble where two ranks share a byte (see "Note: shared bytes" in
:mod:`zerocast.formats.packing`). The same bytes travel either way, so ranks need not agree on which
it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.formats import byte_span, store_span
from zerocast.layout import Extent, Owners

PLANES = ("rowwise_data", "columnwise_data")
"""The codes that are gathered; columnwise ones where a recipe quantizes them independently."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One rank's bytes of one weight: ``staged`` is their range in the staging buffer."""

    rank: int
    weight: int
    extent: Extent
    first: int
    last: int
    staged: slice


def code_gathers(
    specs: Sequence[ShardSpec],
    members: Mapping[Communicator, Sequence[int]],
    owners: Mapping[Communicator, Owners],
) -> list[CodeGather]:
    """The gathers of all planes of all groups.

    Args:
        specs: the weights.
        members: by group the places of its weights.
        owners: by group those of its members.
    """
    return [
        CodeGather(comm, [specs[i] for i in indices], owners[comm], plane)
        for comm, indices in members.items()
        for plane in PLANES
        if any(plane in specs[i].storage.gathered for i in indices)
    ]


class CodeGather:
    """Gathers one plane of codes of one group's weights.

    Args:
        comm: the group.
        specs: the group's weights as this rank sees them; those that do not gather this plane
            are passed over.
        owners: of the group's weights.
        plane: one of :data:`PLANES`.
    """

    def __init__(
        self,
        comm: Communicator,
        specs: Sequence[ShardSpec],
        owners: Owners,
        plane: str,
    ) -> None:
        self._comm = comm
        self._specs = specs
        self._plane = plane
        self._chunks: list[_Chunk] = []
        self._counts = [0] * comm.size
        self._codes = [spec.storage.buffers.get(plane) for spec in specs]
        gathers = [plane in spec.storage.gathered for spec in specs]
        offset = 0
        for i, rank, start, end in owners.by_rank():
            if gathers[i]:
                first, last = byte_span(specs[i].storage.recipe.numerics.fmt, start, end)
                staged = slice(offset, offset + last - first)
                self._chunks.append(_Chunk(rank, i, Extent(start, end), first, last, staged))
                self._counts[rank] += last - first
                offset = staged.stop

    def look(self) -> None:
        """Find the weights' codes where they lie now. Those that a rank has dropped since the cast
        are gathered as ever, for the other ranks' sake.
        """
        for i, spec in enumerate(self._specs):
            codes = spec.storage.buffers.get(self._plane)
            if codes is not None:
                self._codes[i] = codes

    def run(self) -> None:
        """Make every rank hold the codes of all of them."""
        self.start()()

    def start(self) -> Callable[[], None]:
        """Begin :meth:`run`; what is returned ends it, and is called once. Weights without codes of
        their own may be given buffers for them in between.
        """
        self.look()
        in_place = self._contiguous_codes() if self._chunks else None
        if in_place is not None:
            return self._comm.start_all_gather_(in_place, self._counts)
        staging = torch.empty(
            sum(self._counts), dtype=torch.uint8, device=self._specs[0].storage.device
        )
        for chunk in self._chunks:
            if chunk.rank == self._comm.rank:
                codes = self._specs[chunk.weight].own_codes(self._plane)
                staging[chunk.staged] = (
                    self._flat(chunk.weight)[chunk.first : chunk.last] if codes is None else codes
                )
        wait = self._comm.start_all_gather_(staging, self._counts) if self._chunks else None
        return functools.partial(self._store, staging, wait)

    def _store(self, staging: torch.Tensor, wait: Callable[[], None] | None) -> None:
        """Store what ``staging`` holds after the wait, but for what stands there already."""
        if wait is not None:
            wait()
        self.look()
        for chunk in self._chunks:
            spec = self._specs[chunk.weight]
            if chunk.rank != self._comm.rank or self._plane in spec.codes:
                fmt = spec.storage.recipe.numerics.fmt
                store_span(
                    fmt,
                    self._flat(chunk.weight),
                    staging[chunk.staged],
                    chunk.extent.start,
                    chunk.extent.end,
                )

    def _flat(self, weight: int) -> torch.Tensor:
        codes = self._codes[weight]
        if codes is None:
            raise InputError(
                f"{self._specs[weight].name} must hold {self._plane} to receive the gathered "
                "codes, and was made without; gather fsdp_shard_model_weights by yourself."
            )
        return codes.view(-1)

    def _contiguous_codes(self) -> torch.Tensor | None:
        """The codes as one flat tensor in gather order, where that is how they lie in memory."""
        if any(self._plane in spec.codes for spec in self._specs):
            return None
        head = self._flat(self._chunks[0].weight)
        base = head.data_ptr() + self._chunks[0].first
        for chunk in self._chunks:
            codes = self._flat(chunk.weight)
            if codes.untyped_storage().data_ptr() != head.untyped_storage().data_ptr():
                return None
            # This also tells a shared byte: it stands in two chunks, but once in memory.
            if codes.data_ptr() + chunk.first != base + chunk.staged.start:
                return None
        return head.as_strided(
            (sum(self._counts),), (1,), head.storage_offset() + self._chunks[0].first
        )
