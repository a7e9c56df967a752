"""digest: a number that changes with the bytes of a tensor, computed where the tensor is.

It tells whether memory was written by somebody whom torch does not see, and whether ranks hold the
same bytes, without a copy of either. It is no protection against somebody who chooses the bytes.

    digest = sum over chunks c of P^(C - c) * sum over words i of int32(word[c, i] * key[i])

in 64-bit arithmetic that wraps round, C chunks of 2^18 words of 32 bits, keys odd. A product with
an odd key takes every value once, so a change of one word always changes the digest; of other
changes one in 2^32 or fewer stays unseen. The position matters through the key and the power.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

_CHUNK = 1 << 18
_POWER = 0x9E3779B97F4A7C1  # odd


def digest(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [] on the device of ``tensor``, a plain tensor of any dtype: of its bytes in the order
    of its elements. Shape and dtype do not enter.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = data.numel() // 4 * 4
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    keys = _keys(data.device)
    aligned = data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0
    words = (data if aligned else data.clone())[:whole].view(torch.int32)
    for chunk in words.split(_CHUNK):
        total = total * _POWER + (chunk * keys[: chunk.numel()]).sum()
    rest = torch.zeros(4, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    return (total * _POWER + rest.view(torch.int32).sum()) * _POWER + data.numel()


def digests(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the digest of each of ``tensors``. They are read together, because on a GPU each
    reading would wait.
    """
    found = [digest(tensor) for tensor in tensors]
    return torch.stack([each.to(found[0].device) for each in found]).tolist() if found else []


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """int32 [_CHUNK], odd; by the mixing function of MurmurHash3, of the positions."""
    x = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
    for multiplier in (0x85EBCA6B, 0xC2B2AE35):
        x = (x ^ (x >> 16)) * multiplier & 0xFFFFFFFF
    x = (x ^ (x >> 16)) | 1
    return torch.where(x < 1 << 31, x, x - (1 << 32)).to(torch.int32)
