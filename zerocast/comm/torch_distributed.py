"""TorchDistributedCommunicator: ranks are those of a torch.distributed ProcessGroup.

Written for what every backend can do. What only moves travels as bytes, since gloo knows neither
float8 nor 16-bit integers. Parts of unequal length are one call under NCCL, which groups them;
since gloo gathers only equal ones, they are broadcast there, each by its owner and all at once.

NOT here: how a rank waits, and what becomes of failures (:mod:`zerocast.comm.torch_peers`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerocast.comm import buffers
from zerocast.comm.communicator import Communicator, Parts, Wait, nothing_to_wait_for
from zerocast.comm.failure import check_timeout
from zerocast.comm.peers import Begin
from zerocast.comm.torch_peers import TorchPeers, all_gather, set_timeout, timeout_of
from zerocast.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TorchDistributedCommunicator(Communicator):
    """The ranks of a ProcessGroup; ranks here are those of the group, not the global ones.

    A tensor on a device that the group's backends do not serve (the CPU under NCCL alone) is copied
    to one that they do, and back (:meth:`stages` says so).

    Args:
        group: the group; this process is a member of it.
        timeout: how many seconds a collective waits for other ranks, which becomes the group's own
            timeout. None means the one that it has, by ``init_process_group`` or ``new_group``.
    """

    def __init__(self, group: ProcessGroup, *, timeout: float | None = None) -> None:
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
        if timeout is not None:
            set_timeout(group, check_timeout(timeout))

    # Read when a collective runs: torch.compile traces __init__, and cannot trace these.

    @functools.cached_property
    def timeout(self) -> float:  # type: ignore[override]
        return timeout_of(self._group)

    @functools.cached_property
    def _peers(self) -> TorchPeers:
        return TorchPeers.of(self._group)

    def stages(self, device: torch.device) -> bool:
        return device.type not in self._backends

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's group of these ranks."""
        return self._group

    def all_reduce_max_(self, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand("all_reduce_max_", buffer)
        self._all_reduce("all_reduce_max_", flat, dist.ReduceOp.MAX)

    def all_reduce_sum_(self, buffer: torch.Tensor) -> None:
        flat = buffers.reduce_operand("all_reduce_sum_", buffer)
        self._all_reduce("all_reduce_sum_", flat, dist.ReduceOp.SUM)

    def all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> None:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if not flat.numel():
            return
        with self._served(flat) as served:
            self._start_all_gather(served, chunks)()

    def start_all_gather_(self, buffer: torch.Tensor, counts: Parts = None) -> Wait:
        flat, chunks = buffers.gather_operands(buffer, counts, self.size)
        if not flat.numel() or self.stages(flat.device):
            return super().start_all_gather_(buffer, counts)
        return self._start_all_gather(flat, chunks)

    def _start_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> Wait:
        """Begin the gather of ``chunks`` bytes a rank; what is returned waits for it."""
        pieces = flat.split(chunks)

        def begin() -> list[Any]:
            if len(set(chunks)) == 1:
                return [all_gather(flat, pieces[self.rank], group=self._group, async_op=True)]
            if self._backends[flat.device.type] == "nccl":
                own = pieces[self.rank]
                return [dist.all_gather(list(pieces), own, group=self._group, async_op=True)]
            return [
                dist.broadcast(piece, self._global(root), group=self._group, async_op=True)
                for root, piece in enumerate(pieces)
                if piece.numel()
            ]

        text = f"all_gather_ of {flat.numel()} bytes in parts #{hash(tuple(chunks)) % 2**32:08x}"
        return self._start(text, begin, flat)

    def start_all_to_all(
        self, output: torch.Tensor, buffer: torch.Tensor, received: Parts = None, sent: Parts = None
    ) -> Wait:
        out, flat, takes, gives = buffers.exchange_operands(
            output, buffer, received, sent, self.size
        )
        staged = self.stages(flat.device)
        # Backends read and write different memory.
        served = flat.to(self._serving) if staged else flat
        if buffers.is_in_place(out, served):
            served = served.clone()
        arrived = torch.empty_like(out, device=served.device) if staged else out
        size = f" of {served.numel()} bytes" if received is None and sent is None else ""
        wait = self._start(
            f"all_to_all{size}",
            lambda: [
                dist.all_to_all_single(
                    arrived, served, takes, gives, group=self._group, async_op=True
                )
            ],
            (served, arrived),
        )
        if staged:
            wait()
            out.copy_(arrived)
            return nothing_to_wait_for
        return wait

    def broadcast_(self, buffer: torch.Tensor, root: int = 0) -> None:
        flat = buffers.broadcast_operand(buffer, root, self.size)
        if flat.numel():
            with self._served(flat) as served:
                self._start(
                    f"broadcast_ of {served.numel()} bytes from rank {root}",
                    lambda: [
                        dist.broadcast(served, self._global(root), group=self._group, async_op=True)
                    ],
                    served,
                )()

    def barrier(self) -> None:
        begin = lambda: [dist.barrier(self._group, async_op=True)]  # noqa: E731
        self._start("barrier", begin, torch.empty(0, dtype=torch.uint8, device=self._serving))()

    def announce(self, error: BaseException) -> None:
        self._peers.announce(error)

    def _start(self, call: str, begin: Begin, memory: Any) -> Wait:
        tensor = memory[0] if isinstance(memory, tuple) else memory
        is_gloo = self._backends[tensor.device.type] == "gloo"
        return self._peers.start(call, begin, memory, self.timeout, is_gloo=is_gloo)

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

    def _all_reduce(self, what: str, flat: torch.Tensor, op: Any) -> None:
        if flat.numel():
            with self._served(flat) as served:
                self._start(
                    f"{what} on {served.dtype} [{served.numel()}]",
                    lambda: [dist.all_reduce(served, op, group=self._group, async_op=True)],
                    served,
                )()

    @property
    def _serving(self) -> torch.device:
        """A device whose tensors the group takes."""
        return torch.device(next(iter(self._backends)))

    def _served(self, tensor: torch.Tensor) -> Any:
        device = self._serving if self.stages(tensor.device) else None
        return buffers.on_device(tensor, device)

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self._group, rank)
