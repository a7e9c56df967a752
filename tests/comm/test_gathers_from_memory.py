"""All-gathers in which processes of one node copy large parts out of each other's memory."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.programs import on_mpi_ranks, run
from tests.support.ranks import MPI_RANKS, PROCESSES, run_ranks
from zerocast.comm import Communicator, MpiCommunicator, processes
from zerocast.comm.peer_memory import PeerBuffer, read

on_ranks = pytest.mark.mpi(min_size=MPI_RANKS)
on_every_kind = pytest.mark.parametrize("kind", PROCESSES)


@pytest.fixture(autouse=True)
def small_parts_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 256 bytes a rank on."""
    monkeypatch.setattr(processes, "_LARGE", 256)


def on_new_group(kind: str, ranks: int, body: Callable[[Any], Any], **options: Any) -> list[Any]:
    """As :func:`run_ranks`, of a group whose ranks know nothing of each other yet."""

    def on_rank(comm: Any) -> Any:
        return body(MpiCommunicator(comm._comm.Dup(), **options) if kind == "mpi" else comm)

    return run_ranks(kind, ranks, on_rank)


PARTS = {
    "uneven": [700, 64, 1, 899],
    "empty": [0, 2500, 0, 65],
    "of one rank": [0, 0, 0, 4096],
    "equal": [333, 333, 333, 333],
}


def gathers(
    comm: Communicator, counts: list[int], errors: list[Exception | None]
) -> list[list[tuple[int, int]]]:
    """Gathers of a buffer each, at any address, begun together; reading memory fails where an error
    is given. Returns which parts each has read, where they begin and how long they are, once all
    bytes were there.
    """
    wholes = [torch.arange(sum(counts) + i, dtype=torch.float64)[i:] for i in range(len(errors))]
    wholes = [(1e3 * whole.sin()).to(torch.uint8) for whole in wholes]
    memory = torch.zeros(len(errors), sum(counts) + len(errors) + 2, dtype=torch.uint8)
    gathered = [row[1 + i : sum(counts) + 1 + i] for i, row in enumerate(memory)]
    parts: list[list[tuple[int, int]]] = [[] for _ in errors]
    waits = []

    def noted(peer: PeerBuffer, start: int, into: torch.Tensor) -> None:
        if errors[len(waits)] is not None:
            raise errors[len(waits)]
        read(peer, start, into)
        parts[len(waits)].append((start, len(into)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "read", noted)
        for buffer, whole in zip(gathered, wholes, strict=True):
            buffer.split(counts)[comm.rank].copy_(whole.split(counts)[comm.rank])
            waits.append(comm.start_all_gather_(buffer, counts))
    for wait in reversed(waits):
        wait()
    assert all(map(torch.equal, gathered, wholes))
    assert not memory.sum() - sum(each.sum() for each in wholes)
    return parts


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    ("kind", "options"), [("mpi", {}), ("mpi", {"chunk": 50}), ("torch_distributed", {})]
)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks
def test_parts_are_copied_from_the_memory_of_others(
    parts: str, kind: str, options: dict[str, int], ranks: int
) -> None:
    """Large ones, of any length, at any address."""
    counts = PARTS[parts][:ranks]

    def on_rank(comm: Any) -> bool:
        comm.maxima([0])  # since when they know that they share a node
        is_large = sum(counts) >= 256 * ranks
        others = [(comm.rank + shift) % ranks for shift in range(1, ranks)] * is_large
        expected = [(sum(counts[:rank]), counts[rank]) for rank in others]
        assert gathers(comm, counts, [None] * 3) == [expected] * 3
        assert comm._reads_memory(256 * ranks)
        return is_large

    assert any(on_new_group(kind, ranks, on_rank, **options)) == (sum(counts) >= 256 * ranks)


@on_every_kind
@on_ranks
def test_where_a_rank_cannot_read_memory_the_transport_gathers(kind: str) -> None:
    """From then on, for all, whatever some have copied."""

    def on_rank(comm: Any) -> None:
        comm.maxima([0])
        refused = PermissionError("planted") if comm.rank == 1 else None
        parts = gathers(comm, [700] * MPI_RANKS, [None, refused, refused, None])
        assert list(map(len, parts)) == [3, 3 * (comm.rank != 1), 0, 0]
        assert not comm._reads_memory(1 << 30)

    on_new_group(kind, MPI_RANKS, on_rank)


@pytest.mark.parametrize("shared", [True, False])
@on_every_kind
@on_ranks
def test_ranks_of_several_nodes_do_not_look_for_memory(kind: str, shared: bool) -> None:
    """Where one of them has another name, none does; and none does before they know."""

    def on_rank(comm: Any) -> None:
        if not shared and comm.rank == 2:
            comm._peers._node += 1
        large = 256 * MPI_RANKS
        found = [comm._reads_memory(large), comm.maxima([comm.rank]), comm._reads_memory(large)]
        assert found == [False, [MPI_RANKS - 1], shared]
        assert not comm._reads_memory(large - 1)

    on_new_group(kind, MPI_RANKS, on_rank)


@on_ranks
def test_memory_that_is_not_the_hosts_is_the_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's, which an MPI library takes as it is, and all of a group that has NCCL alone."""
    called = []

    def on_mpi(comm: Any) -> None:
        comm.maxima([0])
        monkeypatch.setattr(comm, "_begin_all_gather", lambda *given: called.append(given) or [])
        flat = torch.zeros(4096, dtype=torch.uint8, device="meta")
        comm._start_all_gather(flat, [1024] * MPI_RANKS)()
        [(sent, _)] = called
        assert sent is flat

    def on_torch(comm: Any) -> None:
        comm.maxima([0])
        assert comm._reads_memory(4096)
        monkeypatch.setitem(comm._backends, "cpu", "nccl")
        assert not comm._reads_memory(4096)
        monkeypatch.undo()  # the group ends over gloo

    on_new_group("mpi", MPI_RANKS, on_mpi)
    on_new_group("torch_distributed", MPI_RANKS, on_torch)


@pytest.mark.parametrize(
    ("fault", "seen", "by_faulty"),
    [
        ("raises", "PeerFailedError: .*rank 1 raised OSError: planted", "OSError: planted"),
        ("is late", "PeerTimeoutError: .*rank 1 neither called", "PeerTimeoutError"),
        ("fails to copy", "PeerFailedError: .*rank 1 raised MemoryError: planted", "MemoryError"),
        ("gathers less", "RankMismatchError: .*all_gather_ of", "RankMismatchError"),
    ],
)
def test_parts_that_are_never_copied_end_all_ranks(
    fault: str, seen: str, by_faulty: str, tmp_path: Path
) -> None:
    """As any other collective does, with an error on each."""
    program = Path(__file__).with_name("faulty_copies.py")
    said = run(on_mpi_ranks(3, program, fault, tmp_path / "store"), timeout=60).stdout
    for kind, (rank, expected) in product(PROCESSES, enumerate((seen, by_faulty, seen))):
        assert re.search(f"{kind}: rank {rank} saw {expected}", said), said
