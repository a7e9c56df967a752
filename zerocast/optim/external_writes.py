"""ExternalWrites: detects weights that other code has written, and restarts their masters.

A step computes the weights from the masters, so it would overwrite any write in between (the
model's ``load_state_dict``, ``copy_``, a broadcast). Instead the masters restart from the written
values. A quantized weight counts its writes, except those through a buffer taken from it. A plain
weight is compared with the published values by a digest of its bytes, because torch does not count
writes through ``.data``. An element that is still the rounding of its master keeps the master. A
quantized weight keeps the value that was copied into it, so its master restarts from that value and
not from its rounding.

Each rank restarts its shard of the masters, so the values must be equal on all ranks. Ranks compare
them only if any rank has found a write, which is exchanged with the gradients. A step without such
writes costs only two reads of the plain weights. On a GPU the host does not wait for the digests:
the device restarts masters of plain weights that differ, and ranks are not compared.
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
    """The tracker of weights that other code has written since the optimizer wrote them.

    Args:
        shards: the weights and this rank's masters.
        casts: returns how often the optimizer has cast its quantized weights. If no other writes
            are counted in total, the weights are not checked one by one.
    """

    def __init__(self, shards: ShardedWeights, casts: Callable[[], int]) -> None:
        self._shards, self._casts = shards, casts
        self._found: set[int] = set()
        self._versions = {i: 0 for i, weight in enumerate(shards.weights) if weight.kind.is_codes}
        self._others: int | None = None  # all counted writes except this optimizer's casts
        buckets = [bucket for bucket in shards.buckets if not bucket.kind.is_codes]
        self._plain = shards.plain
        self._values = watch(value for bucket in buckets for value in bucket.plain_values)
        for weight in shards.weights:
            if weight.storage is not None:
                weight.storage.keeps_source = True
        self.discard()

    def look(self, *, waits: bool = True) -> bool:
        """Return whether this rank has found writes since the weights were made from the masters.
        Without ``waits``, leave plain weights to :meth:`take`, so that no GPU is waited for.
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
        """Return a number that changes with every write of a quantized weight other than this
        optimizer's casts.
        """
        storage = self._shards.weights[index].storage
        assert storage is not None
        return storage.version - self._casts()

    def mark(self, indices: Iterable[int]) -> None:
        """Mark these weights as written. Plain ones are ignored, because their digests are
        compared.
        """
        self._found.update(i for i in indices if i in self._versions)

    def take(self) -> None:
        """Restart the masters of the weights that :meth:`look` has found from this rank's values.

        Raises:
            UnsupportedError: during CUDA graph capture, because replays would repeat it.
        """
        is_cpu = self._shards.masters.device.type == "cpu"
        if self._found and not is_cpu and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph cannot capture the step after weights were written, which "
                "initializes their masters again; make one step before the capture."
            )
        self._shards.restart_masters(sorted(self._found & self._versions.keys()))
        if self._plain and not (is_cpu and self._found.isdisjoint(self._plain)):
            self._shards.restart_plain_masters(self._differ)

    def discard(self) -> None:
        """Discard the found writes, after the weights have been made from the masters."""
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
        """Call :meth:`agree` if any rank has found a write, then :meth:`take`. Collective."""
        found = self.look()
        if not agree(self._shards.comm, int(found)) or found:
            self.agree()
        self.take()

    def agree(self) -> None:
        """Make the found writes equal on all ranks, after :meth:`look`. Collective.

        A weight with equal values on all ranks that was not written on some has not changed (one
        rank's weights were broadcast). If only some ranks keep the value that was copied into a
        weight, its master restarts from the codes.

        Raises:
            RankMismatchError: on every rank, if ranks hold different values.
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
