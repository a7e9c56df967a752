"""CodedGroups: the groups of a ZeRO optimizer of DeepSpeed that hold codes.

A group of DeepSpeed is a flat range of elements, its parameters end to end and padding at the end,
cut evenly over the ranks; each rank has the masters of its part, in FP32. That stays. But where
DeepSpeed keeps the same range once more in 16 bits, the parameters of which are views, here

* codes lie in one buffer a plane for all groups, weight after weight without gaps. A rank's part
  of the range is then a part of that buffer where one group holds codes, and it is all-gathered
  there;
* parameters that are not quantized are end to end in one buffer a group, in their dtype;
* the range of 16 bits is on the meta device: DeepSpeed reads its size, and its writes go nowhere.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast import CastPlan, QuantizedTensor, as_communicator, replace_raw_data
from zerocast.comm import Communicator
from zerocast.layout import Extent


class CodedGroups:
    """Casts the masters of one optimizer into its weights. Making one is collective.

    Args:
        optimizer: a ``DeepSpeedZeroOptimizer`` with masters. Its weights move into buffers of this
            object, with the values that they have.
    """

    def __init__(self, optimizer: Any) -> None:
        weights: list[QuantizedTensor] = []
        masters: list[torch.Tensor | None] = []
        starts: list[int | None] = []
        comms: list[Communicator] = []
        self._plain: list[tuple[Communicator, torch.Tensor, list[int]]] = []
        self._stored: list[torch.Tensor] = []  # parts of weights in high precision ...
        self._sources: list[torch.Tensor] = []  # ... and of the masters that they are stored from
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
            storage.keeps_source = True  # masters may start again from what is loaded
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
        """Let one buffer hold these parameters, each with its place in the group's range, of which
        each rank owns ``size`` elements, this one ``own`` with the masters ``partition``.
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
        """Make every rank's weights from the masters. Collective."""
        for storage in self._storages:
            storage.high_precision_init_val = None  # masters have started from it
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
    """Move the codes of all weights into one buffer a plane."""
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
    """Say whether a flat range of DeepSpeed's stands for a group that holds codes."""
    return flat.is_meta


def coded_groups(flats: Sequence[Any]) -> CodedGroups | None:
    """Return the object that makes the weights of these flat ranges; None if none hold codes."""
    return next((flat.zerocast_groups for flat in flats if is_coded(flat)), None)
