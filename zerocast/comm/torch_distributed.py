"""TorchDistributedCommunicator: ranks are those of a torch.distributed ProcessGroup.

Written for what every backend can do. What only moves travels as bytes, since gloo knows neither
float8 nor 16-bit integers. Parts of unequal length are one call under NCCL, which groups them;
since gloo gathers only equal ones, they are broadcast there, each by its owner and all at once.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerocast.comm import buffers
from zerocast.comm.communicator import Communicator, nothing_to_wait_for
from zerocast.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TorchDistributedCommunicator(Communicator):
    """The ranks of a ProcessGroup; ranks here are those of the group, not the global ones.

    A tensor on a device that the group's backends do not serve (the CPU under NCCL alone) is copied
    to one that they do, and back (:meth:`stages` says so).

    Args:
        group: the group; this process is a member of it.
    """

    def __init__(self, group: ProcessGroup) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise InputError(
                "TorchDistributedCommunicator takes a torch.distributed ProcessGroup that this "
                f"rank belongs to, got {type(group).__name__}."
            )
        # Weak, because torch.distributed owns it: a gloo group that a plan in some global variable
        # kept past destroy_process_group() would abort the process when Python exits.
        self._reference = weakref.ref(group)
        self._hash = hash((TorchDistributedCommunicator, id(group)))
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # "cpu:gloo,cuda:nccl" -> the devices whose tensors the group takes as they are, and by whom
        pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
        self._backends = dict(pairs)

    def stages(self, device: torch.device) -> bool:
        return device.type not in self._backends

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's group of these ranks."""
        return self._group

    def all_reduce_max_(self, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand("all_reduce_max_", buffer)
        self._all_reduce(flat, dist.ReduceOp.MAX)

    def all_reduce_sum_(self, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand("all_reduce_sum_", buffer)
        self._all_reduce(flat, dist.ReduceOp.SUM)

    def all_gather_(self, buffer: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if not flat.numel():
            return
        with self._served(flat) as served:
            self._start_all_gather(served, chunks)()

    def start_all_gather_(
        self, buffer: torch.Tensor, counts: Sequence[int] | None = None
    ) -> Callable[[], None]:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if not flat.numel() or self.stages(flat.device):
            return super().start_all_gather_(buffer, counts)
        return self._start_all_gather(flat, chunks)

    def _start_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> Callable[[], None]:
        """Begin the gather of ``parts`` bytes a rank; what is returned waits for it."""
        pieces = flat.split(chunks)
        if len(set(chunks)) == 1:
            works = [_all_gather(flat, pieces[self.rank], group=self._group, async_op=True)]
        elif self._backends[flat.device.type] == "nccl":
            own = pieces[self.rank]
            works = [dist.all_gather(list(pieces), own, group=self._group, async_op=True)]
        else:
            works = [
                dist.broadcast(piece, self._global(root), group=self._group, async_op=True)
                for root, piece in enumerate(pieces)
                if piece.numel()
            ]

        def wait() -> None:
            for work in works:
                work.wait()

        return wait

    def reduce_scatter_sum(self, output: torch.Tensor, buffer: torch.Tensor) -> None:
        output, flat = buffers.scatter_operands(output, buffer, self.size)
        if not flat.numel():
            return
        with self._served(output) as result:
            _reduce_scatter(result, flat.to(result.device), group=self._group)

    def start_all_to_all(
        self,
        output: torch.Tensor,
        buffer: torch.Tensor,
        received: Sequence[int] | None = None,
        sent: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        out, flat, takes, gives = buffers.exchange_operands(
            output, buffer, received, sent, self.size
        )
        staged = self.stages(flat.device)
        # Backends read and write different memory.
        served = flat.to(self._serving) if staged else flat
        if buffers.is_in_place(out, served):
            served = served.clone()
        arrived = torch.empty_like(out, device=served.device) if staged else out
        work = dist.all_to_all_single(
            arrived, served, takes, gives, group=self._group, async_op=True
        )
        if staged:
            work.wait()
            out.copy_(arrived)
            return nothing_to_wait_for

        def wait(memory: Any = served) -> None:  # alive as long as the backend reads it
            work.wait()

        return wait

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)
        if flat.numel():
            with self._served(flat) as served:
                dist.broadcast(served, self._global(root), group=self._group)

    def all_gather_object(self, obj: Any) -> list[Any]:
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, buffers.pickled(obj), group=self._group)
        return [pickle.loads(each) for each in objects]

    def barrier(self) -> None:
        dist.barrier(self._group)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TorchDistributedCommunicator):
            return False
        return self._reference == other._reference

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"TorchDistributedCommunicator(rank={self.rank}, size={self.size})"

    @property
    def _group(self) -> ProcessGroup:
        group = self._reference()
        if group is None:
            raise InputError(
                "a communicator works as long as its torch.distributed group, which has been "
                "destroyed; make new plans and optimizers with a group that exists."
            )
        return group

    def _all_reduce(self, flat: torch.Tensor, op: Any) -> None:
        if flat.numel():
            with self._served(flat) as served:
                dist.all_reduce(served, op, group=self._group)

    @property
    def _serving(self) -> torch.device:
        """A device whose tensors the group takes."""
        return torch.device(next(iter(self._backends)))

    def _served(self, tensor: torch.Tensor) -> Any:
        device = self._serving if self.stages(tensor.device) else None
        return buffers.on_device(tensor, device)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)


# Newer torch calls these *_single and warns of the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
