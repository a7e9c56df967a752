"""PendingAllGather: all-gathers of a bucket's codes that a step begins and the first use awaits.

Note: gathers that overlap the forward
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A model uses its layers in sequence, so the codes of the last layer are not needed when the first
one begins. With ``overlap_all_gather`` a step begins to gather its buckets of codes and returns.
Any use of a quantized weight's bytes goes through its storage, which calls :meth:`wait` of its
bucket. Such uses are a layer's forward, a torch operation on the weight, decoding, copying, saving
and another cast. The columnwise copies are then rebuilt, so the weights are the same as without the
option. A compiled graph takes its weights when it is entered, and waits for them there.

The use of a plain weight (a bias, a norm, an embedding) cannot be detected. So plain weights are
sent first and gathered before a step returns. Two more uses cannot be detected. Before using a
buffer that was taken from a weight before the step (``weight.rowwise_data``), call
:meth:`ZeroOptimizer.wait_for_all_gather`. For replays of a CUDA graph see :meth:`wait`.

Waiting does not communicate. So ranks may use their weights in different orders, or not at all.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zerocast.comm.communicator import Wait
from zerocast.errors import UnsupportedError
from zerocast.numerics import Launch
from zerocast.tensors import CastVersion, QuantizedStorage, prepare_rebuild
from zerocast.tensors.ledger import Token, announce, watch


class PendingAllGather:
    """The gathers of one bucket's weights, which uses of the weights wait for.

    It exists as long as one of the weights does. When it is collected, or Python exits, it waits
    for gathers in flight, because these write the weights' memory.

    Args:
        storages: the weights of a bucket, on one device.

    Attributes:
        under_way: whether gathers are in flight and have not been waited for.
    """

    def __init__(self, storages: Sequence[QuantizedStorage]) -> None:
        self._device = storages[0].device
        self._storages = [weakref.ref(storage) for storage in storages]  # they refer to self.wait
        self._waits: list[Wait] = []
        self._lock = threading.RLock()
        self.under_way = self._finishing = self._captured = False
        self._failure: Exception | None = None
        self._launches: list[Launch] = []
        self._watched: Token | None = None  # the buffers that they were prepared for
        weakref.finalize(self, _finish, self._waits)
        # It casts nothing, and records when the copies of all weights were made.
        self._version = CastVersion(rebuild_on_use=False)
        weakref.finalize(self, self._version.retire)
        for storage in storages:
            storage.wait_pending = self.wait
            storage.writes.watch(self._version)

    def begin(self, gathers: Iterable[Wait]) -> None:
        """Begin the gathers: iterating ``gathers`` begins each and yields a callable that waits for
        it.

        Raises:
            UnsupportedError: during CUDA graph capture; nothing has begun.
        """
        assert not self.under_way
        if self._is_capturing():
            raise UnsupportedError(
                "a CUDA graph cannot hold a step with overlap_all_gather, whose gathers a later "
                "forward waits for; capture forward and backward only, or make the optimizer "
                "without overlap_all_gather."
            )
        self.under_way = True
        announce("tensor")
        try:
            self._waits.extend(gathers)
        except Exception as error:
            self._failure = error
            raise
        if self._captured:
            self.wait()

    def fail(self, error: Exception) -> None:
        """Make every use raise ``error``, which occurred before a gather could begin."""
        self.under_way, self._failure = True, error

    def wait(self) -> None:
        """Wait until the codes are gathered, and rebuild the copies derived from them.

        A use that a CUDA graph captures is not detected when the graph is replayed. After such a
        capture the bucket is gathered within the step.

        Raises:
            UnsupportedError: if a captured use finds gathers in flight.
            Exception: the error of a failed gather, at every later use.
        """
        if self._is_capturing():
            self._captured = True
            if self.under_way:
                raise UnsupportedError(
                    "a captured CUDA graph uses weights whose all-gather has not completed; call "
                    "optimizer.wait_for_all_gather() before the capture."
                )
        if not self.under_way:
            return
        with self._lock:  # a use in another thread waits as well
            if not self.under_way or self._finishing:  # already gathered, or called recursively
                return
            if self._failure is not None:
                raise self._failure
            self._finishing = True
            try:
                _finish(self._waits)
                with _disable_current_modes():
                    self._rebuild_derived()
            except Exception as error:
                self._failure = error
                raise
            finally:
                self._finishing = False
            self.under_way = False

    def _rebuild_derived(self) -> None:
        """Run the rebuild launches. Prepare them once, and again if a weight has moved."""
        watched = self._watched
        if watched is None or watched.is_announced or watched.changed():
            storages = [storage for each in self._storages if (storage := each()) is not None]
            self._launches = prepare_rebuild(storages)
            buffers = [buffer for storage in storages for buffer in storage.buffers.values()]
            self._watched = watch(buffers, scope="storage")
        for launch in self._launches:
            launch()
        self._version.mark_rebuilt()

    def _is_capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _finish(waits: list[Wait]) -> None:
    """Call and remove each wait. One that fails is also removed, one that is interrupted is not."""
    # Modes that observe or replace torch's operations apply to the caller's operations only. A
    # model may be collected at any time, such as while another is traced.
    with _disable_current_modes():
        while waits:
            try:
                waits[0]()
            except Exception:
                del waits[0]
                raise
            del waits[0]
