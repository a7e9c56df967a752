"""Digests of tensors that are held from step to step."""

from itertools import pairwise

import pytest
import torch

from zerocast.backends import backend_for
from zerocast.cast.copied_digests import CopiedDigests, CopiesInPlace, HeldDigests
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


@pytest.mark.parametrize("size", [1, 3, 50, 64, 1000])
def test_what_arrives_in_pieces_is_not_read_again(size: int) -> None:
    """Whatever ranges pieces cut, and padding, and none of two gathers is counted in the other; of
    another buffer, as of the first; what is a rank's own, and who takes no digests, is read.
    """
    ends = [0, 5, 5, 9, 70, 133, 257, 258, 700]
    places = [slice(begin, end) for begin, end in pairwise(ends)]
    ranges = [[(at, 7) for at in some] for some in (places[:2], places[2:4], places[5:])]
    copies = CopiesInPlace(1, ranges)
    for moves in range(3):
        if moves != 1:
            whole = torch.zeros(720, dtype=torch.uint8)
        whole.copy_(torch.randint(256, (720,), dtype=torch.uint8))
        assert copies.begin(whole, takes_digests=True) is copies
        assert copies.copied == []
        for begin, end in ((0, 9), (133, 720)):
            for at in range(begin, end, size):
                copies.arrived(at, min(at + size, end))
        (taken,) = copies.copied
        assert sum(end - first for _, first, end in taken.ranges) == 5 + 124 + 1 + 442
        for (address, first, end), number in zip(taken.ranges, taken.sums, strict=True):
            at = address + first - whole.data_ptr()
            assert int(number) == int(digest(whole[at : at + end - first], first))
    copies.begin(whole, takes_digests=False)
    copies.arrived(0, 9)
    assert copies.copied == []
