"""The element formats, their rounding in plain torch, and where an element's code is stored."""

from zerocast.formats.codec import decode, decode_e8m0, encode, encode_e8m0, reciprocal_e8m0
from zerocast.formats.element import E2M1, E4M3, E5M2, ELEMENT_FORMATS, FLT_MAX, ElementFormat
from zerocast.formats.packing import (
    byte_span,
    pack_nibbles,
    packed_columns,
    unpack_nibbles,
)
