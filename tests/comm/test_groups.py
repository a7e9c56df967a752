"""as_communicator: what it takes, what it refuses, and which communicators are equal."""

import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks import MPI_RANKS, on_gloo, on_ranks
from zerocast.comm import (
    InProcessCommunicator,
    MpiCommunicator,
    RecordingCommunicator,
    SingleRank,
    TorchDistributedCommunicator,
    as_communicator,
    run_in_process,
)
from zerocast.errors import InputError


@pytest.fixture
def default_group():
    """A gloo default group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@on_ranks()
def test_a_communicator_is_returned_as_it_is(comm):
    """Ours pass through, a recording one included."""
    recording = RecordingCommunicator(comm)
    assert as_communicator(comm) is comm
    assert as_communicator(recording) is recording


def test_none_without_a_default_group_is_one_rank():
    """None: a SingleRank, equal to every other."""
    comm = as_communicator(None)
    assert isinstance(comm, SingleRank)
    assert (comm.rank, comm.size) == (0, 1)
    assert comm == as_communicator(None)
    assert hash(comm) == hash(as_communicator(None))
    assert comm != run_in_process(1, lambda threads: threads)[0]


def test_none_with_a_default_group_is_that_group(default_group):
    """None: the initialised default group, the same as naming it."""
    comm = as_communicator(None)
    assert isinstance(comm, TorchDistributedCommunicator)
    assert comm == as_communicator(default_group)
    assert hash(comm) == hash(as_communicator(default_group))


def test_a_communicator_does_not_keep_its_group_alive():
    """A gloo group that outlives destroy_process_group() aborts the process at its exit, so a plan
    in a global variable must not hold one; a later call says that the group is gone.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)
    comm = as_communicator(None)
    dist.destroy_process_group()
    assert group() is None
    assert comm == comm
    with pytest.raises(InputError, match="group, which has been destroyed"):
        comm.barrier()


def test_another_group_is_another_communicator(default_group):
    """Two groups with the same members are two groups."""
    other = dist.new_group([0])
    assert as_communicator(other) != as_communicator(default_group)
    assert (
        len({as_communicator(other), as_communicator(default_group), as_communicator(other)}) == 2
    )


def test_a_mesh_of_one_dimension_is_its_group(default_group):
    """A 1-D DeviceMesh gives its group's communicator; a 2-D one is refused with the way out."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    assert as_communicator(mesh) == as_communicator(mesh.get_group())
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    message = r"must have 1 dimension to be a group, got 2, \('dp', 'tp'\); take .* mesh\['name'\]"
    with pytest.raises(InputError, match=message):
        as_communicator(mesh)
    as_communicator(mesh["dp"])


@pytest.mark.parametrize("group", ["world", 4, [None], torch.zeros(1), MpiCommunicator])
def test_anything_else_is_refused(group):
    """The message names everything that is accepted, and what was given."""
    message = (
        "a group must be a zerocast communicator, an mpi4py communicator, a torch.distributed "
        f"ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}."
    )
    with pytest.raises(InputError, match=message):
        as_communicator(group)
    for make in (RecordingCommunicator, TorchDistributedCommunicator):
        with pytest.raises(InputError, match="got "):
            make(group)


def test_not_being_a_member_is_refused():
    """What new_group returns on ranks left out is refused by its name."""
    with pytest.raises(InputError, match="must have this rank as a member, got NON_GROUP_MEMBER"):
        as_communicator(dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.mpi(min_size=MPI_RANKS)
def test_an_mpi4py_communicator_is_a_group():
    """COMM_WORLD from two handles is one group; a duplicate, which MPI keeps apart, is another."""
    from mpi4py import MPI

    world, duplicate = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup()
    comm = as_communicator(world)
    assert isinstance(comm, MpiCommunicator)
    assert (comm.rank, comm.size) == (world.rank, MPI_RANKS)
    again = as_communicator(MPI.Intracomm(world))
    assert comm == again
    assert hash(comm) == hash(again)
    assert comm != as_communicator(duplicate)
    duplicate.Free()


@on_gloo(MPI_RANKS)
def test_none_under_torch_distributed_is_all_its_ranks(comm):
    """With a default group of 4, group=None means these 4."""
    default = as_communicator(None)
    assert default == comm
    assert (default.rank, default.size) == (comm.rank, MPI_RANKS)


def test_threads_of_one_group_are_told_apart():
    """In one process the ranks' communicators are different ones."""
    ranks = run_in_process(3, lambda comm: comm)
    assert len(set(ranks)) == 3
    assert all(isinstance(comm, InProcessCommunicator) for comm in ranks)
