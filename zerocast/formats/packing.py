"""Maps elements to bytes; nothing else knows where an element's code is stored.

Every offset in zerocast's Python is in elements. Codes of 8 bits take a byte each. Codes of 4 bits
are packed two a byte by their flat index in the whole weight: the even element is the low nibble,
the odd one the high nibble. So a shard that starts or ends on an odd element shares its first or
last byte with its neighbour.
"""

import torch

from zerocast.formats.element import ElementFormat


def byte_span(fmt: ElementFormat, start: int, end: int) -> tuple[int, int]:
    """Bytes ``[first, last)`` of the whole weight that hold elements ``[start, end)``; empty for no
    elements.

    For 4-bit codes that is ``floor(start / 2)`` to ``ceil(end / 2)``: a byte that is only half ours
    is included.
    """
    if start == end:
        return start * fmt.bits // 8, start * fmt.bits // 8
    return start * fmt.bits // 8, -(-end * fmt.bits // 8)


def store_span(
    fmt: ElementFormat, codes: torch.Tensor, span: torch.Tensor, start: int, end: int
) -> None:
    """Write the codes of elements ``[start, end)`` into a whole weight; every other nibble keeps
    its value.

    Args:
        codes: uint8, flat: the codes of the whole weight.
        span: uint8, the bytes of :func:`byte_span`; nibbles in it that belong to other elements are
            ignored.
    """
    first, last = byte_span(fmt, start, end)
    if first == last:
        return
    place = codes[first:last]
    head, tail = fmt.bits == 4 and start % 2 == 1, fmt.bits == 4 and end % 2 == 1
    before, after = place[0].clone(), place[-1].clone()
    place.copy_(span)
    if head:
        place[0] = (before & 0x0F) | (place[0] & 0xF0)
    if tail:
        place[-1] = (after & 0xF0) | (place[-1] & 0x0F)


def packed_columns(fmt: ElementFormat, columns: int) -> int:
    """Bytes of one row of ``columns`` codes, where each row starts a byte of its own (a last nibble
    may be unused).
    """
    return -(-columns * fmt.bits // 8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[..., n] uint8 codes of 4 bits -> [..., ceil(n / 2)] bytes, rows padded with code 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(data: torch.Tensor, columns: int) -> torch.Tensor:
    """[..., ceil(columns / 2)] bytes -> [..., columns] uint8 codes of 4 bits: the inverse of
    :func:`pack_nibbles`.
    """
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)[..., :columns]
