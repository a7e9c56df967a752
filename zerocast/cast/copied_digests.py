"""CopiedDigests: the digests of codes, taken while they are copied for an all-gather.

What ranks compare has to be read, and reading it once more from memory takes as long as a tenth of
a small cast and its gather. A gather that copies what a rank sends into a buffer, and what all have
sent out of it, has every byte in a register on the way: a digest taken there costs next to nothing.
So has a gather of threads, which copy large codes from each other where these stay, and find in a
cache what another is copying just now. What other transports write there is read from memory.
Digests are sums, so those of what was copied and of the rest add up to that of the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from zerocast.backends import backend_for
from zerocast.backends.launches import nothing
from zerocast.numerics import CodeCopy, DigestedBytes, LaunchOn


class CopiedDigests:
    """A launch that copies codes, with the digests of those copies that have a ``first``.

    Args:
        copies: what is copied, on the host.
        prepare: makes the launch, given the sums that digests are added to.

    Attributes:
        ranges: for each copy the address of its weight's codes, and the first byte and the end of
            what is copied of them; None where no digest is taken.
        sums: int64 [len(ranges)]: the digests, of the latest copy.
    """

    def __init__(
        self, copies: Sequence[CodeCopy], prepare: Callable[[torch.Tensor], LaunchOn]
    ) -> None:
        self.ranges = [
            None
            if copy.first is None
            else (copy.codes.data_ptr() - copy.first, copy.first, copy.first + len(copy.codes))
            for copy in copies
        ]
        with torch.inference_mode(False):
            self.sums = torch.zeros(len(copies), dtype=torch.int64, device="cpu")
        self._launch = prepare(self.sums)

    def __call__(self, buffer: torch.Tensor) -> None:
        """Copy into ``buffer``, or out of it."""
        self.sums.zero_()
        self._launch(buffer)


class CopiesInPlace:
    """What copies the parts of an all-gather whose codes stay where they are, for transports that
    have the other ranks' buffers (:meth:`zerocast.comm.Communicator.start_all_gather_by`). Others
    copy nothing, and take no digests.

    Args:
        rank: this rank, whose part is only read: while others copy it, it is in a cache.
        ranges: of each rank the ranges of the buffer's bytes that it sends, and the place of the
            first in its weight's codes.

    Attributes:
        copied: the digests that the latest gather took on the way.
    """

    def __init__(self, rank: int, ranges: Sequence[Sequence[tuple[slice, int]]]) -> None:
        self._rank, self._ranges = rank, ranges
        self.copied: list[CopiedDigests] = []
        self._prepared: tuple[int, bool] | None = None  # for a buffer's address
        self._launches: list[LaunchOn] = []

    def begin(self, buffer: torch.Tensor, *, takes_digests: bool) -> list[LaunchOn]:
        """Return by rank what copies its part into ``buffer``, uint8; nothing of a GPU's."""
        self.copied = []
        if not buffer.is_cpu:
            return []
        if self._prepared != (prepared := (buffer.data_ptr(), takes_digests)):
            ranks = range(len(self._ranges))
            self._launches = [self._launch(buffer, rank, takes_digests) for rank in ranks]
            self._prepared = prepared
        return [partial(self._copy, launch) for launch in self._launches]

    def _launch(self, buffer: torch.Tensor, rank: int, takes_digests: bool) -> LaunchOn:
        backend = backend_for(buffer.device)
        copies = [CodeCopy(buffer[at], at.start, first) for at, first in self._ranges[rank]]

        def prepare(*sums: torch.Tensor) -> LaunchOn:
            if rank != self._rank:
                return backend.store_codes(copies, (), *sums)
            own = [DigestedBytes(buffer[at], first) for at, first in self._ranges[rank]]
            digest = backend.digest(own, *sums) if sums else nothing
            return lambda _: digest()

        return CopiedDigests(copies, prepare) if takes_digests else prepare()

    def _copy(self, launch: LaunchOn, buffer: torch.Tensor) -> None:
        launch(buffer)
        if isinstance(launch, CopiedDigests):
            self.copied.append(launch)


class HeldDigests:
    """The digests of some tensors, step after step: launches, prepared again where one moved."""

    def __init__(self) -> None:
        self._addresses: list[int] | None = None
        self._copied: list[CopiedDigests] = []

    def of(
        self, tensors: Sequence[torch.Tensor], copied: Sequence[CopiedDigests] = ()
    ) -> torch.Tensor:
        """int64 [len(tensors)], on the CPU and until the next call: for each of ``tensors``,
        contiguous, on one device and at least one, its digest. What was ``copied`` of them, just
        now, is not read again.
        """
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses or not _are_same(copied, self._copied):
            self._prepare(tensors, copied)
            self._addresses = addresses
        self._sums.zero_()
        self._launch()
        parts = torch.cat([self._sums.cpu(), *self._copied_sums])
        self._all_numbers.zero_().index_add_(0, self._places, parts)
        return self._numbers

    def _prepare(self, tensors: Sequence[torch.Tensor], copied: Sequence[CopiedDigests]) -> None:
        """Find what is left to be read beside what is ``copied``."""
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        place_of = {tensor.data_ptr(): i for i, tensor in enumerate(flat) if len(tensor)}
        self._copied, self._copied_sums = list(copied), [each.sums for each in copied]
        of_copied = [
            [None if each is None else place_of.get(each[0]) for each in launch.ranges]
            for launch in copied
        ]
        known: list[list[tuple[int, int]]] = [[] for _ in flat]
        for launch, places in zip(copied, of_copied, strict=True):
            for each, place in zip(launch.ranges, places, strict=True):
                if each is not None and place is not None:
                    known[place].append(each[1:])
        left = [
            (i, DigestedBytes(tensor[begin:end], begin))
            for i, (tensor, ranges) in enumerate(zip(flat, known, strict=True))
            for begin, end in _between(sorted(ranges), len(tensor))
        ]
        # The last of the numbers is the sum of what belongs to no tensor.
        copied_to = [len(flat) if at is None else at for each in of_copied for at in each]
        all_places = [at for at, _ in left] + copied_to
        with torch.inference_mode(False):
            self._places = torch.tensor(all_places, dtype=torch.int64, device="cpu")
            self._all_numbers = torch.zeros(len(flat) + 1, dtype=torch.int64, device="cpu")
            self._numbers = self._all_numbers[:-1]
            self._sums = torch.zeros(len(left), dtype=torch.int64, device=flat[0].device)
        self._launch = backend_for(flat[0].device).digest([each for _, each in left], self._sums)


def _between(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What is left of ``size`` bytes outside of ``ranges``, which are in order."""
    begins, ends = [0, *(end for _, end in ranges)], [*(begin for begin, _ in ranges), size]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
