"""Many tensors in one allocation, so that one look at one of them tells whether they have moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from zerocast.layout import round_up
from zerocast.tensors.storage import QuantizedStorage

ALIGNMENT = 256
"""Bytes between the places of tensors in an allocation: no less than torch's own alignment."""


def allocate_together(
    sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Return zeros of ``sizes`` elements each, flat, in one allocation."""
    nbytes = [size * dtype.itemsize for size in sizes]
    ends = list(itertools.accumulate(round_up(n, ALIGNMENT) for n in nbytes))
    whole = torch.zeros(ends[-1] if ends else 0, dtype=torch.uint8, device=device)
    starts = [0, *ends]
    return [whole[at : at + n].view(dtype) for at, n in zip(starts, nbytes, strict=False)]


def lay_together(storages: Iterable[QuantizedStorage]) -> None:
    """Move the buffers of weights on one device, but for those that a gather moves, into one
    allocation for all of a name, values kept: the columnwise copies of all weights go together, and
    their memory is given back together.
    """
    alike: dict[tuple[str, torch.dtype], list[QuantizedStorage]] = {}
    for storage in storages:
        for name in storage.buffers.keys() - set(storage.gathered):
            alike.setdefault((name, storage.buffers[name].dtype), []).append(storage)
    for (name, dtype), group in alike.items():
        old = [storage.buffers[name] for storage in group]
        new = allocate_together([each.numel() for each in old], dtype, group[0].device)
        for storage, source, place in zip(group, old, new, strict=True):
            storage.replace(name, place.view(source.shape).copy_(source))
