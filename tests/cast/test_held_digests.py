"""Digests of tensors that are held from step to step, and where gathers take them on the way."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import zerocast
from tests.conftest import stamp
from tests.support.ranks import on_ranks, run_ranks
from tests.support.values import draw_values
from tests.support.verified import SHAPES, Weights
from zerocast.backends import backend_for
from zerocast.cast import CastPlan
from zerocast.cast.copied_digests import CopiedDigests, CopiesInPlace, HeldDigests
from zerocast.comm import Communicator, RecordingCommunicator, processes
from zerocast.comm.communicator import PartCopies
from zerocast.errors import VerificationError
from zerocast.numerics import CodeCopy
from zerocast.peer_memory import PeerBuffer, draw_token, read
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
        launches.append(held._digest)
    assert launches[0] is launches[1]
    assert HeldDigests().of(tensors[1:2]).tolist() == [int(digest(tensors[1]))] != expected[1:2]


@pytest.mark.parametrize("of_process", [False, True])
def test_what_is_copied_in_place_is_not_read_again(of_process: bool) -> None:
    """From another thread's or process' buffer, into the same memory or another; nothing of a copy
    before it, or of one that was given up, counts, and no digest is taken unless it is asked for.
    """
    ends = [0, 5, 5, 9, 70, 133, 257, 258, 700]
    places = [slice(begin, end) for begin, end in pairwise(ends)]
    ranges = [[(at, 7) for at in some] for some in (places[:2], places[2:4], places[5:])]
    copies = CopiesInPlace(ranges)
    theirs, token = torch.zeros(720, dtype=torch.uint8), draw_token(0)
    for moves in range(3):
        if moves != 1:
            whole = torch.zeros(720, dtype=torch.uint8)
        theirs.copy_(torch.randint(256, (720,), dtype=torch.uint8))
        assert copies.begin(whole, takes_digests=True) is copies
        assert copies.copied == []
        for rank in (0, 2):
            copies.copy(rank, PeerBuffer.of(theirs, token) if of_process else theirs)
        taken = [each for digests in copies.copied for each in digests.ranges if each]
        sums = [int(each) for digests in copies.copied for each in digests.sums]
        assert [end - first for _, first, end in taken] == [5, 0, 124, 1, 442]
        for (address, first, end), number in zip(taken, sums, strict=True):
            at = address + first - whole.data_ptr()
            assert torch.equal(whole[at : at + end - first], theirs[at : at + end - first])
            assert number == int(digest(theirs[at : at + end - first], first))
    copies.discard()
    assert copies.copied == []
    copies.begin(whole, takes_digests=False)
    copies.copy(0, theirs)
    assert copies.copied == []


class Damaged(RecordingCommunicator):
    """A gather after which rank 1 holds another first byte."""

    def start_all_gather_(self, buffer: torch.Tensor, counts: Any = None) -> Callable[[], None]:
        wait = super().start_all_gather_(buffer, counts)

        def damaged() -> None:
            wait()
            buffer[0] ^= 0x10 * (self.rank == 1)

        return damaged


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "block"])
def test_what_is_copied_is_read_on_the_way(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests, and those of the rest, are those of everything; and codes that are damaged in
    the gather, or scales before it, are found by the gather itself.
    """
    monkeypatch.chdir(tmp_path)

    def on_rank(comm: Communicator) -> list[str]:
        each, messages = Weights(comm, recipe, verify="hash"), []
        for _ in range(2):
            each.step()
            verification, gathers = each.plan._verification, each.plan._gathers
            held = {b.data_ptr() for i in range(3) for b in each.buffers(i).values()}
            for gather in gathers:
                sent, stored = gather.copied
                assert sent.ranges
                assert stored.ranges
                copied = {each[0] for each in (*sent.ranges, *stored.ranges) if each}
                assert copied <= held
            taken = [digests for gather in gathers for digests in gather.copied]
            numbers = [verification._numbers(comm, some).tolist() for some in (taken, [])]
            assert numbers[0] == numbers[1]
        each.plan.cast()
        each.buffers(1)["rowwise_scale_inv"].view(torch.uint8)[0] ^= comm.rank == 2
        for one in (each, Weights(Damaged(comm), recipe, verify="hash")):
            if one is not each:
                one.plan.cast()
            with pytest.raises(VerificationError) as error:
                one.plan.all_gather()
            messages.append(str(error.value))
        return messages

    by_rank = run_ranks("in_process", 3, on_rank)
    assert by_rank[0] == by_rank[1] == by_rank[2]
    stale, damaged = by_rank[0]
    assert "b.weight" in stale
    assert "rank 2 holds" in stale
    assert "a.weight" in damaged
    assert "rank 1 holds" in damaged
    assert "[0, 0] of rowwise_data, of the shard of rank 0" in damaged or recipe == "nvfp4"


@dataclass
class DamagedCopies(PartCopies):
    """Another first byte of rank 0's part is copied."""

    copies: PartCopies
    size: int

    def copy(self, rank: int, theirs: torch.Tensor | PeerBuffer) -> None:
        if isinstance(theirs, PeerBuffer):
            peer, theirs = theirs, torch.empty(self.size, dtype=torch.uint8)
            read(peer, 0, theirs)
        theirs = theirs.clone()
        theirs[0] ^= 0x10
        self.copies.copy(rank, theirs)

    def discard(self) -> None:
        raise AssertionError("all ranks can copy")


