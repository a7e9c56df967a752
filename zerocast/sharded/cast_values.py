"""CastValues: the values that a master's codes were made from, on one rank.

A cast is due where a master has others. Most writes are seen: an operation on a master says that it
writes (:meth:`CastValues.written`), and torch counts writes to the same memory through other
tensors. Kernels of torch.compile, other libraries and whoever has the address write unseen; a
digest of the values tells them apart, at the price of reading the master.

A write to a DTensor is counted for the DTensor, and not for the memory on this rank. So what a
state dict lends out (:meth:`CastValues.lent`) shares a count that this knows.

Memory joins when values are copied as they are, for a copy is not another value: FSDP2 moves rows
into memory that it pads, on some ranks only.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerocast.sharded.placement import counted_with, write_counter
from zerocast.tensors.digest import digest


class CastValues:
    """Of one master; the memory of all its pieces is told apart."""

    def __init__(self) -> None:
        # By memory, which this keeps no longer than others do, torch's count of writes then.
        self._holders: dict[StorageWeakRef, int] = {}
        self._kind: tuple[torch.Size, torch.dtype] | None = None
        self._digest: torch.Tensor | None = None
        self._lent: torch.Tensor | None = None  # a DTensor that counts writes, without memory
        self._lent_version = 0

    def are_in(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has the values that were cast last, but for writes unseen."""
        if self._lent is not None and _version(self._lent) != self._lent_version:
            return False
        return self._holders.get(_memory(tensor)) == _version(tensor)

    def differ_from(self, tensor: torch.Tensor) -> torch.Tensor:
        """int32 [] on the device of ``tensor``: 1 where it was written since it was cast, seen or
        unseen, else 0.
        """
        if self._digest is None or not self.are_in(tensor):
            return torch.ones((), dtype=torch.int32, device=tensor.device)
        return (digest(tensor) != self._digest).to(torch.int32)

    def set_to(self, tensor: torch.Tensor) -> None:
        """``tensor`` has been cast."""
        self._holders = {_memory(tensor): _version(tensor)}
        self._kind = tensor.shape, tensor.dtype
        self._digest = digest(tensor)
        if self._lent is not None:
            self._lent_version = _version(self._lent)

    def lent(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, a DTensor of a master's memory, whose writes are seen from now on."""
        with torch.inference_mode(False):  # which counts no writes
            if self._lent is None:
                self._lent = write_counter(tensor)
                self._lent_version = _version(self._lent)
            return counted_with(self._lent, tensor)

    def forget(self) -> None:
        """No values have been cast."""
        self._holders = {}

    def written(self, tensor: torch.Tensor) -> None:
        """``tensor`` was written by an operation that torch does not count."""
        self._holders.pop(_memory(tensor), None)

    def copied(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """``source`` was copied into ``target``: all rows as they are, or rows or values that were
        not cast so.
        """
        kinds = {self._kind, (source.shape, source.dtype), (target.shape, target.dtype)}
        if self.are_in(source) and len(kinds) == 1 and _memory(source) != _memory(target):
            self._holders[_memory(target)] = _version(target)
        else:
            self.written(target)


def _memory(tensor: torch.Tensor) -> StorageWeakRef:
    """The same for all views, and different for any other memory, empty memory too."""
    return StorageWeakRef(tensor.untyped_storage())


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
