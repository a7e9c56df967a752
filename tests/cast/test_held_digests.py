"""Digests of tensors that are held from step to step."""

import pytest
import torch

from zerocast.backends import backend_for
from zerocast.cast.copied_digests import CopiedDigests, HeldDigests
from zerocast.numerics import CodeCopy
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
        assert held.of(tensors).tolist() == [int(digest(each)) for each in tensors]
        assert len(prepared) == moves


def test_what_was_copied_is_not_read_again() -> None:
    """It counts as it was copied, step after step by the same launch, and what was copied of other
    tensors is passed over; a single tensor is read whole.
    """
    tensors = [torch.arange(size, dtype=torch.uint8) for size in (9, 64, 5)]
    copies = [CodeCopy(tensors[1][8:40], 0, 8), CodeCopy(tensors[2], 32, 0),
              CodeCopy(tensors[1][50:52], 37)]  # fmt: skip
    backend = backend_for(torch.device("cpu"))
    copied = CopiedDigests(copies, lambda *sums: backend.stage_codes(copies, *sums))
    copied(torch.empty(39, dtype=torch.uint8))
    expected = [int(digest(each)) for each in tensors]
    tensors[1][8:40] += 1
    held, launches = HeldDigests(), []
    for _ in range(2):
        assert held.of(tensors[:2], [copied]).tolist() == expected[:2]
        launches.append(held._launch)
    assert launches[0] is launches[1]
    assert HeldDigests().of(tensors[1:2]).tolist() == [int(digest(tensors[1]))] != expected[1:2]
