"""Checksums that other programs can check: SHA-256 of each tensor's bytes, as safetensors stores
them.

:mod:`zerocast.tensors.digest` has the checksums of deltas, which are summed over shards. A SHA-256
is not a sum, so it needs the whole tensor: on several ranks each tensor is gathered as for a refit,
and hashed by one of them.
"""

import ctypes
import hashlib
from collections import ChainMap
from collections.abc import Iterable

import torch

from zerocast.comm import Communicator

_CHUNK = 1 << 24  # bytes; the copy of a GPU's tensor on the host takes no more


def sha256(tensor: torch.Tensor) -> str:
    """Return the hexadecimal SHA-256 of a tensor's elements in row-major order, little-endian."""
    found = hashlib.sha256()
    for part in tensor.detach().contiguous().view(-1).view(torch.uint8).split(_CHUNK):
        held = part.cpu()
        # Not numpy(): memory exported to NumPy cannot be resized, which FSDP2 does.
        found.update(ctypes.string_at(held.data_ptr(), held.nbytes))
    return found.hexdigest()


def gathered_checksums(
    comm: Communicator, tensors: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """Return the checksums by name of tensors that every rank of ``comm`` has in the same order.
    The ranks hash about equally many bytes each. Collective.
    """
    loads, names, own = [0] * comm.size, list[str](), dict[str, str]()
    for name, tensor in tensors:
        names.append(name)
        rank = loads.index(min(loads))
        loads[rank] += tensor.nbytes
        if rank == comm.rank:
            own[name] = sha256(tensor)
        del tensor  # before the next ones are gathered
    found = ChainMap(*comm.all_gather_object(own))
    return {name: found[name] for name in names}
