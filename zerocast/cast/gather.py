"""The all-gather of codes, right for every partition.

Rank r's part is the bytes of its shards, weight by weight in the plan's order; parts follow each
other in rank order. Where the weights' codes already lie in memory like that (views into one flat
buffer that ranks own range by range, as ZeRO optimizers keep them) the gather runs there in place:
nothing is copied in or out. Otherwise the parts meet in a staging buffer and are stored from there,
nibble by nibble where two ranks share a byte (see "Note: shared bytes" in
:mod:`zerocast.formats.packing`). The same bytes travel either way, so ranks need not agree on which
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zerocast.cast.request import ShardRequest
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.formats import byte_span, store_span
from zerocast.layout import Extent

PLANES = ("rowwise_data", "columnwise_data")
"""The codes that are gathered; columnwise ones where a recipe quantizes them independently."""


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's bytes of one weight: ``staged`` is their range in the staging buffer."""

    rank: int
    weight: int
    extent: Extent
    first: int
    last: int
    staged: slice


class CodeGather:
    """Gathers one plane of codes of one group's weights.

    Args:
        comm: the group.
        requests: the group's weights as this rank sees them; those that do not gather this plane
            are passed over.
        extents: int64 [size, weights, 2], who owns what.
        plane: one of :data:`PLANES`.
    """

    def __init__(
        self,
        comm: Communicator,
        requests: Sequence[ShardRequest],
        extents: torch.Tensor,
        plane: str,
    ) -> None:
        self._comm = comm
        self._requests = requests
        self._plane = plane
        self._parts: list[_Part] = []
        self._counts: list[int] = []
        self._codes = [request.storage.buffers.get(plane) for request in requests]
        offset = 0
        for rank, owned in enumerate(extents.tolist()):
            begin = offset
            for i, (start, end) in enumerate(owned):
                if plane not in requests[i].storage.gathered:
                    continue
                first, last = byte_span(requests[i].storage.recipe.law.fmt, start, end)
                if last > first:
                    staged = slice(offset, offset + last - first)
                    self._parts.append(_Part(rank, i, Extent(start, end), first, last, staged))
                    offset = staged.stop
            self._counts.append(offset - begin)

    def look(self) -> None:
        """Find the weights' codes where they lie now. Those that a rank has dropped since the cast
        are gathered as ever, for the other ranks' sake.
        """
        for i, request in enumerate(self._requests):
            codes = request.storage.buffers.get(self._plane)
            if codes is not None:
                self._codes[i] = codes

    def run(self) -> None:
        """Make every rank hold the codes of all of them."""
        if not self._parts:
            return
        self.look()
        in_place = self._contiguous_codes()
        if in_place is not None:
            self._comm.all_gather_(in_place, self._counts)
            return
        staging = torch.empty(
            sum(self._counts), dtype=torch.uint8, device=self._requests[0].storage.device
        )
        mine = [part for part in self._parts if part.rank == self._comm.rank]
        for part in mine:
            codes = self._requests[part.weight].own_codes(self._plane)
            staging[part.staged] = (
                self._flat(part.weight)[part.first : part.last] if codes is None else codes
            )
        self._comm.all_gather_(staging, self._counts)
        for part in self._parts:
            request = self._requests[part.weight]
            if part.rank != self._comm.rank or self._plane in request.codes:
                fmt = request.storage.recipe.law.fmt
                store_span(
                    fmt,
                    self._flat(part.weight),
                    staging[part.staged],
                    part.extent.start,
                    part.extent.end,
                )

    def _flat(self, weight: int) -> torch.Tensor:
        codes = self._codes[weight]
        if codes is None:
            raise InputError(
                f"{self._requests[weight].name} must hold {self._plane} to receive the gathered "
                "codes, and was made without; gather fsdp_shard_model_weights by yourself."
            )
        return codes.view(-1)

    def _contiguous_codes(self) -> torch.Tensor | None:
        """The codes as one flat tensor in gather order, where that is how they lie in memory."""
        if any(self._plane in request.codes for request in self._requests):
            return None
        head = self._flat(self._parts[0].weight)
        base = head.data_ptr() + self._parts[0].first
        for part in self._parts:
            codes = self._flat(part.weight)
            if codes.untyped_storage().data_ptr() != head.untyped_storage().data_ptr():
                return None
            # This also tells a shared byte: it stands in two parts, but once in memory.
            if codes.data_ptr() + part.first != base + part.staged.start:
                return None
        return head.as_strided(
            (sum(self._counts),), (1,), head.storage_offset() + self._parts[0].first
        )
