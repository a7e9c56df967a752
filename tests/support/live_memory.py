"""The memory that tensors of one thread hold at once, counted as they are made."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the tensors that are made inside of it.

    Attributes:
        peak: the most bytes that were held at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(each) for each in tree_leaves((args, kwargs)) if is_stored(each)}
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if is_stored(each) and id_of(each) not in given:
                storage = each.untyped_storage()
                self._held.setdefault(id_of(each), (StorageWeakRef(storage), storage.nbytes()))
        self._held = {key: each for key, each in self._held.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._held.values()))
        return made


def is_stored(value: Any) -> bool:
    """Whether it is a tensor with memory."""
    return isinstance(value, torch.Tensor) and value.device.type != "meta"


def id_of(tensor: torch.Tensor) -> int:
    """What tells its storage from others that live."""
    return tensor.untyped_storage()._cdata
