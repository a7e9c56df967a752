"""TorchPeers: makes every collective of a gloo group end, with its result or with an error.

gloo waits as long as its group's timeout says, in C++, where no interrupt reaches it, and ends the
process where two ranks' tensors differ in length. So a rank waits in slices of time, and between
these reads the states of others. Before each collective every rank sends each other 136 bytes:
what it calls, its number in the order of calls, and a number of its node. A maximum of a few
numbers travels in these bytes and takes no further collective: so do all votes by which ranks
agree. Ranks write that they timed out, or what they raised, to the group's store. A rank reads it
only when it has waited for a slice of time, and never waits for its host longer than for such a
slice. A rank that has failed sends no bytes, so no other rank passes this exchange.

NCCL has its own watchdog, which ends the process after the group's timeout. Its collectives, in
which the host takes no part, are not monitored here; an error of torch becomes
:class:`zerocast.PeerFailedError`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import json
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from zerocast.comm.communicator import Wait
from zerocast.comm.failure import DEFAULT_TIMEOUT, GRACE, LATE, TIMED_OUT, RankState
from zerocast.comm.peers import Begin, Call, Peers
from zerocast.comm.store_thread import StoreThread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

_SLICE = timedelta(seconds=0.2)
_FLAG = "any state"

_LAST = 0.2
"""Seconds that a process leaves gloo's threads before it ends, where a group still exists."""

_of_groups: weakref.WeakKeyDictionary[ProcessGroup, TorchPeers] = weakref.WeakKeyDictionary()

# A thread of gloo needs the GIL after a collective has ended, to release its tensors. If Python
# finalizes meanwhile, the process aborts (pytorch/pytorch#190489). destroy_process_group joins the
# threads unless something else holds the group. Default arguments of the module below hold for ever
# the group that exists when it is imported, which torch.optim does for the first optimizer.
if dist.group.WORLD is None:
    importlib.import_module("torch.distributed.nn.functional")


@atexit.register
def _leave_threads_the_gil() -> None:
    """Let threads of gloo finish whose group something holds, as a model under FSDP2 does."""
    if _of_groups:
        time.sleep(_LAST)


