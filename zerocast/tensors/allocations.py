"""Many tensors in one allocation, so that checking one of them detects whether they have moved."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from zerocast.layout import round_up
from zerocast.tensors.storage import QuantizedStorage

ALIGNMENT = 256
"""Bytes: the starts of tensors in an allocation are multiples; at least torch's own alignment."""


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
    """Move buffers of weights on one device into one allocation per name and dtype; keep values.

    Buffers that a gather moves are left out. The columnwise copies of all weights are then freed
    together.
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
