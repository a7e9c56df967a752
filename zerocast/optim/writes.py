"""Writes: which weights somebody else has written, and what becomes of their masters.

A step makes the weights from the masters, so whoever writes a weight in between (the model's
``load_state_dict``, ``copy_``, a broadcast) would see it undone. Instead the masters start anew
from what was written. A plain weight tells by torch's version counter, a quantized one by its own,
which sees every way of writing but that through a buffer that was taken out of it. Of a plain
weight an element that still is the rounding of its master keeps the master. A quantized weight
keeps the value that a copy was given, so its masters start from that and not from its rounding.

Ranks must hold the same values when masters are taken from them, each its part. What ranks find is
compared where any has found something, which the reduce-scatter of gradients tells; so a step in
which nothing was written costs nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from zerocast.comm import agree, lines_that_differ
from zerocast.errors import InputError, RankMismatchError, UnsupportedError
from zerocast.optim.shards import ShardedWeights
from zerocast.optim.weights import Weight, value_digests
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.digest import digest


class Writes:
    """Finds what others have written into the weights of an optimizer since it did.

    Args:
        shards: the weights and this rank's masters.
    """

    def __init__(self, shards: ShardedWeights) -> None:
        self._shards = shards
        self._found: set[int] = set()
        self._versions: list[int] = []
        for weight in shards.weights:
            if isinstance(weight.param, QuantizedTensor):
                weight.param.quantized_storage.keeps_source = True
        self.settle()

    def look(self) -> bool:
        """Whether a weight was written on this rank whose new value is not settled."""
        now = [_version(weight) for weight in self._shards.weights]
        pairs = zip(now, self._versions, strict=True)
        self._found.update(i for i, (mine, known) in enumerate(pairs) if mine != known)
        return bool(self._found)

    def mark(self, indices: Iterable[int]) -> None:
        """Let these weights count as written."""
        self._found.update(indices)

    def take(self) -> None:
        """Start the masters of what was written here anew, from this rank's values.

        Raises:
            UnsupportedError: in the capture of a CUDA graph, whose replays would do it again.
        """
        if not self.look():
            return
        if self._shards.masters.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph cannot hold the step after weights were written, which starts their "
                "masters anew; make one step before the capture."
            )
        for i in sorted(self._found):
            self._shards.restart_master(i)

    def settle(self) -> None:
        """The weights have just been made from the masters; nothing of theirs is to be taken."""
        for i in self._found:
            param = self._shards.weights[i].param
            if isinstance(param, QuantizedTensor):
                param.clear_high_precision_init_val()
        self._found.clear()
        self._versions = [_version(weight) for weight in self._shards.weights]

    def agree_and_take(self) -> None:
        """Collective: :meth:`agree` where any rank has found something, then :meth:`take`."""
        found = self.look()
        if not agree(self._shards.comm, int(found)) or found:
            self.agree()
        self.take()

    def agree(self) -> None:
        """Collective: let all ranks find the same.

        A weight that all ranks hold alike and some have not seen written is what it was (a
        broadcast of the weights from one rank). One whose given value only some ranks keep starts
        from its codes.

        Raises:
            RankMismatchError: on every rank, where ranks hold different values.
        """
        self.look()
        weights = self._shards.weights
        kept = [_kept(weight) for weight in weights]
        values = value_digests([weight.param for weight in weights])
        sources = ["nothing" if value is None else str(int(digest(value))) for value in kept]
        lines = [
            f"{value} from {source} written {i in self._found}"
            for i, (value, source) in enumerate(zip(values, sources, strict=True))
        ]
        everyone = lines_that_differ(self._shards.comm, lines)
        if everyone is None:
            return
        for i, theirs in enumerate(zip(*everyone, strict=True)):
            said = [line.split() for line in theirs]
            given = {source for _, _, source, _, _ in said}
            if len({value for value, *_ in said}) > 1 or len(given - {"nothing"}) > 1:
                raise RankMismatchError(
                    f"{weights[i].name} must hold the same value on every rank when it was written "
                    "since the optimizer's last step, and ranks hold different ones; write it on "
                    "every rank (model.load_state_dict on all, or a broadcast), or call "
                    "optimizer.load_state_dict afterwards, which takes masters from its state."
                )
            if any(written == "False" for *_, written in said):
                self._found.discard(i)
                self._versions[i] = _version(weights[i])
            if len(given) > 1 and kept[i] is not None:
                weights[i].param.clear_high_precision_init_val()  # type: ignore[attr-defined]


def _kept(weight: Weight) -> torch.Tensor | None:
    """The value that a quantized weight was given, where it keeps it."""
    if isinstance(weight.param, QuantizedTensor):
        return weight.param.quantized_storage.high_precision_init_val
    return None


def _version(weight: Weight) -> int:
    """Another number after every write that is seen."""
    if isinstance(weight.param, QuantizedTensor):
        return weight.param.quantized_storage.version
    return weight.param._version


def index_of(weights: Iterable[Weight], param: torch.Tensor, call: str) -> int:
    """The place of ``param`` among the weights.

    Raises:
        InputError: where it is none of them; the message names ``call``.
    """
    for i, weight in enumerate(weights):
        if weight.param is param:
            return i
    raise InputError(
        f"{call} needs one of this optimizer's trainable parameters, got another tensor."
    )
