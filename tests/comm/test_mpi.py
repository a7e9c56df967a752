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
from zerocast.comm.communicator import PlainCopies
from zerocast.errors import BackendError, InputError
from zerocast.peer_memory import PeerBuffer

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


# --- all-gathers from other ranks' memory ---


class Noted(PlainCopies):
    """Notes whose parts it has copied, and fails where that is told."""

    def __init__(self, flat: torch.Tensor, counts: list[int], error: Exception | None = None):
        super().__init__(flat, counts)
        self.ranks: list[int] = []
        self.error, self.discarded = error, 0

    def copy(self, rank: int, theirs: torch.Tensor | PeerBuffer) -> None:
        assert isinstance(theirs, PeerBuffer)
        if self.error is not None:
            raise self.error
        super().copy(rank, theirs)
        self.ranks.append(rank)

    def discard(self) -> None:
        self.discarded += 1


PARTS = {
    "uneven": [700, 64, 1, 899],
    "empty": [0, 2500, 0, 65],
    "of one rank": [0, 0, 0, 4096],
    "equal": [333, 333, 333, 333],
}


def gathers(comm: MpiCommunicator, counts: list[int], errors: list[Exception | None]):
    """Gathers of a buffer each, at any address, begun together: in turn by copies that are noted,
    by these on even ranks alone, and plainly. Returns the copies, once all bytes were there.
    """
    wholes = [torch.arange(sum(counts) + i, dtype=torch.float64)[i:] for i in range(len(errors))]
    wholes = [(1e3 * whole.sin()).to(torch.uint8) for whole in wholes]
    memory = torch.zeros(len(errors), sum(counts) + len(errors) + 2, dtype=torch.uint8)
    gathered = [row[1 + i : sum(counts) + 1 + i] for i, row in enumerate(memory)]
    noted, waits = [], []
    for i, (buffer, whole, error) in enumerate(zip(gathered, wholes, errors, strict=True)):
        buffer.split(counts)[comm.rank].copy_(whole.split(counts)[comm.rank])
        noted.append(Noted(buffer, counts, error))
        if i % 3 < 2:
            copies = noted[i] if i % 3 == 0 or comm.rank % 2 == 0 else None  # not alike on all
            waits.append(comm.start_all_gather_by(buffer, counts, copies))
        else:
            waits.append(comm.start_all_gather_(buffer, counts))
    for wait in reversed(waits):
        wait()
    assert all(map(torch.equal, gathered, wholes))
    assert not memory.sum() - sum(each.sum() for each in wholes)
    return noted


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("chunk", [2**31 - 1, 50])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks
def test_parts_are_copied_from_the_memory_of_others(parts, chunk, ranks, monkeypatch):
    """Large ones, of any length, at any address, whoever copies them."""
    monkeypatch.setattr(mpi, "_LARGE", 256)
    counts = PARTS[parts][:ranks]

    def on_rank(comm):
        comm = MpiCommunicator(comm._comm, chunk=chunk)
        comm.maxima([0])  # since when they know that they share a node
        noted = gathers(comm, counts, [None] * 3)
        is_large = sum(counts) >= 256 * ranks
        others = [(comm.rank + shift) % ranks for shift in range(1, ranks)] * is_large
        assert noted[0].ranks == others
        assert noted[1].ranks == (others if comm.rank % 2 == 0 else [])
        assert not noted[2].ranks
        assert comm.shows_parts(256 * ranks)
        return is_large

    assert any(run_ranks("mpi", ranks, on_rank)) == (sum(counts) >= 256 * ranks)


@on_ranks
def test_where_a_rank_cannot_read_memory_mpi_gathers(monkeypatch):
    """From then on, for all, and what some have copied does not count."""
    from mpi4py import MPI

    monkeypatch.setattr(mpi, "_LARGE", 256)
    comm = MpiCommunicator(MPI.COMM_WORLD.Dup())
    comm.maxima([0])
    refused = PermissionError("planted") if comm.rank == 1 else None
    noted = gathers(comm, [700] * MPI_RANKS, [None, None, None, refused, refused, None])
    assert [each.discarded for each in noted] == [0, 0, 0, 1, 0, 0]
    assert [len(each.ranks) for each in noted[3:]] == [3 * (comm.rank != 1), 0, 0]
    assert not comm.shows_parts(1 << 30)


@on_ranks
def test_ranks_of_several_nodes_do_not_look_for_memory(monkeypatch):
    """Where one of them has another name, none does; and none does before they know."""
    from mpi4py import MPI

    monkeypatch.setattr(mpi, "_LARGE", 256)
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
        ("fails to copy", "PeerFailedError: .*rank 1 raised MemoryError: planted", "MemoryError"),
        ("gathers less", "RankMismatchError: .*all_gather_ of", "RankMismatchError"),
    ],
)
def test_parts_that_are_never_copied_end_all_ranks(fault, seen, by_faulty):
    """As any other collective does, with an error on each."""
    program = Path(__file__).with_name("faulty_copies.py")
    said = run(on_mpi_ranks(3, program, fault), timeout=60).stdout
    for rank, expected in enumerate((seen, by_faulty, seen)):
        assert re.search(f"rank {rank} saw {expected}", said), said
