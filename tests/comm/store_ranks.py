"""A process of a gloo group whose store is a TCPStore, as torchrun's is. It makes collectives until
one raises, and prints a line before the first, one where they run, and the error.

Arguments: the store's port; whether this process serves it; rank; ranks; timeout in seconds; and
    forever   make collectives until one raises
    raises    raise an error of its own after some
    ends      make some, and end
    serves    be no rank, serve the store
"""

import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from zerocast.comm import TorchDistributedCommunicator
from zerocast.comm.failure import announcing


def say(words: str) -> None:
    """Print a line now."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
port, serves, rank, size, does = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[6]
store = dist.TCPStore(
    "127.0.0.1", int(port), None, serves == "serves", timedelta(seconds=200), wait_for_workers=False
)
say("store")
if does == "serves":
    sys.stdin.read()
    sys.exit()
dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
comm = TorchDistributedCommunicator(dist.group.WORLD, timeout=float(sys.argv[5]))
comm.barrier()
say("ready")
if does == "ends":
    sys.stdin.readline()
try:
    with announcing([comm]):
        number = 0
        while does != "ends" or number < 20:
            numbers = torch.full((4,), number, dtype=torch.int32)
            comm.all_reduce_max_(numbers)
            assert numbers.tolist() == [number] * 4
            number += 1
            time.sleep(0.01)
            if does == "raises" and number == 10:
                raise OSError("planted")
except BaseException as error:
    say(f"{type(error).__name__}: {error}".replace("\n", " "))
else:
    comm.barrier()
    dist.destroy_process_group()
    say("end")
