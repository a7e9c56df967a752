"""What is MPI's own: tensors past the count limit, other devices, wrong groups, no mpi4py."""

import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.comm.conftest import collectives
from tests.support.claims import assert_same_tensors
from tests.support.programs import on_mpi_ranks, run
from tests.support.ranks import MPI_RANKS, run_ranks
from zerocast.comm import MpiCommunicator, mpi
from zerocast.comm.communicator import PartCopies
from zerocast.errors import BackendError, InputError

on_ranks = pytest.mark.mpi(min_size=MPI_RANKS)


def limited_world(limit: int):
    """The world of an MPI library whose counts end at ``limit``: it refuses larger ones."""
    from mpi4py import MPI

    def limited(name: str):
        call = getattr(MPI.Intracomm, name)

        def checked(self, *given):
            _, counts, _ = [each for each in given if isinstance(each, list)][
                -1
            ]  # what is received
            total = sum(counts) if isinstance(counts, list) else counts
            total *= self.size if name == "Ialltoall" else 1
            assert total <= limit, f"{total} items in one call, the limit is {limit}"
            return call(self, *given)

        return checked

    names = ("Iallreduce", "Iallgatherv", "Ialltoall", "Isend", "Irecv", "Ibcast")
    kind = type("Limited", (MPI.Intracomm,), {name: limited(name) for name in names})
    return kind(MPI.COMM_WORLD.Dup())  # which a refused call may leave unfinished


@on_ranks
@pytest.mark.parametrize("chunk", [4, 5, 9, 44])
def test_tensors_past_the_count_limit_give_the_same_results(chunk):
    """A limit of a few items stands for 2**31 - 1: no call exceeds it, and results are the same."""
    expected = collectives(MpiCommunicator())
    found = collectives(MpiCommunicator(limited_world(chunk), chunk=chunk))
    assert_same_tensors(found, expected, f"in chunks of {chunk}")


@on_ranks
def test_shorter_tensors_are_not_cut():
    """The default is MPI's own limit, so tensors below it travel in one call."""
    assert inspect.signature(MpiCommunicator).parameters["chunk"].default == 2**31 - 1
    with pytest.raises(AssertionError, match="23 items in one call, the limit is 22"):
        collectives(MpiCommunicator(limited_world(22)))


@on_ranks
def test_other_devices_travel_through_host_memory(monkeypatch):
    """Staged through a copy, every collective gives the same, an output inside of the buffer
    included; stages says which devices are.
    """
    comm = MpiCommunicator()
    assert [comm.stages(torch.device(d)) for d in ("cpu", "cuda", "cuda:1")] == [False, True, True]
    expected = collectives(comm)
    monkeypatch.setattr(MpiCommunicator, "stages", lambda self, device: True)
    assert_same_tensors(collectives(comm), expected, "staged")


@on_ranks
def test_a_cuda_aware_library_takes_a_gpus_tensors():
    """Told that MPI takes a GPU's memory, it stages no GPU's tensors, and no graph captures it."""
    comm = MpiCommunicator(cuda_aware=True)
    assert [comm.stages(torch.device(d)) for d in ("cpu", "cuda", "meta")] == [False, False, True]
    assert not comm.captures(torch.device("cuda"))


