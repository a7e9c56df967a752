"""The digest of bytes, in plain torch: see "Digests" in docs/numerics.md."""

from __future__ import annotations

from functools import cache

import torch

_ROW, _LINE = 2048, 32
"""Halfwords in a row of keys, and in a line of it."""

_LANES = 16
_HALFWORD = 2
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(values: torch.Tensor) -> torch.Tensor:
    """Return a flat view of the elements of ``values``, contiguous, as integers of their size."""
    return values.view(-1).view(_INTEGERS[values.itemsize])


def digest(values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Return the digest, int64 [], of ``values``, contiguous, whose first byte is byte ``first`` of
    the whole tensor.
    """
    data = values.detach().unsqueeze(-1).view(torch.uint8).view(-1)
    head = min(-first % _HALFWORD, data.numel())
    tail = head + (data.numel() - head) // _HALFWORD * _HALFWORD
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for begin, end in ((0, head), (tail, data.numel())):
        places = torch.arange(first + begin, first + end, dtype=torch.int64, device=data.device)
        total += digest_of(data[begin:end], places)
    whole = data[head:tail]
    aligned = whole.storage_offset() % _HALFWORD == 0 and whole.data_ptr() % _HALFWORD == 0
    halfwords = (whole if aligned else whole.clone()).view(torch.int16)
    at = (first + head) // _HALFWORD
    places = torch.arange(at, at + len(halfwords), dtype=torch.int64, device=data.device)
    return total + (halfwords.long() * _keys(places)).sum()


def digest_of(
    values: torch.Tensor, places: torch.Tensor, instead_of: torch.Tensor | None = None
) -> torch.Tensor:
    """Return what elements ``values`` at ``places`` (int64) of a tensor add to its digest, int64
    [], if they replace the elements ``instead_of``, or zeros.
    """
    if values.itemsize > 1:
        count = values.itemsize // _HALFWORD
        inside = torch.arange(count, dtype=torch.int64, device=values.device)
        keys = _keys((places[:, None] * count + inside).view(-1))
    else:
        keys = _keys(places // _HALFWORD)
    change = _in_halfwords(values, places)
    if instead_of is not None:
        change -= _in_halfwords(instead_of, places)
    return (change * keys).sum()


def _in_halfwords(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the halfwords of elements, int64; of single bytes their part of a halfword."""
    if values.itemsize > 1:
        return values.view(-1).view(torch.int16).long()
    data = values.view(-1)
    upper = data.view(torch.int8).long() * 256
    return torch.where(places % _HALFWORD == 1, upper, data.view(torch.uint8).long())


def _keys(halfwords: torch.Tensor) -> torch.Tensor:
    """Return the keys, int64 and odd, of int64 places of halfwords."""
    return _in_row(halfwords.device)[halfwords % _ROW] * _mixed(halfwords // _ROW)


@cache
def _in_row(device: torch.device) -> torch.Tensor:
    """Return the factors of a row's halfwords."""
    lanes = torch.arange(_LANES, dtype=torch.int64, device=device)
    plain = (_mixed(lanes - _LANES) >> 33) & 0x7FFFFFFF | 1
    weighted = (_mixed(lanes - 2 * _LANES) >> 33) & 0x7FFFFFFE
    numbers = torch.arange(_ROW, dtype=torch.int64, device=device)
    in_lane = numbers // _LINE * 2 + numbers % 2
    lane = numbers % _LINE // 2
    return plain[lane] + (in_lane * (2 * in_lane + 1) % 128 - 64) * weighted[lane]


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 ``numbers`` multiplied by the golden ratio's bits and mixed: int64, odd."""
    bits = (numbers + 1) * -0x61C8864680B583EB
    bits = (bits ^ (bits >> 32)) * -0x40A7B892E31B1A47
    return (bits ^ (bits >> 29)) | 1