class DamagedCopy(RecordingCommunicator):
    """Lets rank 1 hold another first byte of rank 0's part."""

    def start_all_gather_by(
        self, buffer: torch.Tensor, counts: Any, copies: Any
    ) -> Callable[[], None]:
        if self.rank == 1:
            copies = DamagedCopies(copies, len(buffer))
        return self.comm.start_all_gather_by(buffer, counts, copies)


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "block"])
@pytest.mark.parametrize("kind", ["in_process", stamp("mpi"), stamp("torch_distributed")])
def test_what_is_gathered_in_place_is_read_while_it_is_copied(
    kind: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of threads, or of processes of one node, which copy large codes from each other, and a rank's
    own as it casts them: each byte once, in the same memory or in other. What a rank copies wrongly
    is found.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "_LARGE", 20000)
    master = draw_values("normal", 1 << 18, 0).chunk(4)

    def on_rank(comm: Communicator) -> str:
        weight = zerocast.empty((512, 512), recipe)
        own, start = [master[comm.rank]], [comm.rank << 16]
        buffers = weight.quantized_storage.buffers
        plan = CastPlan([weight], own, start, comm, names=["a.weight"], verify="hash")
        for turn in range(3):
            plan.cast()
            plan.all_gather()
            taken = [*plan._prepared.steps.rebuilt, *plan._prepared.steps._digests]
            taken += [digests for gather in plan._gathers for digests in gather.copied]
            sizes = [buffers[gather._plane].numel() for gather in plan._gathers]
            ranges = [each for digests in taken for each in digests.ranges if each]
            assert sum(end - first for _, first, end in ranges) == sum(sizes)
            numbers = [plan._verification._numbers(comm, some).tolist() for some in (taken, [])]
            assert numbers[0] == numbers[1]
            if turn == 1:
                moved = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
                zerocast.replace_raw_data(weight, *moved)
        damaged = DamagedCopy(comm)
        plan = CastPlan([weight], own, start, damaged, names=["a.weight"], verify="hash")
        plan.cast()
        with pytest.raises(VerificationError) as error:
            plan.all_gather()
        return str(error.value)

    first, *others = run_ranks(kind, 4, on_rank)
    assert others == [first] * 3
    assert "rank 1 holds" in first
    assert "of rowwise_data, of the shard of rank 0" in first


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "block", "current"])
@pytest.mark.parametrize("owners", [[0, 1], None])
@on_ranks("in_process", 2)
def test_what_is_staged_is_digested_once(
    comm: Communicator, recipe: str, owners: list[int] | None
) -> None:
    """A rank's own codes by the cast where one pass measures and casts, else as they are staged;
    others' as they are stored. As derived copies are made it is of codes that a transport gathers
    where they lie and does not show: here, once those of both ranks' weights are moved together.
    """
    comm = RecordingCommunicator(comm)
    weights = [zerocast.empty((512, 512), recipe) for _ in range(2)]
    own = [each == comm.rank for each in owners] if owners else [True, True]
    start, size = (0, 1 << 18) if owners else (comm.rank << 17, 1 << 17)
    masters = [draw_values("normal", size, comm.rank) if mine else None for mine in own]
    starts = [start if mine else None for mine in own]
    plan = CastPlan(weights, masters, starts, comm, verify="hash")
    buffers = [weight.quantized_storage.buffers for weight in weights]
    for is_in_place in (False, False, owners is not None):
        if is_in_place:
            names = [gather._plane for gather in plan._gathers]
            flats = [torch.cat([each[name].view(-1) for each in buffers]) for name in names]
            for i, weight in enumerate(weights):
                zerocast.replace_raw_data(weight, *(flat.chunk(2)[i] for flat in flats))
        plan.cast()
        plan.all_gather()
        steps, gathers = plan._prepared.steps, plan._gathers
        taken = [*steps.rebuilt, *steps._digests]
        taken += [digests for gather in gathers for digests in gather.copied]
        ranges = [each for digests in taken for each in digests.ranges if each]
        sizes = [each[gather._plane].numel() for gather in gathers for each in buffers]
        is_received = is_in_place and recipe == "mxfp8"  # and others' codes are read from memory
        assert sum(end - first for _, first, end in ranges) == sum(sizes) // (1 + is_received)
        of_copies = any(each for digests in steps.rebuilt for each in digests.ranges)
        assert of_copies == (is_in_place and recipe != "mxfp8")
        numbers = [plan._verification._numbers(comm, some).tolist() for some in (taken, [])]
        assert numbers[0] == numbers[1]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8"])
@on_ranks("in_process", 2)
def test_gathers_stage_in_one_buffer(comm: Communicator, recipe: str) -> None:
    """Of all planes and steps, whether in inference mode or not. One that is in use, or was left by
    an error, is not used by another gather.
    """
    each = Weights(comm, recipe, verify="hash")
    with torch.inference_mode():
        each.step()
    gathers = each.plan._gathers
    (spare,) = gathers[0]._spare
    for _ in range(2):
        each.step()
        assert [kept.data_ptr() for kept in gathers[-1]._spare] == [spare.data_ptr()]
    end = gathers[0].start()
    assert gathers[0]._spare == []
    each.step()
    assert gathers[0]._spare[0].data_ptr() != spare.data_ptr()
    end()
    assert len(gathers[0]._spare) == 1


@on_ranks("in_process", 2)
def test_who_does_not_verify_takes_no_digest(comm: Communicator) -> None:
    """Codes that are staged are stored without reading them once more."""
    for shapes in (SHAPES, {"a.weight": (512, 512)}):
        each = Weights(comm, shapes=shapes, verify="off")
        each.step()
        assert [gather.copied for gather in each.plan._gathers] == [[]] * len(each.plan._gathers)
