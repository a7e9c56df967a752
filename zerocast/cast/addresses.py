"""Addresses: where the memory lies that a plan reads and writes, and whether it has moved.

The launches of a plan hold addresses. Torch lets the same tensor object have other memory at any
time (``.data = ...``, ``set_``, ``resize_``, ``share_memory_``, ``Module.half``), and tells nobody.
So each cast looks once at all of them, which takes one call for each tensor.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from zerocast.arguments import why_unusable
from zerocast.cast.shard_spec import ShardSpec
from zerocast.errors import InputError
from zerocast.tensors import QuantizedStorage, QuantizedTensor, counted_by_torch

Lie = tuple[list[int], list[int], list[bool], list[torch.dtype]]
"""Addresses, numbers of elements, contiguity and dtypes of tensors."""


def lie_of(tensors: Sequence[torch.Tensor]) -> Lie:
    """How ``tensors`` lie in memory now; unequal where one of them has moved or changed."""
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.numel, tensors)),
        list(map(torch.Tensor.is_contiguous, tensors)),
        [tensor.dtype for tensor in tensors],
    )


class Addresses:
    """The addresses of the buffers of a plan's weights.

    Args:
        weights: as they were given to the plan, so that it is noticed where one of them becomes
            another weight.
        specs: the same, as checked.

    Attributes:
        written: what torch may save for a backward and a cast writes: the weights and their codes;
            nothing where the caller has promised that none of them is saved.
        is_trusting: whether only moves that are said (``replace_raw_data``) are looked for.

    Raises:
        InputError: where two weights share memory, or a buffer is not what the recipe says.
    """

    def __init__(self, weights: Sequence[QuantizedTensor], specs: Sequence[ShardSpec]) -> None:
        self._weights, self._specs = weights, specs
        self._storages = [shard_spec.storage for shard_spec in specs]
        kinds: dict[Any, Any] = {}  # weights that are alike have one between them
        copies = map(_copies, self._storages)
        self._copies = [kinds.setdefault(each, each) for each in copies]
        self.is_trusting = False
        self.look()

    def trust(self) -> None:
        """Look at tensors only where a move was said."""
        self.is_trusting = True
        self.written.clear()

    def look(self) -> None:
        """Take the buffers as they lie now."""
        for shard_spec in self._specs:
            _check_buffers(shard_spec)
            shard_spec.check_own_codes()
        self._move = QuantizedStorage.buffers_version
        self._buffers = [b for storage in self._storages for b in storage.buffers.values()]
        self._count = len(self._buffers)
        self._buffers += [
            codes for shard_spec in self._specs for codes in shard_spec.codes.values()
        ]
        codes = [buffer for storage in self._storages for buffer in storage.codes]
        self.written = [] if self.is_trusting else counted_by_torch([*self._weights, *codes])
        self._pointers = list(map(torch.Tensor.data_ptr, self._buffers))
        self._ranges = _disjoint(self._specs)
        self._starts = [start for start, *_ in self._ranges]

    def have_moved(self) -> bool:
        """Whether a weight's buffer, or a caller's for its codes, lies elsewhere than when it was
        looked at.

        Raises:
            InputError: where a weight is no longer the one that the plan was made for.
        """
        if self.is_trusting and self._move == QuantizedStorage.buffers_version:
            return False
        if [weight.quantized_storage for weight in self._weights] != self._storages:
            self._refuse_other_weights()
        if self._move != QuantizedStorage.buffers_version:
            self._refuse_other_copies()
            now = [buffer for storage in self._storages for buffer in storage.buffers.values()]
            if len(now) != self._count or any(map(operator.is_not, now, self._buffers)):
                return True
            self._move = QuantizedStorage.buffers_version
        # Sizes are left out: whoever changes one keeps the memory or moves it.
        return list(map(torch.Tensor.data_ptr, self._buffers)) != self._pointers

    def hold_other_copies(self) -> bool:
        """Whether a weight has dropped or taken on copies that a plan's casts depend on."""
        return self._move != QuantizedStorage.buffers_version and self._copies != list(
            map(_copies, self._storages)
        )

    def check_masters(self, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise :class:`InputError` where a cast would write what it reads: where one of these
        named masters lies in a buffer.
        """
        for name, master in masters:
            start = master.data_ptr()
            at = bisect_right(self._starts, start + master.nbytes - 1) - 1
            if master.numel() and at >= 0 and self._ranges[at][1] > start:
                raise InputError(
                    f"{name}: the master weight must not share memory with what the cast writes, "
                    f"got one that overlaps {_named(self._ranges[at])}; give it memory of its own."
                )

    def _refuse_other_weights(self) -> None:
        for weight, shard_spec in zip(self._weights, self._specs, strict=True):
            if weight.quantized_storage is not shard_spec.storage:
                raise InputError(
                    f"{shard_spec.name} must be the weight that the plan was made for, got one "
                    "that has been converted or moved since (Module.half, .to, _apply); make a new "
                    "plan."
                )

    def _refuse_other_copies(self) -> None:
        for shard_spec, planned in zip(self._specs, self._copies, strict=True):
            if _copies(shard_spec.storage) != planned:
                raise InputError(
                    f"{shard_spec.name} must hold the copies of its codes that the plan was made "
                    f"for, got {', '.join(shard_spec.storage.buffers)} after update_usage; make a "
                    f"new plan."
                )


def _copies(storage: QuantizedStorage) -> Any:
    """What of a weight's copies of codes the exchanges and launches of a plan depend on."""
    sources = tuple(plane.source for plane in storage.cast_planes)
    return storage.is_whole, storage.has_scales, sources


def _check_buffers(shard_spec: ShardSpec) -> None:
    """Raise :class:`InputError` where a buffer is no longer what the recipe says."""
    storage = shard_spec.storage
    specs = storage.form.buffers
    for name, buffer in storage.buffers.items():
        spec = specs[name]
        problem = why_unusable(buffer, (spec.dtype,), buffer.device)
        if problem is None and tuple(buffer.shape) != spec.shape:
            problem = f"shape {tuple(buffer.shape)}"
        if problem is not None:
            raise InputError(
                f"{shard_spec.name}: {name} must be contiguous, {spec.dtype} {list(spec.shape)}, "
                f"got {problem}. Move codes by zerocast.replace_raw_data only."
            )


_Range = tuple[int, int, str, str]
"""Start and end of a buffer, its name and that of its weight."""


def _disjoint(specs: Sequence[ShardSpec]) -> list[_Range]:
    """List all memory that casts and gathers of these weights write, by start.

    Raises:
        InputError: where two of them overlap.
    """
    ranges: list[_Range] = []
    for shard_spec in specs:
        buffers = shard_spec.storage.buffers
        ranges += [_range(buffer, name, shard_spec) for name, buffer in buffers.items()]
        for plane, codes in shard_spec.codes.items():
            own = _range(codes, "fsdp_shard_model_weights", shard_spec)
            whole = buffers.get(plane)
            # A shard's codes may be received where the gather puts them.
            if whole is None or not _lies_in(own, _range(whole, plane, shard_spec)):
                ranges.append(own)
    ranges = sorted(each for each in ranges if each[0] < each[1])
    for one, other in itertools.pairwise(ranges):
        if other[0] < one[1]:
            raise InputError(
                f"each weight of a cast must have memory of its own, got {_named(one)} and "
                f"{_named(other)} that overlap; give each its own slice "
                "(zerocast.replace_raw_data)."
            )
    return ranges


def _range(tensor: torch.Tensor, name: str, shard_spec: ShardSpec) -> _Range:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes, name, shard_spec.name


def _named(given: _Range) -> str:
    return f"{given[2]} of {given[3]}"


def _lies_in(inner: _Range, outer: _Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]
