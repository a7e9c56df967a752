"""Makes communicators of the groups that users give."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerocast.comm.communicator import Communicator
from zerocast.comm.mpi import MpiCommunicator
from zerocast.comm.single_rank import SingleRank
from zerocast.comm.torch_distributed import TorchDistributedCommunicator
from zerocast.errors import InputError

if TYPE_CHECKING:
    from mpi4py import MPI

Group: TypeAlias = "Communicator | MPI.Intracomm | dist.ProcessGroup | DeviceMesh | None"
"""The types that :func:`as_communicator` accepts."""

_NOT_A_MEMBER: object = dist.GroupMember.NON_GROUP_MEMBER


def as_communicator(group: Group) -> Communicator:
    """Return the communicator of a group of ranks.

    Args:
        group: a zerocast communicator, which is returned as it is; an mpi4py intracommunicator; a
            torch.distributed ProcessGroup; a 1-D DeviceMesh; or None, which means
            torch.distributed's default group where one is initialised, else this rank alone.

    Returns:
        Communicators made from equal groups are equal and have equal hashes.

    Raises:
        InputError: for anything else, or where this rank does not belong to the group.
    """
    if isinstance(group, Communicator):
        return group
    if group is None:
        default = dist.group.WORLD
        return SingleRank() if default is None else TorchDistributedCommunicator(default)
    # An mpi4py communicator exists only if mpi4py has been imported, so it is not imported here.
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(group, mpi.Comm):
        return MpiCommunicator(group)
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"a DeviceMesh must have 1 dimension to be a group, got {group.ndim}, "
                f"{group.mesh_dim_names}; take the one that shards the masters, mesh['name']."
            )
        return TorchDistributedCommunicator(group.get_group())
    if isinstance(group, dist.ProcessGroup):
        return TorchDistributedCommunicator(group)
    if group is _NOT_A_MEMBER:
        raise InputError(
            "a torch.distributed group must have this rank as a member, got NON_GROUP_MEMBER, "
            "which new_group returns on all others; use the group on its members only."
        )
    raise InputError(
        f"a group must be a zerocast communicator, an mpi4py communicator, a torch.distributed "
        f"ProcessGroup, a 1-D DeviceMesh or None, got {type(group).__name__}."
    )
