"""CastValues: which memory holds the values that a master's codes were made from.

A cast is due where the master's memory is not among it. Memory drops out when it is written: an
operation on a master says so (:meth:`CastValues.written`), and torch counts those on the same
memory through other tensors. It joins when values are copied as they are, for a copy is not
another value: FSDP2 moves rows into memory that it pads, on some ranks only, and those must not be
alone in casting again.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class CastValues:
    """Of one master; the memory of all its pieces is told apart."""

    def __init__(self) -> None:
        # By memory, which this keeps no longer than others do, torch's count of writes then.
        self._holders: dict[StorageWeakRef, int] = {}
        self._kind: tuple[torch.Size, torch.dtype] | None = None

    def are_in(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` has the values that were cast last."""
        return self._holders.get(_memory(tensor)) == _version(tensor)

    def set_to(self, tensor: torch.Tensor) -> None:
        """``tensor`` has been cast."""
        self._holders = {_memory(tensor): _version(tensor)}
        self._kind = tensor.shape, tensor.dtype

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
