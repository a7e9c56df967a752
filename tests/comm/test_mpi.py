"""What is MPI's own: tensors past the count limit, other devices, wrong groups, no mpi4py."""

import inspect
import sys

import pytest
import torch

from tests.comm.conftest import collectives
from tests.support.claims import assert_same_tensors
from tests.support.programs import on_mpi_ranks, output_of
from tests.support.ranks import MPI_RANKS
from zerocast.comm import MpiCommunicator
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


FINALIZED = """
import torch, zerocast
from mpi4py import MPI
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 128))
zerocast.nn.convert(model, "mxfp8", weights="quantized")
optimizer = zerocast.optim.ZeroOptimizer(
    model.named_parameters(), torch.optim.SGD, MPI.COMM_WORLD, lr=0.1, overlap_all_gather=True
)
model(torch.ones(2, 128)).sum().backward()
optimizer.step()
MPI.Finalize()
codes = [layer.weight.rowwise_data.long() for layer in model]
sums = [(each * torch.arange(each.numel()).view_as(each)).sum().item() for each in codes]
print(f"{sums}\\n", end="")  # in one write: the launcher mixes the writes of ranks
"""


def test_what_is_under_way_has_ended_when_mpi_has():
    """Weights are whole on every rank after ``MPI.Finalize()``, and the program ends well."""
    first, second = output_of(on_mpi_ranks(2, "-c", FINALIZED)).splitlines()
    assert first == second
