"""MpiPeers: makes every MPI collective end, with its result or with an error on all ranks that run.

MPI itself has no timeouts, and if ranks call different collectives it waits for ever or mixes their
data. So collectives are begun without blocking. This module waits for them, and meanwhile checks
the time, interrupts, and the states of others:

- With each collective a rank sends a message of 136 bytes to the next rank: what it calls, and its
  number in the order of calls. The ring of these messages shows a rank that skips or repeats one,
  before its data are used, and costs no further collective. Before a reduction as many go round as
  the number of ranks has bits, each time to a rank twice as far away, so that none begins where
  ranks call different ones. Maxima of a few numbers go round in them, and take no reduction; so
  does a number of each rank's node, by which all know at the same time whether they share one.
- A rank that times out, or raises, notifies each other rank once. They poll for such notices when
  they begin a collective and, while they wait, every millisecond.
- A process that ends by an exception sends a notice, too. MPI ends a process only when all
  processes end, so it then aborts the job, after :data:`_LAST` seconds if others have not ended.

The memory of an abandoned collective is kept until the process ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from zerocast.comm.communicator import Wait
from zerocast.comm.failure import EXITED, RankState
from zerocast.comm.peers import Begin, Call, Peers
from zerocast.errors import PeerFailedError, ZerocastError

if TYPE_CHECKING:
    from mpi4py import MPI

_NOTICE_TAG, _HEADER_TAG = 24332, 24333
_LAST = 5.0
_PRINTS = 0.3
"""Seconds in which a launcher can pass on printed output, before the job is aborted."""
_BUSY = 1.0
"""Seconds for which a rank waits without sleeping."""

_yield = getattr(os, "sched_yield", functools.partial(time.sleep, 0))
_at_exit: weakref.WeakSet[MpiPeers] = weakref.WeakSet()


class MpiPeers(Peers):
    """The other ranks of one MPI communicator, in one process: see :meth:`of`."""

    _key: int | None = None

    def __init__(self, mpi: Any, comm: MPI.Intracomm) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._mpi, self._comm = mpi, mpi.Intracomm(comm)
        self._distances = [1 << i for i in range((self._size - 1).bit_length())]
        self._exited: set[int] = set()
        self._kept: list[Any] = []
        self._waits: dict[int, Wait] = {}  # by number, of collectives that are under way
        self._status = mpi.Status()
        if not _at_exit:
            atexit.register(_leave_all)
        _at_exit.add(self)

    @classmethod
    def of(cls, mpi: Any, comm: MPI.Intracomm) -> MpiPeers:
        """Return the object of ``comm``, the same for every Python object that refers to it."""
        if MpiPeers._key is None:
            MpiPeers._key = mpi.Comm.Create_keyval()
            # MPI deletes this attribute when it is finalized, before anything else.
            mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=_end_collectives), True)
        peers: Any = comm.Get_attr(MpiPeers._key)
        if peers is None:
            peers = cls(mpi, comm)
            comm.Set_attr(MpiPeers._key, peers)
        assert isinstance(peers, MpiPeers)
        return peers

    def start(
        self, call: str, begin: Begin, memory: Any, timeout: float, *, reduces: bool = False
    ) -> Wait:
        """Begin a collective; return what waits for it.

        Args:
            call: the text of the collective, the same on every rank.
            begin: begins it and returns its requests.
            memory: the buffers that MPI reads and writes until it is over.
            timeout: seconds to wait for others.
            reduces: whether values are reduced, which MPI cannot do with another collective's data:
                then no rank begins before all have called it.

        Raises:
            ZerocastError: where the group has failed before, or another rank has reported that
                it will not call it. The returned wait raises as :class:`Communicator` says.
        """
        made = self._call(call, timeout)
        with self._failing(made, memory):
            if reduces:
                self._compare_all(made)
                requests, header = begin(), None
            else:
                # First, for while it is waited for MPI may receive what was sent before it.
                header = self._send_header(made, 1) if self._size > 1 else None
                requests = begin()
                self._count = made.count
        made.requests += requests

        def wait(memory: Any = memory) -> None:  # alive as long as MPI uses it
            if self._waits.pop(made.count, None) is None and self._failure is None:
                return  # it has ended, and MPI may have, too
            with self._failing(made, memory):
                if header is not None:
                    self._compare(made, *header)
                for request in requests:  # testing all of many again would take longer
                    self._until(made, request.Test)
                self._until(made, functools.partial(self._mpi.Request.Testall, made.requests))

        self._waits[made.count] = wait
        return wait

    def maxima(self, call: str, numbers: Sequence[int], timeout: float) -> list[int]:
        made = self._call(call, timeout)
        with self._failing(made, None):
            largest = self._compare_all(made, numbers)
            self._until(made, functools.partial(self._mpi.Request.Testall, made.requests))
        return largest

    def _compare_all(self, made: Call, numbers: Sequence[int] = ()) -> list[int]:
        """Raise where any rank calls something else; return the largest of all ranks' numbers."""
        largest, self._count = self._numbers(numbers), made.count
        for distance in self._distances:
            header = self._send_header(made, distance, largest)
            self._compare(made, *header)
            largest = [*map(max, largest, self._numbers_in(header[1], len(largest)))]
        return self._learn(largest)

    def _send_header(
        self, made: Call, distance: int, numbers: Sequence[int] = ()
    ) -> tuple[MPI.Request, bytearray, int]:
        """Send the call's header to the rank ``distance`` further, and begin to receive that of the
        rank ``distance`` before; each with the ``numbers`` of its rank.
        """
        own = self._message(made, numbers)
        theirs, tag = bytearray(len(own)), _HEADER_TAG + distance.bit_length()
        source, to = (self._rank - distance) % self._size, (self._rank + distance) % self._size
        received = self._comm.Irecv([theirs, self._mpi.BYTE], source, tag)
        made.requests += [received, self._comm.Isend([own, self._mpi.BYTE], to, tag)]
        return received, theirs, source

    def _compare(self, made: Call, received: MPI.Request, theirs: bytearray, source: int) -> None:
        """Wait for another rank's header, and raise where it is not this rank's."""
        self._until(made, received.Test)
        self._check_message(made, theirs, source)

    def _until(self, made: Call, is_done: Callable[[], bool]) -> None:
        """Return when ``is_done``; raise where that cannot be expected any more."""
        looked = time.monotonic()
        while not is_done():
            _yield()
            now = time.monotonic()
            if now - looked < 1e-3:
                continue
            looked = now
            self._poll()
            self._check_peers(made)
            if now - made.begun > _BUSY:
                time.sleep(1e-4)

    def _keep(self, made: Call, memory: Any) -> None:
        self._kept.append((made.requests, memory))

    def _seen(self, error: BaseException) -> str | None:
        return str(error) if isinstance(error, self._mpi.Exception) else None

    # --- the states of ranks ---

    def _send(self, state: RankState) -> None:
        others = [rank for rank in range(self._size) if rank != self._rank]
        try:
            self._kept += [self._comm.isend(state, rank, _NOTICE_TAG) for rank in others]
        except self._mpi.Exception:  # MPI sends no more; ranks that wait have their timeout
            return

    def _poll(self) -> None:
        status = self._status
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _NOTICE_TAG, status):
            rank = status.Get_source()
            state = self._comm.recv(source=rank, tag=_NOTICE_TAG)
            if state.kind == EXITED:
                self._exited.add(rank)
            if state.kind != EXITED or rank not in self._states:  # an earlier state says why
                self._states[rank] = state

    # --- the end of MPI and of the process ---

    def end_collectives(self) -> None:
        """Wait for what is under way, whose memory may be used after ``MPI.Finalize()``."""
        with suppress(ZerocastError):
            for wait in list(self._waits.values()):
                wait()

    def leave(self, error: BaseException | None) -> bool:
        """Notify the others that this process ends, where ``error`` ends it or the group has
        failed; return whether either is so.
        """
        if error is not None:
            self.announce(error)
        elif self._failure is None:
            return False
        self._failure = self._failure or PeerFailedError("this process ends")
        self._publish(RankState(EXITED, self._count, ""))
        return True

    def all_left(self) -> bool:
        """Say whether all others end as well."""
        self._poll()
        return len(self._exited) == self._size - 1


def _end_collectives(*_: Any) -> None:
    for peers in list(_at_exit):
        peers.end_collectives()


def _leave_all() -> None:
    """End the job where this process has failed, once others have had time to end as well."""
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Is_finalized():
        return
    error = getattr(sys, "last_value", None)
    failed = [peers for peers in list(_at_exit) if peers.leave(error)]
    if not failed:
        return
    until = time.monotonic() + _LAST
    while (waited_for := [each for each in failed if not each.all_left()]) and (
        time.monotonic() < until
    ):
        time.sleep(1e-2)
    if error is not None or waited_for:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_PRINTS)
        mpi.COMM_WORLD.Abort(1)  # Finalize would wait for them, and for abandoned collectives
