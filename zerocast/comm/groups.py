"""What users call a group, and the communicator for it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed

from zerocast.comm.communicator import Communicator
from zerocast.comm.mpi import MpiCommunicator
from zerocast.comm.single_rank import SingleRank
from zerocast.comm.torch_distributed import TorchDistributedCommunicator
from zerocast.errors import InputError

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = "Communicator | MPI.Intracomm | ProcessGroup | DeviceMesh | None"
"""What :func:`as_communicator` accepts."""


def as_communicator(group: Group) -> Communicator:
    """The communicator of a group of ranks.

    Args:
        group: a zerocast communicator, which is returned as it is; an mpi4py intracommunicator; a torch.distributed
            ProcessGroup; a 1-D DeviceMesh; or None, which means torch.distributed's default group where one is
            initialised, else this rank alone.

    Returns:
        Communicators made from equal groups are equal and have equal hashes.

    Raises:
        InputError: for anything else, or where this rank does not belong to the group.
    """
    if isinstance(group, Communicator):
        return group
    if group is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return TorchDistributedCommunicator(torch.distributed.group.WORLD)
        return SingleRank()
    if _is_mpi(group):
        return MpiCommunicator(group)
    if torch.distributed.is_available():
        return _from_torch(group)
    raise _refusal(group)


def _is_mpi(group: object) -> bool:
    # Whoever holds an mpi4py communicator has imported mpi4py, so this needs no import of ours.
    mpi: Any = sys.modules.get("mpi4py.MPI")
    return mpi is not None and isinstance(group, mpi.Comm)


def _from_torch(group: object) -> Communicator:
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"a group must be a 1-D DeviceMesh, got one of {group.ndim} dimensions, {group.mesh_dim_names}; take the "
                f"dimension that shards the master weights, mesh['name']."
            )
        return TorchDistributedCommunicator(group.get_group())
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
        raise InputError(
            "this rank is not a member of the given torch.distributed group (new_group returns NON_GROUP_MEMBER there); "
            "use the group on its members only."
        )
    if isinstance(group, torch.distributed.ProcessGroup):
        return TorchDistributedCommunicator(group)
    raise _refusal(group)


def _refusal(group: object) -> InputError:
    return InputError(
        f"a group must be a zerocast communicator, an mpi4py communicator, a torch.distributed ProcessGroup, a 1-D "
        f"DeviceMesh or None, got {type(group).__name__}."
    )
