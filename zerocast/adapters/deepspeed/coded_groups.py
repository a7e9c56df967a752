"""CodedGroups: the groups of a ZeRO optimizer of DeepSpeed that hold codes.

A group of DeepSpeed is a flat range of elements: its parameters concatenated, with padding at the
end. The range is divided evenly over the ranks, and each rank has the FP32 masters of its part.
This adapter keeps that. DeepSpeed has the same range again in 16 bits, and the parameters are views
of it. Instead of that, here

* the codes of all groups are in one buffer per plane, weight after weight without gaps. If only one
  group holds codes, a rank's part of the range is a part of that buffer, and is all-gathered there;
* unquantized parameters of a group are concatenated in one buffer, in their dtype;
* the 16-bit range is on the meta device: DeepSpeed reads its size, and writes to it have no effect.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast import CastPlan, QuantizedTensor, as_communicator, replace_raw_data
from zerocast.comm import Communicator
from zerocast.layout import Extent


class CodedGroups:
    """The coded groups of one optimizer, whose masters it casts. Making one is collective.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer`` with masters. Its weights are moved into buffers of
            this object, and keep their values.
    """

    def __init__(self, optimizer: Any) -> None:
        weights: list[QuantizedTensor] = []
        masters: list[torch.Tensor | None] = []
        starts: list[int | None] = []
        comms: list[Communicator] = []
        self._plain: list[tuple[Communicator, torch.Tensor, list[int]]] = []
        self._stored: list[torch.Tensor] = []  # this rank's parts of unquantized parameters ...
        self._sources: list[torch.Tensor] = []  # ... and the masters that are copied into them
        for group, params in enumerate(optimizer.round_robin_bit16_groups):
            if not any(isinstance(param, QuantizedTensor) for param in params):
                continue
            comm = as_communicator(optimizer.real_dp_process_group[group])
            size = optimizer.partition_size[group]
            own = Extent(comm.rank * size, (comm.rank + 1) * size)
            partition = optimizer.single_partition_of_fp32_groups[group].detach()
            plain: list[tuple[torch.Tensor, Extent]] = []
            offsets = optimizer.round_robin_bit16_offsets[group]
            for param, offset in zip(params, offsets, strict=True):
                whole = Extent(offset, offset + param.numel())
                if not isinstance(param, QuantizedTensor):
                    plain.append((param, whole))
                    continue
                part = whole.intersect(own)
                weights.append(param)
                masters.append(_part(partition, part.shifted(-own.start)) if part else None)
                starts.append(part.start - whole.start if part else None)
                comms.append(comm)
            if plain:
                self._add_plain(plain, comm, size, own, partition)
        _lay_end_to_end(weights)
        self._storages = [weight.quantized_storage for weight in weights]
        for storage in self._storages:
            storage.keeps_source = True  # masters may be initialized again from loaded values
        names = [optimizer.param_names[weight] for weight in weights]
        self._plan = CastPlan(weights, masters, starts, comms, names=names, exchange="boundary")

    def _add_plain(
        self,
        plain: Sequence[tuple[torch.Tensor, Extent]],
        comm: Communicator,
        size: int,
        own: Extent,
        partition: torch.Tensor,
    ) -> None:
        """Move unquantized parameters into one buffer.

        Args:
            plain: the parameters, with their ranges in the group's range.
            comm: the ranks of the group.
            size: the elements of the group's range that each rank owns.
            own: those that this rank owns.
            partition: the masters of ``own``.
        """
        buffer = torch.cat([param.data.reshape(-1) for param, _ in plain])
        counts, end = [0] * comm.size, 0
        for param, whole in plain:
            held = Extent(end, end := end + whole.size)
            param.data = _part(buffer, held).view(param.shape)
            for rank in range(comm.size):
                counts[rank] += whole.intersect(Extent(rank * size, (rank + 1) * size)).size
            if part := whole.intersect(own):
                self._stored.append(_part(buffer, part.shifted(held.start - whole.start)))
                self._sources.append(_part(partition, part.shifted(-own.start)))
        self._plain.append((comm, buffer, counts))

    @torch.no_grad()
    def publish(self) -> None:
        """Cast the masters, and gather the weights on every rank. Collective."""
        for storage in self._storages:
            storage.high_precision_init_val = None  # masters were initialized from it
        if self._stored:
            torch._foreach_copy_(self._stored, self._sources)
        self._plan.cast()
        waits = [comm.start_all_gather_(buffer, counts) for comm, buffer, counts in self._plain]
        self._plan.all_gather()
        for wait in waits:
            wait()


def _part(flat: torch.Tensor, extent: Extent) -> torch.Tensor:
    return flat[extent.start : extent.end]


def _lay_end_to_end(weights: Sequence[QuantizedTensor]) -> None:
    """Move the codes of all weights into one buffer per plane."""
    storages = [weight.quantized_storage for weight in weights]
    places = {"rowwise_data": 0, "columnwise_data": 0}
    buffers = {
        plane: torch.empty(
            sum(s.buffers[plane].numel() for s in storages if plane in s.gathered),
            dtype=torch.uint8,
            device=weights[0].device,
        )
        for plane in places
    }
    for weight, storage in zip(weights, storages, strict=True):
        moved = []
        for plane in storage.gathered:
            begin = places[plane]
            places[plane] += storage.buffers[plane].numel()
            moved.append(buffers[plane][begin : places[plane]])
        replace_raw_data(weight, *moved)


def is_coded(flat: torch.Tensor) -> bool:
    """Return whether a flat range of DeepSpeed is that of a group that holds codes."""
    return flat.is_meta


def coded_groups(flats: Sequence[Any]) -> CodedGroups | None:
    """Return the object that holds the weights of these flat ranges; None if none has codes."""
    return next((flat.zerocast_groups for flat in flats if is_coded(flat)), None)
