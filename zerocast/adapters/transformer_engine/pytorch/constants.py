"""DType: the formats of codes, as TransformerEngine numbers them."""

from __future__ import annotations

import enum

from zerocast.adapters.transformer_engine.missing import raise_missing
from zerocast.errors import InputError
from zerocast.numerics import E2M1, E4M3, E5M2, ElementFormat

__getattr__ = raise_missing(__name__)

__all__ = ["DType"]


class DType(enum.IntEnum):
    """The dtypes that tensors and quantizers name: of codes, and of what they stand for."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10

    @classmethod
    def of(cls, fmt: ElementFormat) -> DType:
        """Return the member for codes of this format."""
        return next(member for member, each in _FORMATS.items() if each == fmt)

    @classmethod
    def name_of(cls, value: object, *, bits: int) -> str:
        """Return the name of the format of ``bits`` that ``value``, a member or its number, stands
        for.

        Raises:
            InputError: where it is none.
        """
        known = {member: fmt for member, fmt in _FORMATS.items() if fmt.bits == bits}
        for member, fmt in known.items():
            if value == member:
                return fmt.name
        raise InputError(
            f"a quantizer of {bits}-bit codes takes {' or '.join(each.name for each in known)}, "
            f"got {value!r}."
        )


_FORMATS = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2, DType.kFloat4E2M1: E2M1}
