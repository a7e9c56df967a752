"""Two ranks that are copies of one process which had imported zerocast gather large parts. Each
prints whether it reads the other's memory before and after, and how many bytes are wrong.

Arguments: a file for a store of torch's, and what the copies are:
    processes   forked: others for the system
    containers  forked, each process 1 of a namespace of its own
    machines    the same, which the system tells by nothing: its random numbers are the same, too
"""

import ctypes
import os
import secrets
import sys

import torch
import torch.distributed as dist

from zerocast.comm import TorchDistributedCommunicator, peers, processes

STORE, COPIES = sys.argv[1:]
REFUSED = 77
"""The exit code where this user may make no namespace."""
_NEW_PROCESS_NAMESPACE = 0x20000000


def rank(number: int) -> int:
    """Gather twice; return how many bytes are wrong."""
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=number, world_size=2)
    comm = TorchDistributedCommunicator(dist.group.WORLD)
    comm.maxima([0])
    shown = comm._reads_memory(2 << 21)
    wrong = 0
    for turn in range(2):
        whole = (torch.arange(2 << 21) * (turn + 3) % 251).to(torch.uint8)
        gathered = torch.zeros_like(whole)
        gathered.chunk(2)[number].copy_(whole.chunk(2)[number])
        comm.all_gather_(gathered)
        wrong += int((gathered != whole).sum())
    sys.stdout.write(f"rank {number}: {shown} {comm._reads_memory(2 << 21)} {wrong}\n")
    sys.stdout.flush()
    comm.barrier()
    dist.destroy_process_group()
    return wrong


def copied(number: int) -> None:
    """Be a copy of this process that is a rank."""
    if COPIES != "processes" and ctypes.CDLL(None).unshare(_NEW_PROCESS_NAMESPACE):
        os._exit(REFUSED)
    child = os.fork()  # the first in the namespace is its process 1
    if child == 0:
        os._exit(rank(number) > 0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)


processes._LARGE = 1 << 20
if COPIES == "machines":
    peers.node = lambda: "one name"
    secrets.randbits = lambda bits: 5
forked = []
for each in range(2):
    forked.append(os.fork())
    if forked[-1] == 0:
        copied(each)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in forked))
