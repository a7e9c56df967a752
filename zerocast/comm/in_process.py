"""InProcessCommunicator: ranks that are threads of one process, for tests, for learning, for a
debugger.

It is the strictest of the communicators. If ranks call different collectives, or the same one with
different shapes, or wait for one that has returned, every rank raises an error. Sums are taken in
rank order, so they are the same bits in every run.

Each collective is one exchange: in a rendezvous the ranks see each other's tensors, they fill a
shared result together, and after a second rendezvous copy from it. Of a gather of large parts they
copy these from each other instead. A reduction is split by ranges of elements, not by ranks, so
hundreds of ranks with small tensors do not make hundreds of tiny operations each.
"""

from __future__ import annotations

import functools
import itertools
import pickle
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from zerocast.comm import buffers
from zerocast.comm.communicator import Communicator, Parts, Wait, nothing_to_wait_for
from zerocast.comm.rendezvous import ThreadGroup
from zerocast.comm.uncopied import Uncopied
from zerocast.errors import InputError, RankMismatchError

_GRAIN = 1 << 15
"""The fewest elements of a rank's part that are moved alone: for fewer, the calls cost more."""


_Signature: TypeAlias = tuple[Any, ...]
"""The values that must be equal on all ranks: a collective's name alone, or name, dtype, shape and
None or the counts or the root."""

_Fill: TypeAlias = Callable[[torch.Tensor, list[torch.Tensor]], None]
"""``fill(result, tensors)`` writes one rank's share of a result from all ranks' tensors."""

_DETAILS = {"all_gather_": "counts", "broadcast_": "root"}
"""The name of the last item of a signature, for messages."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A rank's contribution to a collective.

    Attributes:
        signature: the signature of the collective.
        brought: a tensor or an object, this rank's own.
    """

    signature: _Signature
    brought: Any

    def __str__(self) -> str:
        name, *rest = self.signature
        if not rest:
            return name
        dtype, shape, detail = rest
        text = f"{name} on {dtype} {list(shape)}"
        return text if detail is None else f"{text} with {_DETAILS[name]} {reprlib.repr(detail)}"


def _signature(name: str, buffer: torch.Tensor, detail: Any = None) -> _Signature:
    return (name, buffer.dtype, tuple(buffer.shape), detail)


