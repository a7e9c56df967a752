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
    return RepeatedDigests().of(tensors, starts)


class RepeatedDigests:
    """The digests of some tensors, again and again: the launch is prepared once, and again where a
    tensor has moved.
    """

    def __init__(self) -> None:
        self._addresses: list[int] | None = None

    def of(
        self, tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the digest of each tensor as it is, int64 [len(tensors)], until the next call.

        Args:
            tensors, starts: as for :func:`each_digest`; contiguous where they are given again.
        """
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            self._prepare(tensors, starts or [0] * len(tensors))
            self._addresses = addresses
        if self._sums.is_cpu:
            # Where a cast has driven the code of torch out of the caches, its fill takes 20 us.
            ctypes.memset(self._sums.data_ptr(), 0, self._sums.nbytes)
        else:
            self._sums.zero_()
        self._launch()
        return self._sums

    @torch.inference_mode(False)  # what is made in it could not be written outside of it
    def _prepare(self, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        device = tensors[0].device
        self._sums = torch.empty(len(tensors), dtype=torch.int64, device=device)
        ranges = [
            DigestedBytes(tensor.detach().contiguous(), start * tensor.itemsize)
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        self._launch = backend_for(device).digest(ranges, self._sums)


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
