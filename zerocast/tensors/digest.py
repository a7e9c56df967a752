"""digest: a number that changes with the bytes of a tensor, computed where the tensor is.

It tells, without a copy, whether memory was written in a way that torch does not see, whether ranks
hold the same bytes, and whether changes have arrived. It does not protect against bytes that were
chosen to have a given digest. "Digests" in docs/NUMERICS.md defines it; as it is a sum over
halfwords, ranks add those of their shards, and a change adds what it changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from zerocast.backends import backend_for
from zerocast.numerics import DigestedBytes


class TakenDigests:
    """Digests that a launch takes of bytes that it reads anyway.

    Args:
        ranges: for each the address of its tensor, and of the bytes of this the first and the end;
            None where no digest is taken.

    Attributes:
        sums: int64 [len(ranges)], on the CPU: the digests, of the latest launch.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int] | None]) -> None:
        self.ranges = ranges
        with torch.inference_mode(False):
            self.sums = torch.zeros(len(ranges), dtype=torch.int64, device="cpu")

    def clear(self) -> None:
        """Make all sums 0."""
        clear_sums(self.sums)


def clear_sums(sums: torch.Tensor) -> None:
    """Make the sums of digests 0, int64 and contiguous."""
    if sums.is_cpu:
        # Where a cast has driven the code of torch out of the caches, its fill takes 20 us.
        ctypes.memset(sums.data_ptr(), 0, sums.nbytes)
    else:
        sums.zero_()


def digest(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the digest of ``tensor``, a plain tensor of any dtype: int64 [] on its device. It is
    that of the bytes in the order of elements, the first of which is element ``start`` of the whole
    tensor. Shape and dtype do not enter.
    """
    return each_digest([tensor], [start])[0]


def each_digest(
    tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the digest of each tensor in one launch, int64 [len(tensors)]; all on one device, and
    at least one.
    """
    return RepeatedDigests(tensors, starts).take()


class RepeatedDigests:
    """The digests of tensors that stay where they are, of which the launch is prepared once.

    Args:
        tensors, starts: as for :func:`each_digest`; a tensor that is not contiguous is copied here.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
    ) -> None:
        device = tensors[0].device
        self._sums = torch.empty(len(tensors), dtype=torch.int64, device=device)
        ranges = [
            DigestedBytes(tensor.detach().contiguous(), start * tensor.itemsize)
            for tensor, start in zip(tensors, starts or [0] * len(tensors), strict=True)
        ]
        self._launch = backend_for(device).digest(ranges, self._sums)

    def take(self) -> torch.Tensor:
        """Return the digest of each tensor as it is, int64 [len(tensors)], until the next call."""
        clear_sums(self._sums)
        self._launch()
        return self._sums


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digest of each of ``tensors``, on any devices. Those of one device are read
    together, because on a GPU each reading would wait.
    """
    given = list(tensors)
    found = [0] * len(given)
    for device in {tensor.device for tensor in given}:
        places = [i for i, tensor in enumerate(given) if tensor.device == device]
        for i, value in zip(places, each_digest([given[i] for i in places]).tolist(), strict=True):
            found[i] = value
    return found
