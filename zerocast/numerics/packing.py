"""The positions of codes in bytes; no other module computes where an element's code is stored.

Every offset in zerocast's Python is in elements. Codes of 8 bits take a byte each. Codes of 4 bits
are packed two a byte by their flat index in the whole weight: the even element is the low nibble,
the odd one the high nibble. So a shard that starts or ends on an odd element shares its first or
last byte with its neighbour.
"""

import torch

from zerocast.numerics.element import ElementFormat


def byte_span(fmt: ElementFormat, start: int, end: int) -> tuple[int, int]:
    """Return the bytes ``[first, last)`` of the whole weight that hold elements ``[start, end)``;
    empty for no elements.

    For 4-bit codes that is ``floor(start / 2)`` to ``ceil(end / 2)``: a byte of which one nibble is
    in the range is included.
    """
    if start == end:
        return start * fmt.bits // 8, start * fmt.bits // 8
    return start * fmt.bits // 8, -(-end * fmt.bits // 8)


def packed_columns(fmt: ElementFormat, columns: int) -> int:
    """Return the bytes of one row of ``columns`` codes, where each row starts a new byte (a last
    nibble may be unused).
    """
    return -(-columns * fmt.bits // 8)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack [..., n] uint8 codes of 4 bits into [..., ceil(n / 2)] bytes; odd rows end in code 0."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(data: torch.Tensor, columns: int) -> torch.Tensor:
    """Unpack [..., ceil(columns / 2)] bytes into [..., columns] uint8 codes of 4 bits: the inverse
    of :func:`pack_nibbles`.
    """
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)[..., :columns]
