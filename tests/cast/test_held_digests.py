"""Digests of tensors that are held from step to step."""

import pytest
import torch

from zerocast.cast.copied_digests import HeldDigests
from zerocast.tensors.digest import digest


def test_digests_are_prepared_once_and_of_what_lies_there_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is that of the bytes; other bytes in the same memory are read by the same launches,
    other memory by new ones.
    """
    prepared = []
    prepare = HeldDigests._prepare

    def counted(held: HeldDigests, *args: object) -> None:
        prepared.append(args)
        prepare(held, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(HeldDigests, "_prepare", counted)
    tensors = [torch.arange(9.0), torch.arange(7, dtype=torch.uint8), torch.empty(0)]
    held = HeldDigests()
    for moves in (1, 1, 2, 2):
        if moves > len(prepared):
            tensors[1] = tensors[1] + 1
        tensors[0].mul_(-3)
        assert held.of(tensors) == [int(digest(each)) % 2**64 for each in tensors]
        assert len(prepared) == moves
