"""CopiedDigests: the digests of codes, taken while they are copied for an all-gather.

What ranks compare has to be read, and reading it once more from memory takes as long as a tenth of
a small cast and its gather. A gather that copies what a rank sends into a buffer, and what all have
sent out of it, has every byte in a register on the way: a digest taken there costs next to nothing.
So has a gather of ranks that copy large codes from each other where these stay: of threads, and of
processes of one node. What transports write there themselves, and what a rank itself has sent, is
read from memory, but for what derived copies are made of
(:class:`zerocast.tensors.post_gather.Rebuild`), and for what its cast has taken
(:class:`zerocast.tensors.cast_steps.CastDigests`).
Digests are sums, so those of what was copied and of the rest add up to that of the whole weight.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from zerocast.backends import backend_for
from zerocast.comm.communicator import PartCopies
from zerocast.numerics import CodeCopy, DigestedBytes
from zerocast.peer_memory import PeerBuffer
from zerocast.tensors.digest import TakenDigests, clear_sums

T = TypeVar("T")


class CopiedDigests(TakenDigests, Generic[T]):
    """A launch that copies codes, with the digests of those copies that have a ``first``.

    Args:
        copies: what is copied, on the host.
        prepare: makes the launch, given the sums that digests are added to.
    """

    def __init__(
        self, copies: Sequence[CodeCopy], prepare: Callable[[torch.Tensor], Callable[[T], None]]
    ) -> None:
        super().__init__([
            None
            if copy.first is None
            else (copy.codes.data_ptr() - copy.first, copy.first, copy.first + len(copy.codes))
            for copy in copies
        ])  # fmt: skip
        self._launch = prepare(self.sums)

    def __call__(self, buffer: T) -> None:
        """Copy into ``buffer``, or out of it."""
        self.clear()
        self._launch(buffer)


class CopiesInPlace(PartCopies):
    """What copies the parts of an all-gather whose codes stay where they are; see
    :meth:`zerocast.comm.Communicator.start_all_gather_by`.

    Args:
        ranges: of each rank the ranges of the buffer's bytes that it sends, and the place of the
            first in its weight's codes.

    Attributes:
        copied: the digests that the latest gather took on the way.
    """

    def __init__(self, ranges: Sequence[Sequence[tuple[slice, int]]]) -> None:
        self._ranges = ranges
        self.copied: list[TakenDigests] = []
        self._takes_digests = False
        self._address: int | None = None

    def begin(self, buffer: torch.Tensor, *, takes_digests: bool) -> CopiesInPlace | None:
        """Return what takes part in a gather of ``buffer``, uint8; nothing of a GPU's."""
        self.copied = []
        if not buffer.is_cpu:
            return None
        if (buffer.data_ptr(), takes_digests) != (self._address, self._takes_digests):
            self._address, self._takes_digests = buffer.data_ptr(), takes_digests
            self._buffer = buffer
            self._copies: dict[int, Callable[[Any], None]] = {}
        return self

    def copy(self, rank: int, theirs: torch.Tensor | PeerBuffer) -> None:
        launch = self._copies.get(rank)
        if launch is None:
            launch = self._copies[rank] = self._copy_of(rank, isinstance(theirs, PeerBuffer))
        launch(theirs)
        if isinstance(launch, CopiedDigests):
            self.copied.append(launch)

    def discard(self) -> None:
        self.copied = []

    def _copy_of(self, rank: int, is_of_process: bool) -> Callable[[Any], None]:
        buffer = self._buffer
        backend = backend_for(buffer.device)
        copies = [CodeCopy(buffer[at], at.start, first) for at, first in self._ranges[rank]]
        prepare: Callable[..., Callable[[Any], None]] = (
            partial(backend.read_codes, copies)
            if is_of_process
            else partial(backend.store_codes, copies, ())
        )
        return CopiedDigests(copies, prepare) if self._takes_digests else prepare()


class HeldDigests:
    """The digests of some tensors, step after step: launches, prepared again where one moved."""

    def __init__(self) -> None:
        self._addresses: list[int] | None = None
        self._taken: list[TakenDigests] = []

    def of(
        self, tensors: Sequence[torch.Tensor], taken: Sequence[TakenDigests] = ()
    ) -> torch.Tensor:
        """int64 [len(tensors)], on the CPU and until the next call: for each of ``tensors``,
        contiguous, on one device and at least one, its digest. What was ``taken``, just now,
        is not read again.
        """
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses or not _are_same(taken, self._taken):
            self._prepare(tensors, taken)
            self._addresses = addresses
        clear_sums(self._sums)
        self._digest()
        if self._read is not self._sums:
            self._read.copy_(self._sums)
        self._total()
        return self._totals

    def _prepare(self, tensors: Sequence[torch.Tensor], taken: Sequence[TakenDigests]) -> None:
        """Find what is left to be read beside what is ``taken``."""
        flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
        place_of = {tensor.data_ptr(): i for i, tensor in enumerate(flat) if len(tensor)}
        self._taken = list(taken)
        known: list[list[tuple[int, int]]] = [[] for _ in flat]
        parts = list[tuple[torch.Tensor, int]]()
        for launch in taken:
            for each, total in zip(launch.ranges, launch.sums[:, None], strict=True):
                at = None if each is None else place_of.get(each[0])
                # What is of no tensor, or was taken before, is passed over.
                if each is not None and at is not None and _insert(each[1:], known[at]):
                    parts.append((total, at))
        left = [
            (i, DigestedBytes(tensor[begin:end], begin))
            for i, (tensor, ranges) in enumerate(zip(flat, known, strict=True))
            for begin, end in _between(ranges, len(tensor))
        ]
        device = flat[0].device
        with torch.inference_mode(False):
            self._totals = torch.zeros(len(flat), dtype=torch.int64, device="cpu")
            self._sums = torch.zeros(len(left), dtype=torch.int64, device=device)
            self._read = self._sums.cpu()
        parts += zip(self._read[:, None], (at for at, _ in left), strict=True)
        self._digest = backend_for(device).digest([each for _, each in left], self._sums)
        self._total = backend_for(self._totals.device).total_digests(parts, self._totals)


def _between(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """What is left of ``size`` bytes outside of ``ranges``, which are in order."""
    begins, ends = [0, *(end for _, end in ranges)], [*(begin for begin, _ in ranges), size]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]


def _insert(new: tuple[int, int], ranges: list[tuple[int, int]]) -> bool:
    """Insert a range among others in their order, but where it overlaps one; return whether."""
    at = bisect(ranges, new)
    if any(begin < new[1] and new[0] < end for begin, end in ranges[max(0, at - 1) : at + 1]):
        return False
    ranges.insert(at, new)
    return True


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
