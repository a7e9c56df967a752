"""Communicators connect a rank with the others: one contract, three transports.

In-process ranks are threads (:func:`run_in_process`), MPI ranks are reached through mpi4py, and any
torch.distributed ProcessGroup works. :func:`as_communicator` makes a communicator of any of these
groups.
"""

from zerocast.comm.agreement import (
    Attempt,
    agree,
    lines_that_differ,
    raise_together,
    raising_together,
)
from zerocast.comm.communicator import Communicator
from zerocast.comm.failure import DEFAULT_TIMEOUT, alone, announcing
from zerocast.comm.groups import Group, as_communicator
from zerocast.comm.in_process import InProcessCommunicator
from zerocast.comm.mpi import MpiCommunicator
from zerocast.comm.recording import RecordingCommunicator, Traffic
from zerocast.comm.single_rank import SingleRank
from zerocast.comm.thread_ranks import run_in_process
from zerocast.comm.torch_distributed import TorchDistributedCommunicator
from zerocast.errors import PeerFailedError, PeerTimeoutError

__all__ = [
    "DEFAULT_TIMEOUT",
    "Attempt",
    "Communicator",
    "Group",
    "InProcessCommunicator",
    "MpiCommunicator",
    "PeerFailedError",
    "PeerTimeoutError",
    "RecordingCommunicator",
    "SingleRank",
    "TorchDistributedCommunicator",
    "Traffic",
    "agree",
    "alone",
    "announcing",
    "as_communicator",
    "lines_that_differ",
    "raise_together",
    "raising_together",
    "run_in_process",
]