@on_ranks
def test_only_an_intracommunicator_with_this_rank_is_a_group():
    """COMM_NULL, which Split gives to ranks left out, is refused, and so is what is not of MPI."""
    from mpi4py import MPI

    with pytest.raises(
        InputError, match=r"that this rank belongs to, got COMM_NULL; make one with"
    ):
        MpiCommunicator(MPI.COMM_NULL)
    with pytest.raises(InputError, match="intracommunicator that this rank belongs to, got str"):
        MpiCommunicator("world")


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch):
    """No mpi4py: BackendError with the command that brings it."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    message = r"needs mpi4py and an MPI library, got '.*mpi4py.*'; install both by pip install"
    with pytest.raises(BackendError, match=message):
        MpiCommunicator()


# --- all-gathers in pieces ---


class Noted(PartCopies):
    """Notes what has arrived, which has to be there."""

    def __init__(self, buffer: torch.Tensor, expected: torch.Tensor) -> None:
        self.buffer, self.expected = buffer, expected
        self.count = torch.zeros(len(buffer), dtype=torch.int64)
        self.longest = 0

    def copy(self, rank: int, theirs: torch.Tensor) -> None:
        raise AssertionError("MPI has no other rank's buffer")

    def arrived(self, begin: int, end: int) -> None:
        assert torch.equal(self.buffer[begin:end], self.expected[begin:end])
        self.count[begin:end] += 1
        self.longest = max(self.longest, end - begin)


PARTS = {
    "uneven": [700, 64, 1, 899],
    "empty": [0, 2500, 0, 65],
    "of one rank": [0, 0, 0, 4096],
    "equal": [333, 333, 333, 333],
    "whole pieces": [256, 640, 64, 640],
}


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("chunk", [2**31 - 1, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks
def test_pieces_bring_the_same_bytes(parts, chunk, ranks, monkeypatch):
    """Of parts of any length, at any address, whoever wants to know of them; two gathers at once
    are not mixed. Each piece of another rank is told once, when its bytes are there.
    """
    monkeypatch.setattr(mpi, "_PIECE", 64)
    counts = PARTS[parts][:ranks]

    def on_rank(comm):
        comm = MpiCommunicator(comm._comm, chunk=chunk)
        comm.maxima([0])  # since when they know that they share a node
        wholes = [torch.arange(sum(counts) + i, dtype=torch.float64)[i:] for i in range(3)]
        wholes = [(1e3 * whole.sin()).to(torch.uint8) for whole in wholes]
        memory = torch.zeros(3, len(wholes[0]) + 5, dtype=torch.uint8)
        gathered = [row[1 + i : len(wholes[0]) + 1 + i] for i, row in enumerate(memory)]
        for buffer, whole in zip(gathered, wholes, strict=True):
            buffer.split(counts)[comm.rank].copy_(whole.split(counts)[comm.rank])
        noted = [Noted(*each) for each in zip(gathered, wholes, strict=True)]
        waits = [comm.start_all_gather_by(gathered[0], counts, noted[0])]
        wants = comm.rank % 2 == 0  # ranks need not agree on that
        waits.append(comm.start_all_gather_by(gathered[1], counts, noted[1] if wants else None))
        waits.append(comm.start_all_gather_(gathered[2], counts))
        for wait in reversed(waits):
            wait()
        assert all(map(torch.equal, gathered, wholes))
        assert not memory.sum() - sum(each.sum() for each in wholes)
        is_cut = sum(counts) >= 4 * 64 * ranks
        for each, told in zip(noted, (is_cut, is_cut and wants, False), strict=True):
            expected = torch.full_like(each.count, told)
            expected.split(counts)[comm.rank].zero_()
            assert torch.equal(each.count, expected)
            assert each.longest <= min(64, chunk)
        return is_cut

    assert any(run_ranks("mpi", ranks, on_rank)) == (sum(counts) >= 256 * ranks)


@on_ranks
def test_ranks_of_several_nodes_gather_at_once(monkeypatch):
    """Where one of them has another name, none cuts a part; and none does before they know."""
    from mpi4py import MPI

    monkeypatch.setattr(mpi, "_PIECE", 64)
    for shared in (True, False):
        comm = MpiCommunicator(MPI.COMM_WORLD.Dup())
        if not shared and comm.rank == 2:
            comm._peers._node += 1
        large = 256 * MPI_RANKS
        found = [comm.shows_parts(large), comm.maxima([comm.rank]), comm.shows_parts(large)]
        assert found == [False, [MPI_RANKS - 1], shared]
        assert not comm.shows_parts(large - 1)
        assert not MpiCommunicator(comm._comm, cuda_aware=True).shows_parts(large)


@pytest.mark.parametrize(
    ("fault", "seen", "by_faulty"),
    [
        ("raises", "PeerFailedError: .*rank 1 raised OSError: planted", "OSError: planted"),
        ("is late", "PeerTimeoutError: .*rank 1 neither came", "PeerTimeoutError"),
        ("fails to read", "PeerFailedError: .*rank 1 raised MemoryError: planted", "MemoryError"),
        ("gathers less", "RankMismatchError: .*all_gather_ of", "RankMismatchError"),
    ],
)
def test_pieces_that_never_come_end_all_ranks(fault, seen, by_faulty):
    """As any other collective does, with an error on each."""
    program = Path(__file__).with_name("faulty_pieces.py")
    said = run(on_mpi_ranks(3, program, fault), timeout=60).stdout
    for rank, expected in enumerate((seen, by_faulty, seen)):
        assert re.search(f"rank {rank} saw {expected}", said), said
