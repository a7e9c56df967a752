"""TorchDistributedCommunicator: ranks are those of a torch.distributed ProcessGroup.

It uses only what every backend can do. Data that is moved and not reduced is sent as bytes, because
gloo has neither float8 nor 16-bit integers. Parts of unequal length are one call under NCCL, which
groups them; gloo gathers only equal ones, so each owner broadcasts its part there, all at once.

NOT here: how a rank waits, and how failures are handled (:mod:`zerocast.comm.torch_peers`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerocast.comm.buffers import AllToAllOperands
from zerocast.comm.communicator import Wait
from zerocast.comm.failure import check_timeout
from zerocast.comm.peers import Begin
from zerocast.comm.processes import ProcessCommunicator
from zerocast.comm.torch_peers import TorchPeers, all_gather, set_timeout, timeout_of
from zerocast.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TorchDistributedCommunicator(ProcessCommunicator):
    """The ranks of a ProcessGroup; ranks here are those of the group, not the global ones.

    A tensor on a device that the group's backends do not serve (the CPU under NCCL alone) is copied
    to one that they do, and back (:meth:`stages` says so).

    Args:
        group: the group; this process is a member of it.
        timeout: the seconds that a collective waits for other ranks, which becomes the group's own
            timeout. None means the one that it has, by ``init_process_group`` or ``new_group``.
    """

    _skips_empty = True

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
        # "cpu:gloo,cuda:nccl" -> by device whose tensors the group takes as they are, the backend
        pairs = [pair.split(":") for pair in dist.get_backend_config(group).split(",")]
        self._backends = dict(pairs)
        if timeout is not None:
            set_timeout(group, check_timeout(timeout))

    # Read when a collective runs: torch.compile traces __init__, and cannot trace these.

    @functools.cached_property
    def timeout(self) -> float:  # type: ignore[override]
        return timeout_of(self._group)

    @functools.cached_property
    def _peers(self) -> TorchPeers:  # type: ignore[override]
        return TorchPeers.of(self._group)

    def stages(self, device: torch.device) -> bool:
        return device.type not in self._backends

    def captures(self, device: torch.device) -> bool:
        return self._backends.get(device.type, "gloo") != "gloo"  # which copies to the host

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's group of these ranks."""
        return self._group

    def barrier(self) -> None:
        begin = lambda: [dist.barrier(self._group, async_op=True)]  # noqa: E731
        self._start("barrier", begin, torch.empty(0, dtype=torch.uint8, device=self._serving))()

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

    @property
    def _compares(self) -> bool:  # type: ignore[override]
        return self._backends.get("cpu") == "gloo"

    @property
    def _serving(self) -> torch.device:  # type: ignore[override]
        """A device whose tensors the group takes."""
        return torch.device(next(iter(self._backends)))

    def _start(self, call: str, begin: Begin, memory: Any, *, reduces: bool = False) -> Wait:
        tensor = memory[0] if isinstance(memory, tuple) else memory
        is_gloo = self._backends[tensor.device.type] == "gloo"
        return self._peers.start(call, begin, memory, self.timeout, is_gloo=is_gloo)

    def _begin_all_reduce(self, what: str, flat: torch.Tensor) -> list[Any]:
        op = dist.ReduceOp.MAX if what == "all_reduce_max_" else dist.ReduceOp.SUM
        return [dist.all_reduce(flat, op, group=self._group, async_op=True)]

    def _begin_all_gather(self, flat: torch.Tensor, chunks: Sequence[int]) -> list[Any]:
        pieces = flat.split(chunks)
        own = pieces[self.rank]
        if len(set(chunks)) == 1:
            return [all_gather(flat, own, group=self._group, async_op=True)]
        if self._backends[flat.device.type] == "nccl":
            return [dist.all_gather(list(pieces), own, group=self._group, async_op=True)]
        sent = [(root, piece) for root, piece in enumerate(pieces) if piece.numel()]
        return [each for root, piece in sent for each in self._begin_broadcast(piece, root)]

    def _begin_all_to_all(self, given: AllToAllOperands) -> list[Any]:
        return [dist.all_to_all_single(*given[:4], group=self._group, async_op=True)]

    def _begin_broadcast(self, flat: torch.Tensor, root: int) -> list[Any]:
        source = dist.get_global_rank(self._group, root)
        return [dist.broadcast(flat, source, group=self._group, async_op=True)]
