"""ExternalWrites: finds the weights that other code has written, and starts their masters from
them.

A step makes the weights from the masters, so a write in between (the model's ``load_state_dict``,
``copy_``, a broadcast) would be undone. Instead the masters start again from what was written. A
quantized weight counts its writes, but for those through a buffer that was taken out of it. A plain
one is written where the digest of its bytes is not that of what the optimizer has published: torch
does not count writes through ``.data``. Where an element of it still is the rounding of its master,
the master stays. A quantized weight keeps the value that was copied into it, so its master starts
from that and not from its rounding.

Ranks must hold the same values when masters are taken from them, each rank its shard. Ranks compare
these values only where any rank has found a write, which they learn from the reduce-scatter of
gradients; so a step without such writes costs no more than two readings of the plain weights. On a
GPU the host does not wait for the digests: masters of plain weights start again where the device
finds them to differ, and ranks are not compared.
"""

from collections.abc import Callable, Iterable
from itertools import compress

import torch

from zerocast.comm import agree
from zerocast.errors import RankMismatchError, UnsupportedError
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.stepped_weights import value_digests
from zerocast.tensors import CastVersion
from zerocast.tensors.digest import digest
from zerocast.tensors.ledger import watch


class ExternalWrites:
    """Finds the weights of an optimizer that other code has written since the optimizer did.

    Args:
        shards: the weights and this rank's masters.
        casts: returns how often the optimizer has cast its quantized weights. Where no more writes
            are counted of any, none of them needs to be looked at.
    """

    def __init__(self, shards: ShardedWeights, casts: Callable[[], int]) -> None:
        self._shards, self._casts = shards, casts
        self._found: set[int] = set()
        self._versions = {i: 0 for i, weight in enumerate(shards.weights) if weight.kind.is_codes}
        self._others: int | None = None  # of all writes those that are no casts of the optimizer's
        buckets = [bucket for bucket in shards.buckets if not bucket.kind.is_codes]
        self._plain = shards.plain
        self._values = watch(value for bucket in buckets for value in bucket.plain_values)
        for weight in shards.weights:
            if weight.storage is not None:
                weight.storage.keeps_source = True
        self.settle()

    def look(self, *, waits: bool = True) -> bool:
        """Return whether a weight was written on this rank whose new value is not settled. On a GPU
        the answer of plain weights is waited for, or without ``waits`` left to :meth:`take`.
        """
        others = self._count_others()
        if others != self._others:
            self._others = others
            self._found.update(i for i, v in self._versions.items() if self._version(i) != v)
        if self._plain:
            self._differ = self._values.differs()
            if waits:
                self._found.update(compress(self._plain, self._differ.tolist()))
        return bool(self._found)

    def _count_others(self) -> int:
        return CastVersion.all_writes - self._casts()

    def _version(self, index: int) -> int:
        """A number that changes with every write of a quantized weight that is no cast of the
        optimizer's.
        """
        storage = self._shards.weights[index].storage
        assert storage is not None
        return storage.version - self._casts()

    def mark(self, indices: Iterable[int]) -> None:
        """Let these weights count as written, but for plain ones, whose bytes tell."""
        self._found.update(i for i in indices if i in self._versions)

    def take(self) -> None:
        """Start the masters of what :meth:`look` has found here again from this rank's values.

        Raises:
            UnsupportedError: in the capture of a CUDA graph, whose replays would do it again.
        """
        is_cpu = self._shards.masters.device.type == "cpu"
        if self._found and not is_cpu and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph cannot hold the step after weights were written, which starts their "
                "masters again; make one step before the capture."
            )
        self._shards.restart_masters(sorted(self._found & self._versions.keys()))
        if self._plain and not (is_cpu and self._found.isdisjoint(self._plain)):
            self._shards.restart_plain_masters(self._differ)

    def settle(self) -> None:
        """Forget what was found: the weights have just been made from the masters."""
        others = self._count_others()
        if self._found or others != self._others:
            self._versions.update((i, self._version(i)) for i in self._versions)
        for i in self._found:
            self._forget_init_value(i)
        self._found.clear()
        self._others = others
        if self._plain:
            self._values.keep_bytes()

    def agree_and_take(self) -> None:
        """Call :meth:`agree` where any rank has found something, then :meth:`take`. Collective."""
        found = self.look()
        if not agree(self._shards.comm, int(found)) or found:
            self.agree()
        self.take()

    def agree(self) -> None:
        """Let all ranks find the same writes, after :meth:`look`. Collective.

        A weight that has the same values on all ranks, and was not written on some, has not changed
        (one rank's weights were broadcast). Where only some ranks keep the value that was copied
        into a weight, its master starts from the codes.

        Raises:
            RankMismatchError: on every rank, where ranks hold different values.
        """
        weights = self._shards.weights
        kept = [weight.init_value for weight in weights]
        sources = [None if value is None else int(digest(value)) for value in kept]
        written = [i in self._found for i in range(len(weights))]
        mine = list(zip(value_digests(weights), sources, written, strict=True))
        everyone = self._shards.comm.all_gather_object(mine)
        for i, by_rank in enumerate(zip(*everyone, strict=True)):
            values, found_sources, were_written = map(set, zip(*by_rank, strict=True))
            if len(values) > 1 or len(found_sources - {None}) > 1:
                raise RankMismatchError(
                    f"{weights[i].name} must hold the same value on every rank when it was written "
                    "since the optimizer's last step, and ranks hold different ones; write it on "
                    "every rank (model.load_state_dict on all, or a broadcast), or call "
                    "optimizer.load_state_dict afterwards, which takes masters from its state."
                )
            if False in were_written and i in self._versions:
                self._found.discard(i)
                self._versions[i] = self._version(i)
            if len(found_sources) > 1:
                self._forget_init_value(i)

    def _forget_init_value(self, index: int) -> None:
        if (storage := self._shards.weights[index].storage) is not None:
            storage.high_precision_init_val = None
