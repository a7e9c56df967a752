"""Addresses: the addresses of the buffers that a plan writes, and whether they have moved.

The launches of a plan hold addresses, so each call checks whether these are still those of the
buffers ("Note: memory that moves" in :mod:`zerocast.tensors.ledger`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from zerocast.arguments import why_unusable
from zerocast.cast.shard_spec import ShardSpec
from zerocast.errors import InputError
from zerocast.tensors import QuantizedStorage, QuantizedTensor, counted_by_torch
from zerocast.tensors.ledger import WEIGHT, Scope, watch


class Addresses:
    """The addresses of the buffers of a plan's weights.

    Args:
        weights: the tensors given to the plan, to detect when one of them becomes another weight.
        specs: the same weights, as checked.
        scope: which buffers each call checks. With "storage" the plan's maker covers the rest.

    Attributes:
        written: what torch may save for a backward and a cast writes: the weights and their codes.
            Empty under the scope "storage", with which the plan's maker counts these writes.

    Raises:
        InputError: if two weights share memory, or a buffer is not as the recipe requires.
    """

    def __init__(
        self, weights: Sequence[QuantizedTensor], specs: Sequence[ShardSpec], scope: Scope
    ) -> None:
        self._weights, self._specs, self._scope = weights, specs, scope
        self._identities = watch(weights, WEIGHT)
        self._storages = [shard_spec.storage for shard_spec in specs]
        kinds: dict[Any, Any] = {}  # equal entries are stored once
        copies = map(_copies, self._storages)
        self._copies = [kinds.setdefault(each, each) for each in copies]
        self.look()

    def look(self) -> None:
        """Take the current addresses of the buffers."""
        for shard_spec in self._specs:
            _check_buffers(shard_spec)
            shard_spec.check_own_codes()
        self._buffers = self._buffers_now()
        own = [codes for shard_spec in self._specs for codes in shard_spec.codes.values()]
        codes = [buffer for storage in self._storages for buffer in storage.codes]
        per_tensor = self._scope == "tensor"
        self.written = counted_by_torch([*self._weights, *codes]) if per_tensor else []
        self._watched = watch([*self._buffers, *own], scope=self._scope)
        self._ranges = _Ranges(self._specs)

    def have_moved(self) -> bool:
        """Return whether a buffer of a weight, or of the caller for its codes, has moved.

        Raises:
            InputError: if a weight is no longer the one that the plan was made for; under the
                scope "storage" only after a move was announced.
        """
        is_announced = self._watched.is_announced
        if is_announced or (self._scope == "tensor" and self._identities.changed()):
            self._check_weights()
        if is_announced:
            if list(map(id, self._buffers_now())) != list(map(id, self._buffers)):
                return True
            self._watched.note_announced()
        return self._watched.changed()

    def _buffers_now(self) -> list[torch.Tensor]:
        return [buffer for storage in self._storages for buffer in storage.buffers.values()]

    def hold_other_copies(self) -> bool:
        """Return whether a weight has dropped or added copies that a plan's casts depend on."""
        is_announced = self._watched.is_announced
        return is_announced and self._copies != list(map(_copies, self._storages))

    def check_masters(self, masters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise :class:`InputError` if one of these named masters overlaps a written buffer."""
        for name, master in masters:
            if (overlapped := self._ranges.overlapped_by(master)) is not None:
                raise InputError(
                    f"{name}: the master weight must not share memory with what the cast writes, "
                    f"got one that overlaps {overlapped}; give it separate memory."
                )

    def _check_weights(self) -> None:
        """Raise :class:`InputError` if a weight was replaced, or holds other copies."""
        for weight, spec, planned in zip(self._weights, self._specs, self._copies, strict=True):
            if weight.quantized_storage is not spec.storage:
                raise InputError(
                    f"{spec.name} must be the weight that the plan was made for, got one that has "
                    "been converted or moved since (Module.half, .to, _apply); make a new plan."
                )
            if _copies(spec.storage) != planned:
                raise InputError(
                    f"{spec.name} must hold the copies of its codes that the plan was made for, "
                    f"got {', '.join(spec.storage.buffers)} after update_usage; make a new plan."
                )


def _copies(storage: QuantizedStorage) -> Any:
    """Return what a plan's exchanges and launches depend on of a weight's copies of codes."""
    sources = tuple(plane.source for plane in storage.cast_planes)
    return storage.is_whole, storage.has_scales, sources


def _check_buffers(shard_spec: ShardSpec) -> None:
    """Raise :class:`InputError` if a buffer is no longer as the recipe requires."""
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
                f"got {problem}. Move codes with zerocast.replace_raw_data only."
            )


class _Ranges:
    """All memory that casts and gathers of some weights write, sorted by address.

    Raises:
        InputError: if two weights share memory.
    """

    def __init__(self, specs: Sequence[ShardSpec]) -> None:
        self._specs = specs
        # Numbers only, because there are many; names are looked up for an error message.
        numbers = [n for each, *_ in _written(specs) for n in (each.data_ptr(), each.nbytes)]
        starts, sizes = torch.tensor(numbers, dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
        ends, places = starts + sizes, sizes.nonzero().view(-1)
        places = places[ends[places].argsort(stable=True)]
        places = places[starts[places].argsort(stable=True)]
        starts, ends = starts[places], ends[places]
        self._places, self._starts, self._ends = places.tolist(), starts.tolist(), ends.tolist()
        for at in (starts[1:] < ends[:-1]).nonzero().view(-1).tolist():
            raise InputError(
                f"the weights of a cast must not share memory, got {self._named(at)} and "
                f"{self._named(at + 1)}, which overlap; give each its own slice "
                "(zerocast.replace_raw_data)."
            )

    def overlapped_by(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a buffer that shares memory with ``tensor``, or None."""
        at = bisect_left(self._starts, tensor.data_ptr() + tensor.nbytes) - 1
        overlaps = tensor.numel() and at >= 0 and self._ends[at] > tensor.data_ptr()
        return self._named(at) if overlaps else None

    def _named(self, at: int) -> str:
        _, name, spec = next(itertools.islice(_written(self._specs), self._places[at], None))
        return f"{name} of {spec.name}"


def _written(specs: Sequence[ShardSpec]) -> Iterator[tuple[torch.Tensor, str, ShardSpec]]:
    """Yield each buffer that casts and gathers write, its name and its weight."""
    for spec in specs:
        buffers = spec.storage.buffers
        for name, buffer in buffers.items():
            yield buffer, name, spec
        for plane, codes in spec.codes.items():
            # The caller's buffer for a shard's codes may be a part of the gather buffer.
            if plane not in buffers or not _is_within(codes, buffers[plane]):
                yield codes, "fsdp_shard_model_weights", spec


def _is_within(inner: torch.Tensor, outer: torch.Tensor) -> bool:
    begin, end = outer.data_ptr(), outer.data_ptr() + outer.nbytes
    return begin <= inner.data_ptr() and inner.data_ptr() + inner.nbytes <= end