class InProcessCommunicator(Communicator, Uncopied):
    """One rank of a group of threads; made by :func:`run_in_process` and :meth:`split`."""

    instead = "use it in the thread of its rank, and split(color) for other groups"

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = len(group.members)
        self.timeout = group.world.timeout

    def captures(self, device: torch.device) -> bool:
        return False  # the ranks are threads that wait for each other

    def _all_reduce(self, what: str, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand(what, buffer)
        combine = torch.maximum if what == "all_reduce_max_" else torch.add
        flat.copy_(self._reduce(_signature(what, buffer), flat, combine))

    def maxima(self, numbers: Sequence[int]) -> list[int]:
        # No tensors: the operations of torch on them took three times as long as the rendezvous.
        call = _Call(("all_reduce_max_", torch.int32, (len(numbers),), None), numbers)
        return list(self._rendezvous(call, lambda given: [*map(max, zip(*given, strict=True))]))

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        detail = None if counts is None else tuple(counts)
        signature = _signature("all_gather_", buffer, detail)
        ends = [0, *itertools.accumulate(chunks)]
        parts = list(map(slice, ends, ends[1:]))
        if flat.numel() < self.size * _GRAIN:
            mine = parts[self.rank]

            def fill(result: torch.Tensor, tensors: list[torch.Tensor]) -> None:
                result[mine] = flat[mine]

            flat.copy_(self._exchange(signature, flat, fill))
            return
        call = _Call(signature, flat)
        for rank, theirs in enumerate(self._rendezvous(call, list)):
            if rank != self.rank:  # no rank writes the part that others read
                flat[parts[rank]].copy_(theirs[parts[rank]])
            del theirs  # its rank may free it before this thread runs again
        self._group.rendezvous(self.rank, call, None, lambda brought: None)

    def reduce_scatter_sum(self, output: torch.Tensor, buffer: torch.Tensor) -> None:
        output, flat = buffers.scatter_operands(output, buffer, self.size)
        total = self._reduce(_signature("reduce_scatter_sum", buffer), flat, torch.add)
        output.copy_(total.view(self.size, -1)[self.rank])

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        operands = buffers.exchange_operands(output, buffer, received, sent, self.size)
        out, flat, takes, gives, _ = operands
        call = _Call(("all_to_all",), (flat, takes, gives))
        given = self._rendezvous(call, _fitting)
        arrived = torch.cat([theirs.split(sizes)[self.rank] for theirs, _, sizes in given])
        del given  # their ranks may free it before this thread runs again
        self._group.rendezvous(self.rank, call, None, lambda brought: None)
        out.copy_(arrived)
        return nothing_to_wait_for

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)

        def fill(result: torch.Tensor, tensors: list[torch.Tensor]) -> None:
            if self.rank == root:
                result.copy_(flat)

        flat.copy_(self._exchange(_signature("broadcast_", buffer, root), flat, fill))

    def all_gather_object(self, obj: Any) -> list[Any]:
        # One copy by pickle, as on every other transport: peers never share the caller's object.
        copy = pickle.loads(buffers.pickled(obj))
        return list(self._rendezvous(_Call(("all_gather_object",), copy), list))

    def barrier(self) -> None:
        self._rendezvous(_Call(("barrier",), None), list)

    def announce(self, error: BaseException) -> None:
        self._group.world.announce(self._group.members[self.rank], error)

    def split(self, color: int) -> InProcessCommunicator:
        """Return the communicator of the ranks that give the same ``color``, in the order they have
        here.

        Collective: every rank calls it.
        """
        if not isinstance(color, int):
            raise InputError(f"split takes an int as color, got {color!r}.")

        def begin(colors: list[int]) -> dict[int, ThreadGroup]:
            members: dict[int, list[int]] = {}
            for chosen, rank in zip(colors, self._group.members, strict=True):
                members.setdefault(chosen, []).append(rank)
            return {
                chosen: ThreadGroup(self._group.world, ranks) for chosen, ranks in members.items()
            }

        group = self._rendezvous(_Call(("split",), color), begin)[color]
        return InProcessCommunicator(group, group.members.index(self._group.members[self.rank]))

    def __repr__(self) -> str:
        return f"InProcessCommunicator(rank={self.rank}, size={self.size})"

    def _reduce(
        self, signature: _Signature, flat: torch.Tensor, combine: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Reduce the ranks' tensors by ``combine`` in rank order. Up to one grain, the last rank to
        arrive reduces all, in a single rendezvous; else each rank reduces a range of the elements.
        """
        if flat.numel() * self.size <= _GRAIN:

            def begin(tensors: list[torch.Tensor]) -> torch.Tensor:
                return functools.reduce(combine, tensors[1:], tensors[0].clone())

            return self._rendezvous(_Call(signature, flat), begin)
        grain = max(_GRAIN, -(-flat.numel() // self.size))
        mine = slice(self.rank * grain, (self.rank + 1) * grain)

        def fill(result: torch.Tensor, tensors: list[torch.Tensor]) -> None:
            chunk = result[mine]
            if chunk.numel():
                chunk.copy_(tensors[0][mine])
                for tensor in tensors[1:]:
                    combine(chunk, tensor[mine], out=chunk)

        return self._exchange(signature, flat, fill)

    def _exchange(self, signature: _Signature, flat: torch.Tensor, fill: _Fill) -> torch.Tensor:
        """Return a new tensor like ``flat``, shared by all ranks, that their ``fill`` have written.
        After the exchange no rank reads another rank's tensor.
        """

        def begin(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
            return torch.empty_like(flat), tensors

        call = _Call(signature, flat)
        result, tensors = self._rendezvous(call, begin)
        fill(result, tensors)
        del tensors  # their ranks may free them before this thread runs again
        self._group.rendezvous(self.rank, call, None, lambda brought: None)
        return result

    def _rendezvous(self, call: _Call, begin: Callable[[list[Any]], Any]) -> Any:
        """Take part in a rendezvous for ``call``; return what ``begin`` makes of all contributions,
        if all ranks make the same call.
        """

        def compare(calls: list[_Call]) -> Any:
            for rank, other in enumerate(calls):
                if other.signature != calls[0].signature:
                    return RankMismatchError(
                        f"every rank of a group must call the same collective with the same dtype "
                        f"and shape: rank 0 called {calls[0]}, rank {rank} called {other}."
                    )
            return begin([each.brought for each in calls])

        outcome = self._group.rendezvous(self.rank, call, call, compare)
        if isinstance(outcome, RankMismatchError):
            raise RankMismatchError(*outcome.args)  # a separate exception on each rank
        return outcome


def _fitting(
    given: list[tuple[torch.Tensor, list[int], list[int]]],
) -> list[tuple[torch.Tensor, list[int], list[int]]] | RankMismatchError:
    """Return the contributions to an all-to-all, if every part is as long as its receiver
    expects.
    """
    for sender, (_, _, gives) in enumerate(given):
        for receiver, (_, takes, _) in enumerate(given):
            if gives[receiver] != takes[sender]:
                return RankMismatchError(
                    f"in all_to_all every rank must receive what is sent to it: rank {sender} "
                    f"sends {gives[receiver]} bytes to rank {receiver}, which receives "
                    f"{takes[sender]}."
                )
    return given
