"""FlatPlan: a CastPlan whose weights and masters lie in a few allocations, which it alone looks at.

Note: what may move unsaid
~~~~~~~~~~~~~~~~~~~~~~~~~~
Torch gives memory in two ways: to a tensor object (``.data = ...``, ``set_``, ``swap_tensors``), or
to a storage, and so to all of its tensors at once (``resize_``, ``share_memory_``,
``untyped_storage().resize_``). Nobody is told of either. A :class:`CastPlan` that was given tensors
of its caller's therefore looks at each of them in each call. Where nobody else has the tensor
objects, only storages can move, and of each storage one look at one tensor tells. So the host time
of such a plan is that of a few tensors, whatever the number of weights, if who makes it sees that

* all buffers of the weights lie in a few allocations (:func:`lay_together`, and
  ``replace_raw_data`` for codes). Users get aliases of them (:mod:`zerocast.tensors.weight_data`);
* masters are views that the maker keeps to itself;
* once a step, a weight that is no longer the one that the plan was made for (``Module.half``) is
  refused, and torch counts the write of weights and codes (``increment_version``), so that a
  backward which saved one of them is an error.

The third takes one short look at each weight, like the step of an optimizer that it belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from zerocast.cast.plan import CastPlan
from zerocast.layout import round_up
from zerocast.tensors import QuantizedStorage

ALIGNMENT = 256
"""Bytes between the places of tensors in an allocation: no less than torch's own alignment."""


class FlatPlan(CastPlan):
    """A plan for makers who see to what the note above lists; the arguments are its base's."""

    _is_flat = True

    @property
    def casts(self) -> int:
        """The number of casts that have written weights: all of their writes but others'."""
        return self._version.ticks


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
