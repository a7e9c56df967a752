"""Codes between weights and the buffer in which they travel, by torch: for backends whose host does
the copying itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from zerocast.numerics import CodeCopy, LaunchOn, SharedByte


def stage_codes(copies: Sequence[CodeCopy]) -> LaunchOn:
    """The launch of :meth:`zerocast.numerics.Backend.stage_codes`."""
    codes, sizes = [copy.codes for copy in copies], _sizes(copies)

    def launch(buffer: torch.Tensor) -> None:
        if codes:
            torch._foreach_copy_(_pieces(buffer, sizes), codes)

    return launch


def store_codes(copies: Sequence[CodeCopy], shared: Sequence[SharedByte]) -> LaunchOn:
    """The launch of :meth:`zerocast.numerics.Backend.store_codes`."""
    codes, sizes = [copy.codes for copy in copies], _sizes(copies)

    def launch(buffer: torch.Tensor) -> None:
        if codes:
            torch._foreach_copy_(codes, _pieces(buffer, sizes))
        for byte in shared:
            low = byte.codes if byte.low is None else buffer[byte.low]
            high = byte.codes if byte.high is None else buffer[byte.high]
            byte.codes.copy_((low & 0x0F) | (high & 0xF0))

    return launch


def _sizes(copies: Sequence[CodeCopy]) -> list[int]:
    """Bytes of the buffer before each copy, which is not in one, and of the copy, by turns."""
    ends = [0, *(copy.staged + len(copy.codes) for copy in copies)]
    gaps = [copy.staged - end for copy, end in zip(copies, ends, strict=False)]
    lengths = [len(copy.codes) for copy in copies]
    return list(itertools.chain.from_iterable(zip(gaps, lengths, strict=True)))


def _pieces(buffer: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(buffer[: sum(sizes)].split_with_sizes(sizes)[1::2])
