"""digest: a checksum of the bytes of a tensor, computed on the tensor's device.

Without a copy, it detects writes that torch does not see, ranks that hold different bytes, and
changes that did not arrive. It does not protect against bytes chosen to have a given digest.
"Digests" in docs/numerics.md defines it. It is a sum over halfwords, so ranks add the digests of
their shards, and a change adds the digest of what it changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch

from zerocast.backends import backend_for
from zerocast.numerics import DigestedBytes


def digest(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return the digest of ``tensor``, a plain tensor of any dtype: int64 [] on its device.

    It covers the bytes in the order of elements; the first is element ``start`` of the whole
    tensor. It does not depend on shape and dtype.
    """
    return each_digest([tensor], [start])[0]


def each_digest(
    tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the digest of each tensor in one launch, int64 [len(tensors)].

    There must be at least one tensor, and all must be on one device.
    """
    return RepeatedDigests().of(tensors, starts)


class RepeatedDigests:
    """The repeated digests of some tensors; the launch is prepared again only if one has moved."""

    def __init__(self) -> None:
        self._addresses: list[int] | None = None

    def of(
        self, tensors: Sequence[torch.Tensor], starts: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return the digest of each tensor now, int64 [len(tensors)], valid until the next call.

        Args:
            tensors, starts: as for :func:`each_digest`; contiguous if they are given again.
        """
        addresses = list(map(torch.Tensor.data_ptr, tensors))
        if addresses != self._addresses:
            self._prepare(tensors, starts or [0] * len(tensors))
            self._addresses = addresses
        if self._sums.is_cpu:
            # After a cast has evicted torch's code from the CPU caches, its fill takes 20 us.
            ctypes.memset(self._sums.data_ptr(), 0, self._sums.nbytes)
        else:
            self._sums.zero_()
        self._launch()
        return self._sums

    @torch.inference_mode(False)  # a tensor made in it could not be written outside of it
    def _prepare(self, tensors: Sequence[torch.Tensor], starts: Sequence[int]) -> None:
        device = tensors[0].device
        self._sums = torch.empty(len(tensors), dtype=torch.int64, device=device)
        ranges = [
            DigestedBytes(tensor.detach().contiguous(), start * tensor.itemsize)
            for tensor, start in zip(tensors, starts, strict=True)
        ]
        self._launch = backend_for(device).digest(ranges, self._sums)


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digest of each of ``tensors``, on any devices.

    Those of one device are read together, because on a GPU each read waits.
    """
    given = list(tensors)
    found = [0] * len(given)
    for device in {tensor.device for tensor in given}:
        places = [i for i, tensor in enumerate(given) if tensor.device == device]
        for i, value in zip(places, each_digest([given[i] for i in places]).tolist(), strict=True):
            found[i] = value
    return found
