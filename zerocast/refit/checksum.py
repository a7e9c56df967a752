"""checksum: a number of a tensor's bytes to which its parts and its changes add up.

    checksum = sum over words w of word[w] * key(w)   mod 2^64

The words are 4 bytes each, little-endian and unsigned, the last one filled up with zeros; a key is
odd, 64 bits of the word's place. As it is a sum, ranks add those of their shards, and a delta
carries what it changes of it, so neither side reads what did not change. A change of one word
always changes it; of other changes, one in 2^40 or fewer stays unseen. It protects from loss and
damage, not from somebody who chooses the bytes.
"""

from __future__ import annotations

from functools import cache

import torch

_WORD = 4
_TABLE = 1 << 16
_UNSIGNED = {1: 0xFF, 2: 0xFFFF, 4: 0xFFFFFFFF}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the elements of ``values``, contiguous, as integers of their size."""
    return values.view(-1).view(_INTEGERS[values.itemsize])


def checksum(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """int64 []: of ``values``, contiguous, whose first element is element ``start`` of the whole
    tensor.
    """
    data, first = values.view(-1).view(torch.uint8), start * values.itemsize
    head = min(-first % _WORD, data.numel())
    tail = head + (data.numel() - head) // _WORD * _WORD
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin, end in ((0, head), (tail, data.numel())):
        places = torch.arange(first + begin, first + end, dtype=torch.int64, device=data.device)
        total += checksum_of(data[begin:end], places)
    body, at = data[head:tail], (first + head) // _WORD
    words = (body.clone() if body.storage_offset() % _WORD else body).view(torch.int32)
    # Pieces of the table of keys: the first begins where the body does.
    before = min(-at % _TABLE, len(words))
    for piece in (words[:before], *words[before:].split(_TABLE)):
        keys = _table(data.device)[at % _TABLE :][: len(piece)]
        unsigned = piece.long() & _UNSIGNED[_WORD]
        place = torch.full((), at // _TABLE, dtype=torch.int64, device=data.device)
        total += (unsigned * keys).sum() * _mixed(place)
        at += len(piece)
    return total


def checksum_of(
    values: torch.Tensor, places: torch.Tensor, instead_of: torch.Tensor | None = None
) -> torch.Tensor:
    """int64 []: what elements ``values`` at ``places`` (int64) of a tensor add to its checksum, if
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
    words = at >> 2
    keys = _table(values.device)[words & (_TABLE - 1)] * _mixed(words >> 16)
    return ((integers << ((at & 3) << 3)) * keys).sum()


@cache
def _table(device: torch.device) -> torch.Tensor:
    """int64 [_TABLE], odd: a key is one of these times :func:`_mixed` of the number of the table's
    repetition.
    """
    return _mixed(torch.arange(-_TABLE, 0, dtype=torch.int64, device=device))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """int64, odd, of int64 ``numbers``: multiplied by the golden ratio's bits, and mixed."""
    bits = (numbers + 1) * -0x61C8864680B583EB
    bits = (bits ^ (bits >> 32)) * -0x40A7B892E31B1A47
    return (bits ^ (bits >> 29)) | 1
