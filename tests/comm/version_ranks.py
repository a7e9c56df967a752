"""A rank of three, the second of which runs other versions. Each plans a cast, and prints the error
that it gets; after all of them, and on equal versions, the group casts.

Argument: ``mpi``, or ``gloo`` under torchrun.
"""

import contextlib
import sys
from unittest import mock

import torch
import torch.distributed as dist

import zerocast
from zerocast import versions

OTHER = {
    "zerocast": mock.patch.object(versions, "__version__", "9.8.7"),
    "torch": mock.patch.object(torch, "__version__", "9.8.7+cpu"),
    "Python": mock.patch.object(sys, "version_info", (9, 8, 7)),
    "a Python's patch": mock.patch.object(sys, "version_info", (*sys.version_info[:2], 99)),
    "a torch's build": mock.patch.object(
        torch, "__version__", f"{torch.__version__.partition('+')[0]}+other"
    ),
}


def cast(comm: zerocast.comm.Communicator) -> str:
    """The first error of a plan and its cast; "" where there is none."""
    weight = zerocast.empty((16, 48), "nvfp4")
    own = torch.full((16 * 16,), 1.0 + comm.rank)
    try:
        plan = zerocast.CastPlan([weight], [own], [comm.rank * 16 * 16], comm)
        plan.cast()
        plan.all_gather()
    except zerocast.RankMismatchError as error:
        return str(error)
    return ""


if sys.argv[1] == "mpi":
    from mpi4py import MPI

    comm = zerocast.as_communicator(MPI.COMM_WORLD)
else:
    dist.init_process_group("gloo")
    comm = zerocast.as_communicator(None)
lines = []
for what, patch in OTHER.items():
    with patch if comm.rank == 1 else contextlib.nullcontext():
        lines.append(f"{comm.rank}|{what}|{cast(comm)}\n")
sys.stdout.write("".join(lines))  # in one write: a launcher mixes those of several ranks
sys.stdout.flush()
comm.barrier()
if sys.argv[1] != "mpi":
    dist.destroy_process_group()
