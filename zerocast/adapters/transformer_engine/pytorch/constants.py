"""DType: the formats of codes, with TransformerEngine's numbers."""

from __future__ import annotations

import enum

from zerocast import InputError

__all__ = ["DType"]


class DType(enum.IntEnum):
    """The dtypes of codes and values that tensors and quantizers refer to."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def of(cls, fmt: str) -> DType:
        """Return the member for the format ``fmt`` of codes, as zerocast names it."""
        return next(member for each in _FORMATS.values() for member, n in each.items() if n == fmt)

    @classmethod
    def name_of(cls, value: object, *, bits: int) -> str:
        """Return the name of the format of ``bits`` for ``value``, a member or its number.

        Raises:
            InputError: if ``value`` is not a format of that size.
        """
        known = _FORMATS[bits]
        for member, name in known.items():
            if value == member:
                return name
        raise InputError(
            f"a quantizer of {bits}-bit codes takes {' or '.join(each.name for each in known)}, "
            f"got {value!r}."
        )


_FORMATS = {
    8: {DType.kFloat8E4M3: "e4m3", DType.kFloat8E5M2: "e5m2"},
    4: {DType.kFloat4E2M1: "e2m1"},
}
"""Zerocast's names of the formats of codes, by bits and member."""
