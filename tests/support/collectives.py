"""What travels between ranks, counted where torch hands it to the backend."""

import collections
from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from zerocast.comm.peers import Call
from zerocast.comm.torch_peers import TorchPeers


class Collectives(TorchDispatchMode):
    """Counts the collectives of torch.distributed within the context, but for those by which ranks
    compare over gloo what they are about to call; maxima that travel with these are an all-reduce.

    Attributes:
        calls: by operation, how often.
        bytes: by operation, of the largest tensor that it is given or returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()
        self.bytes: collections.Counter[str] = collections.Counter()

    def __enter__(self):
        self._compare = compare = TorchPeers._compare

        def uncounted(peers: TorchPeers, made: Call, numbers: Sequence[int] = ()) -> list[int]:
            if numbers:
                self._count("allreduce_", 4 * len(numbers))
            with _disable_current_modes():
                return compare(peers, made, numbers)

        TorchPeers._compare = uncounted
        return super().__enter__()

    def __exit__(self, *error):
        TorchPeers._compare = self._compare
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            sizes = [t.nbytes for t in tree_leaves((args, out)) if isinstance(t, torch.Tensor)]
            self._count(name, max(sizes, default=0))
        return out

    def _count(self, name: str, size: int) -> None:
        self.calls[name] += 1
        self.bytes[name] += size

    @property
    def all_reduces(self) -> int:
        """How many there were, of either interface."""
        return self.calls["allreduce_"] + self.calls["all_reduce"]

    @property
    def all_gathers(self) -> tuple[int, int]:
        """How many there were, of whatever kind, and the bytes that arrived by them."""
        names = [name for name in self.calls if "gather" in name]
        return sum(self.calls[n] for n in names), sum(self.bytes[n] for n in names)
