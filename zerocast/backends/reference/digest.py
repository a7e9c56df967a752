"""The digest of bytes, in plain torch: see "Digests" in docs/NUMERICS.md."""

from __future__ import annotations

from functools import cache

import torch

ROW = 1024
"""Words in a row of keys: a key is the factor of its column times that of its row."""

_WORD = 4
_UNSIGNED = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the elements of ``values``, contiguous, as integers of their size."""
    return values.view(-1).view(_INTEGERS[values.itemsize])


def digest(values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """int64 []: of ``values``, contiguous, whose first byte is byte ``first`` of the whole
    tensor.
    """
    data = values.detach().view(-1).view(torch.uint8)
    head = min(-first % _WORD, data.numel())
    tail = head + (data.numel() - head) // _WORD * _WORD
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin, end in ((0, head), (tail, data.numel())):
        places = torch.arange(first + begin, first + end, dtype=torch.int64, device=data.device)
        total += digest_of(data[begin:end], places)
    words = data[head:tail]
    aligned = words.storage_offset() % _WORD == 0 and words.data_ptr() % _WORD == 0
    words = (words if aligned else words.clone()).view(torch.int32)
    at = (first + head) // _WORD
    places = torch.arange(at, at + len(words), dtype=torch.int64, device=data.device)
    return total + ((words.long() & _UNSIGNED[_WORD]) * _keys(places)).sum()


def digest_of(
    values: torch.Tensor, places: torch.Tensor, instead_of: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 []: what elements ``values`` at ``places`` (int64) of a tensor add to its digest, if
    they stand there ``instead_of`` other ones, or of zeros.
    """
    if values.itemsize > _WORD:
        places = torch.stack([2 * places, 2 * places + 1], dim=1).view(-1)
        values = as_integers(values).view(torch.int32)
        instead_of = None if instead_of is None else as_integers(instead_of).view(torch.int32)
    size = values.itemsize
    integers = as_integers(values).long() & _UNSIGNED[size]
    if instead_of is not None:
        integers -= as_integers(instead_of).long() & _UNSIGNED[size]
    at = places * size
    return ((integers << ((at & 3) << 3)) * _keys(at >> 2)).sum()


def _keys(words: torch.Tensor) -> torch.Tensor:
    """int64, odd, of int64 places of words."""
    return _column_factors(words.device)[words % ROW] * _mixed(words // ROW)


@cache
def _column_factors(device: torch.device) -> torch.Tensor:
    numbers = _mixed(torch.arange(-ROW, 0, dtype=torch.int64, device=device))
    return (numbers >> 32) & _UNSIGNED[_WORD] | 1


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """int64, odd, of int64 ``numbers``: multiplied by the golden ratio's bits, and mixed."""
    bits = (numbers + 1) * -0x61C8864680B583EB
    bits = (bits ^ (bits >> 32)) * -0x40A7B892E31B1A47
    return (bits ^ (bits >> 29)) | 1