class TorchPeers(Peers):
    """The other ranks of one ProcessGroup: see :meth:`of`."""

    _polls_first = False

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group = weakref.ref(group)
        self._store = dist.PrefixStore("zerocast", c10d._get_process_group_store(group))
        self._received: dict[int, RankState] = {}
        self._thread = StoreThread()
        self._thread.call(self._open, 0.0)

    @classmethod
    def of(cls, group: ProcessGroup) -> TorchPeers:
        """Return the object of ``group``, one for each group."""
        if group not in _of_groups:
            _of_groups[group] = cls(group)
        return _of_groups[group]

    def start(
        self,
        call: str,
        begin: Begin,
        memory: Any,
        timeout: float,
        *,
        is_gloo: bool,
    ) -> Wait:
        """Begin a collective; return what waits for it.

        Args:
            call: the text of the collective, the same on every rank.
            begin: begins it.
            memory: the buffers that torch reads and writes until it is over.
            timeout: seconds to wait for others.
            is_gloo: whether gloo does it.

        Raises:
            ZerocastError: where the group has failed before, another rank calls something else, or
                has reported that it will not call it. The returned wait raises as
                :class:`Communicator` says.
        """
        looks = is_gloo and self._size > 1
        made = self._call(call, timeout) if looks else Call(call, self._count + 1, timeout, 0.0)
        self._count = made.count
        with self._failing(made, memory):
            if looks:
                self._compare(made)
            made.requests += begin()

        def wait(memory: Any = memory) -> None:  # alive as long as the backend uses it
            with self._failing(made, memory):
                for work in made.requests:
                    if looks:
                        self._until(made, work)
                    else:
                        work.wait()

        return wait

    def maxima(self, call: str, numbers: Sequence[int], timeout: float) -> list[int]:
        if self._size == 1:
            return self._learn(self._numbers(numbers))
        made = self._call(call, timeout)
        self._count = made.count
        with self._failing(made, None):
            return self._compare(made, numbers)

    def _compare(self, made: Call, numbers: Sequence[int] = ()) -> list[int]:
        """Raise where any rank calls something else; return the largest of all ranks' numbers."""
        own = self._numbers(numbers)
        message = self._message(made, own)
        sent = torch.frombuffer(message * self._size, dtype=torch.uint8)
        everyone = bytearray(len(sent))
        into = torch.frombuffer(everyone, dtype=torch.uint8)
        # gloo gathers in a ring, whose ranks wait for one message after the other.
        self._until(made, dist.all_to_all_single(into, sent, group=self._group(), async_op=True))
        size = len(message)
        by_rank = [everyone[i * size : (i + 1) * size] for i in range(self._size)]
        for rank, theirs in enumerate(by_rank):
            self._check_message(made, theirs, rank)
        given = (self._numbers_in(theirs, len(own)) for theirs in by_rank)
        return self._learn([*map(max, *given)])

    def _until(self, made: Call, work: Work) -> None:
        """Wait for a collective of gloo; raise if it cannot be expected to end."""
        while True:
            with contextlib.suppress(RuntimeError):
                work.wait(_SLICE)
                return
            # Over by now: it failed, or it ended after this slice.
            if is_over := work.is_completed():
                with contextlib.suppress(RuntimeError):
                    work.wait()
                    return
            self._poll()
            # A rank that timed out had waited for most of the timeout, so before this rank called.
            is_new = time.monotonic() - made.begun < min(GRACE, made.timeout / 2)
            timed_out = {state.kind for state in self._states.values()} <= {TIMED_OUT, LATE}
            self._check_peers(made, LATE if is_new and timed_out else TIMED_OUT)
            if is_over:
                work.wait()  # no state explains more than its error

    def _keep(self, made: Call, memory: Any) -> None:
        """Keep nothing: torch keeps tensors as long as it uses them."""

    def _seen(self, error: BaseException) -> str | None:
        is_of_torch = type(error) is RuntimeError or isinstance(error, dist.DistError)
        return str(error).split(". ")[0] if is_of_torch else None

    # --- the states of ranks; a store whose host has ended holds none ---

    def _send(self, state: RankState) -> None:
        self._thread.call(functools.partial(self._write, state), GRACE)

    def _poll(self) -> None:
        if self._thread.is_idle:  # else an earlier call has not returned yet
            self._thread.call(self._read, _SLICE.total_seconds())
        self._states.update(self._received)

    # in the thread

    def _open(self) -> None:
        # A group that is made again has the name of the one that failed, whose states stay in it.
        made = self._store.add(f"made by {self._rank}", 1)
        self._store = dist.PrefixStore(f"{made}", self._store)

    def _write(self, state: RankState) -> None:
        self._store.set(str(self._rank), json.dumps(dataclasses.astuple(state)))
        self._store.set(_FLAG, "yes")

    def _read(self) -> None:
        if self._store.check([_FLAG]):
            for rank in range(self._size):
                if rank != self._rank and self._store.check([str(rank)]):
                    self._received[rank] = RankState(*json.loads(self._store.get(str(rank))))


def timeout_of(group: ProcessGroup) -> float:
    """Return the seconds after which a collective of ``group`` times out."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            options: Any = group._get_backend(torch.device(device)).options
            return float(options._timeout.total_seconds())
    return DEFAULT_TIMEOUT


def set_timeout(group: ProcessGroup, timeout: float) -> None:
    """Make collectives of ``group`` time out after so many seconds."""
    c10d._set_pg_timeout(timedelta(seconds=min(timeout, 1e9)), group)


# torch 2.13 calls it *_single, and newer releases warn of the older name.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
