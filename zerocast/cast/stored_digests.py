"""StoredDigests: the digests of gathered codes, taken while they are stored.

What ranks compare has to be read, and reading it once more from memory takes as long as an eighth
of a small cast and its gather. Codes that were just stored are still in the caches. So a gather
whose ranks compare digests stores a piece, reads it there, and goes on with the next; digests are
sums, so those of the pieces and of what lay there before add up to that of the whole weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerocast.backends import backend_for
from zerocast.numerics import Backend, CodeCopy, DigestedBytes, Launch, LaunchOn, SharedByte

PIECE = 1 << 22
"""The most bytes that are stored before they are read: with the buffer that they come from, what
each of a few cores finds again in the cache that they share."""


class StoredDigests:
    """Stores what was gathered as ``backend.store_codes`` does, with digests.

    Args:
        backend: of the host, whose caches these are.
        copies: whole bytes.
        firsts: for each copy the place of its first byte in the codes of its weight.
        shared: bytes that two ranks share a nibble of; no digest is taken of them.

    Attributes:
        ranges: for each digest the address of the weight's codes, and the first byte and the end of
            what was stored of them.
    """

    def __init__(
        self,
        backend: Backend,
        copies: Sequence[CodeCopy],
        firsts: Sequence[int],
        shared: Sequence[SharedByte],
    ) -> None:
        pieces = [
            (CodeCopy(copy.codes[at : at + PIECE], copy.staged + at), first + at, copy, first)
            for copy, first in zip(copies, firsts, strict=True)
            for at in range(0, len(copy.codes), PIECE)
        ]
        self.ranges = [
            (copy.codes.data_ptr() - first, begin, begin + len(piece.codes))
            for piece, begin, copy, first in pieces
        ]
        batches: list[list[int]] = []
        room = 0
        for i, (piece, *_) in enumerate(pieces):
            room -= len(piece.codes)
            if room < 0:
                batches.append([])
                room = PIECE - len(piece.codes)
            batches[-1].append(i)
        self._sums = torch.zeros(len(pieces), dtype=torch.int64, device="cpu")
        self._batches: list[tuple[LaunchOn, Launch]] = []
        for batch in batches:
            codes = [DigestedBytes(pieces[i][0].codes, pieces[i][1]) for i in batch]
            store = backend.store_codes([pieces[i][0] for i in batch], ())
            sums = self._sums[batch[0] : batch[-1] + 1]
            self._batches.append((store, backend.digest(codes, sums)))
        self._store_shared = backend.store_codes((), shared)

    def __call__(self, buffer: torch.Tensor) -> None:
        """Store ``buffer``, what was gathered."""
        self._sums.zero_()
        for store, digest in self._batches:
            store(buffer)
            digest()
        self._store_shared(buffer)

    @property
    def numbers(self) -> list[int]:
        """For each of :attr:`ranges` the digest, of the latest store."""
        return self._sums.tolist()


class HeldDigests:
    """The digests of some tensors, step after step: launches, prepared again where one moved."""

    def __init__(self) -> None:
        self._addresses: list[int] | None = None
        self._stored: list[StoredDigests] = []

    def of(
        self, tensors: Sequence[torch.Tensor], stored: Sequence[StoredDigests] = ()
    ) -> list[int]:
        """For each of ``tensors``, contiguous, on one device and at least one, its digest modulo
        2^64. What was ``stored`` of them, just now, is not read again.
        """
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses or not _are_same(stored, self._stored):
            self._prepare(tensors, stored)
            self._addresses = addresses
        self._sums.zero_()
        self._launch()
        numbers = [0] * len(tensors)
        parts = [self._sums.tolist(), *(each.numbers for each in self._stored)]
        for places, digests in zip(self._places, parts, strict=True):
            for place, digest in zip(places, digests, strict=True):
                if place is not None:
                    numbers[place] = (numbers[place] + digest) % 2**64
        return numbers

    def _prepare(self, tensors: Sequence[torch.Tensor], stored: Sequence[StoredDigests]) -> None:
        """Find what is left to be read beside what is ``stored``."""
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        place_of = {tensor.data_ptr(): i for i, tensor in enumerate(flat) if len(tensor)}
        self._stored = list(stored)
        of_stored = [[place_of.get(base) for base, *_ in each.ranges] for each in stored]
        known: list[list[tuple[int, int]]] = [[] for _ in flat]
        for each, places in zip(stored, of_stored, strict=True):
            for (_, begin, end), place in zip(each.ranges, places, strict=True):
                if place is not None:
                    known[place].append((begin, end))
        left = [
            (i, DigestedBytes(tensor[begin:end], begin))
            for i, (tensor, ranges) in enumerate(zip(flat, known, strict=True))
            for begin, end in _between(sorted(ranges), len(tensor))
        ]
        with torch.inference_mode(False):
            self._sums = torch.zeros(len(left), dtype=torch.int64, device=flat[0].device)
        self._launch = backend_for(flat[0].device).digest([each for _, each in left], self._sums)
        self._places: list[list[int | None]] = [[i for i, _ in left], *of_stored]


def _between(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What is left of ``size`` bytes outside of ``ranges``, which are in order."""
    begins, ends = [0, *(end for _, end in ranges)], [*(begin for begin, _ in ranges), size]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
