"""ShardPlan: weights cast into codes of this rank's shards, whole only when they are gathered."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zerocast.cast import CastPlan
from zerocast.export.entries import Entry, Shard
from zerocast.formats import byte_span
from zerocast.sharded.placement import to_local
from zerocast.tensors import QuantizedStorage, QuantizedTensor


class ShardPlan(CastPlan):
    """A plan for a bucket of entries that are cast; collective, over their ranks.

    A cast writes the codes of this rank's elements into buffers of their size, and makes all
    scales. No rank holds whole codes before :meth:`start_gather`.

    Attributes:
        entries: those that are cast, by name.
        storages: scales and tensor amaxes by name; whole codes after a gather.
        own: by name uint8, the bytes that hold the codes of this rank's elements; bits of other
            elements in them are 0.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = {entry.name: entry for entry in entries}
        self.storages: dict[str, QuantizedStorage] = {}
        self.own: dict[str, torch.Tensor] = {}
        shards: list[Shard] = []
        for entry in entries:
            assert entry.recipe is not None
            assert entry.shard is not None
            recipe, shard = entry.recipe, entry.shard
            shape, device = entry.tensor.shape, to_local(entry.tensor).device
            (plane,) = recipe.planes(shape, columnwise=False)
            buffers = {
                name: spec.allocate(device)
                for name, spec in recipe.buffers(shape, columnwise=False).items()
                if name != plane.codes_name
            }
            storage = QuantizedStorage(shape, entry.dtype, recipe, buffers)
            storage.amax_group = entry.amax_group
            first, last = byte_span(recipe.numerics.fmt, shard.extent.start, shard.extent.end)
            self.own[entry.name] = torch.zeros(last - first, dtype=torch.uint8, device=device)
            self.storages[entry.name] = storage
            shards.append(shard)
        super().__init__(
            [QuantizedTensor(storage) for storage in self.storages.values()],
            [shard.values for shard in shards],
            [shard.extent.start if shard.values is not None else None for shard in shards],
            [shard.comm for shard in shards],
            names=list(self.storages),
            fsdp_shard_model_weights=list(self.own.values()),
        )

    def start_gather(self) -> Callable[[], dict[str, QuantizedStorage]]:
        """Begin to bring every rank's codes to every rank; what is returned ends it, and returns
        :attr:`storages` with whole codes.
        """
        waits = [gather.start() for gather in self._gathers]

        def finish() -> dict[str, QuantizedStorage]:
            for storage in self.storages.values():
                (plane,) = storage.recipe.planes(storage.shape, columnwise=False)
                spec = storage.recipe.buffers(storage.shape, columnwise=False)[plane.codes_name]
                storage.buffers[plane.codes_name] = spec.allocate(storage.device)
            while waits:  # each holds what it has received, until it is stored
                waits.pop(0)()
            return self.storages

        return finish
