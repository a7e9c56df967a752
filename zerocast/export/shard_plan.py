"""ShardPlan: weights cast into codes of this rank's shards, whole only when they are gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from zerocast.arguments import present
from zerocast.cast.consistency import exchange_owners, members_by_group, tp_shards_by_group
from zerocast.cast.shard_spec import (
    NO_CODES,
    ShardBuffers,
    ShardSpec,
    check_amax_groups,
    check_specs,
)
from zerocast.cast.sharded_cast import ShardedCast
from zerocast.comm import Communicator, announcing
from zerocast.export.entries import Entry, Shard
from zerocast.export.gathered import ONE_BY_ONE_FROM, allocate_codes, start_scales
from zerocast.layout import Extent, Owners
from zerocast.numerics import INFINITY_BITS, NVFP4Numerics, byte_span
from zerocast.sharded.all_gather_input import CastShard
from zerocast.sharded.placement import to_local
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.pipeline import CastPipeline
from zerocast.tensors.weight_operands import OwnScales


class EntryOwners:
    """Who owns what of all entries that are cast, asked once; collective, over their ranks.

    Raises:
        RankMismatchError: on every rank, where ranks mean different entries, or their shards do not
            cover each exactly once.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        specs: list[ShardSpec] = []
        members: dict[Communicator, list[int]] = {}
        tp_shards: dict[Communicator, list[int]] = {}
        for i, entry in enumerate(entries):
            shard, tp_shard = present(entry.shard), entry.tp_shard
            storage = QuantizedStorage.empty(
                _own_shape(entry), entry.dtype, present(entry.recipe), torch.device("meta"),
                columnwise=False, tp_shard=tp_shard,
            )  # fmt: skip
            specs.append(
                ShardSpec(entry.name, True, storage, shard.extent, NO_CODES, entry.amax_group)
            )
            members.setdefault(shard.comm, []).append(i)
            if tp_shard is not None and tp_shard.comm is not None:
                tp_shards.setdefault(tp_shard.comm, []).append(i)
        self._owners, _ = exchange_owners(members, tp_shards, specs, "", None)
        self._places = {
            (comm, specs[i].name): place
            for comm, indices in members.items()
            for place, i in enumerate(indices)
        }

    def of(self, comm: Communicator, names: Sequence[str]) -> Owners:
        """Return those of the entries ``names``, which the ranks of ``comm`` share."""
        return self._owners[comm].of_weights([self._places[comm, name] for name in names])


class ShardPlan:
    """A plan for a bucket of entries that are cast once.

    A cast writes the codes of this rank's elements, and the scales of the blocks that begin in
    them, into buffers of their size. No rank has whole codes or scales before :meth:`start_gather`.
    Making a plan is not collective, but for what it may raise: on this rank alone.

    Args:
        entries: those that are cast.
        owners: who owns what of them.
        held_amaxes: by name, int32 [2], the tensor amaxes under which NVFP4 was cast before, which
            this holds or changes (:func:`hold`); None to cast under the weights' own.

    Attributes:
        storages: by name tensor amaxes, and the scales that every rank makes.
        own: by name uint8, the bytes that hold the codes of this rank's elements; bits of other
            elements in them are 0.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        owners: EntryOwners,
        held_amaxes: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._names, self._owners = [entry.name for entry in entries], owners
        self.storages: dict[str, QuantizedStorage] = {}
        self.own: dict[str, torch.Tensor] = {}
        self._scales: dict[str, list[OwnScales]] = {}  # of each matrix
        shards: list[Shard] = []
        for entry in entries:
            shard = present(entry.shard)
            storage, scales = _cast_shard(entry, shard.extent)
            first, last = byte_span(storage.form.numerics.fmt, shard.extent.start, shard.extent.end)
            own = torch.zeros(last - first, dtype=torch.uint8, device=storage.device)
            self.own[entry.name], self.storages[entry.name] = own, storage
            if scales:
                self._scales[entry.name] = scales
            shards.append(shard)
        self._comm_of = [shard.comm for shard in shards]
        weights = [QuantizedTensor(storage) for storage in self.storages.values()]
        masters = [shard.values for shard in shards]
        starts = [None if shard.values is None else shard.extent.start for shard in shards]
        buffers = [self._buffers_of(name) for name in self.storages]
        specs = check_specs(weights, masters, starts, buffers, self._names)
        members = members_by_group(self._comm_of, len(specs))
        check_amax_groups(specs, members)
        self._one_by_one_from = min(ONE_BY_ONE_FROM, max(each.numel() for each in weights))
        cast = ShardedCast(
            weights,
            masters,
            specs,
            members,
            {comm: owners.of(comm, [self._names[i] for i in of]) for comm, of in members.items()},
            tp_shards_by_group(weights),
            boundary=True,
            one_by_one_from=self._one_by_one_from,
        )
        cast.watch()
        self._comms, self._gathers, self._device = cast.comms, cast.gathers, cast.device
        holds = None if held_amaxes is None else partial(_hold_amaxes, cast, held_amaxes)
        self._pipeline = cast.pipeline().having(hold_amaxes=holds)

    def _buffers_of(self, name: str) -> torch.Tensor | ShardBuffers:
        """What receives this rank's part of a weight."""
        if name not in self._scales:
            return self.own[name]
        plane: str = self.storages[name].planes[0].name
        scales = [{plane: each} for each in self._scales[name]]
        return ShardBuffers([self.own[name]], scales, frozenset([plane]))

    def measure(self) -> None:
        """Begin a cast: what comes before ranks send each other anything. Of recipes that cast
        whole blocks as they measure them it is almost all.
        """
        self._run(self._pipeline.before("reduce_amax"))

    def exchange(self) -> None:
        """Go on to where this rank needs nothing more of the others; collective."""
        self._run(self._pipeline.since("reduce_amax").before("compute_scale"))

    def encode(self) -> None:
        """End a cast: its scales, and the codes that wait for them. Its amaxes and launches are let
        go of.
        """
        self._run(self._pipeline.since("compute_scale"))
        self._pipeline = CastPipeline()

    def _run(self, steps: CastPipeline) -> None:
        with announcing(self._comms):
            steps.run()

    def start_gather(self) -> Callable[[], dict[str, QuantizedStorage]]:
        """Begin to bring every rank's codes and scales to every rank; what is returned ends it, and
        returns the weights by name, whole. It holds nothing of this plan, whose codes and scales
        have been copied, but those codes that are a whole weight's.
        """
        whole = {
            name: QuantizedStorage(
                each.shape, each.dtype, each.recipe, dict(each.buffers), each.tp_shard
            )
            for name, each in self.storages.items()
        }
        for name, weight in whole.items():
            codes, own = weight.form.buffers[weight.planes[0].codes_name], self.own[name]
            if len(own) == math.prod(codes.shape):  # this rank has cast all of them
                weight.buffers[weight.planes[0].codes_name] = own.view(codes.shape)
        device = self._device
        allocate_codes(
            [each for each in whole.values() if each.shape.numel() >= self._one_by_one_from],
            device,
        )  # where they are received
        waits = [gather.start_into(whole) for gather in self._gathers]
        self._gathers = []  # each holds what it receives
        waits += self._start_scales(whole)

        def finish() -> dict[str, QuantizedStorage]:
            allocate_codes(whole.values(), device)
            while waits:  # each holds what it has received, until it is stored
                waits.pop(0)()
            found = dict(whole)
            whole.clear()  # its caller may let go of some
            return found

        return finish

    def all_gather_scales(self) -> None:
        """Bring the scales that each rank made to every rank, into :attr:`storages`."""
        for wait in self._start_scales(self.storages):
            wait()

    def _start_scales(self, into: Mapping[str, QuantizedStorage]) -> list[Callable[[], None]]:
        """Begin to gather scales; what is returned ends that, and stores them in the weights
        ``into``, which get memory for them then.
        """
        members: dict[Communicator, list[str]] = {}
        for name, comm in zip(self._names, self._comm_of, strict=True):
            if name in self._scales:
                members.setdefault(comm, []).append(name)
        return [
            start_scales(
                comm,
                self._owners.of(comm, names),
                {name: self.storages[name] for name in names},
                self._scales,
                into,
            )
            for comm, names in members.items()
        ]

    def own_scales(self, name: str) -> torch.Tensor | None:
        """Return the scales of the blocks that begin in this rank's shard, one a block, flat; None
        where every rank has all that are stored, or has to have them before it can tell which are
        its own: those of blocks of several rows, stored for each row.
        """
        if self.storages[name].planes[0].scales.row_repeat > 1 or name not in self._scales:
            return None
        return torch.cat([each.entries for each in self._scales[name]])

    @property
    def repeats_scales(self) -> bool:
        """Whether a weight stores the scale of a block for each of its rows."""
        return any(each.planes[0].scales.row_repeat > 1 for each in self.storages.values())


def _cast_shard(entry: Entry, extent: Extent) -> tuple[CastShard, list[OwnScales]]:
    """Return an entry as its cast finds it, and by matrix room for the scales of the blocks that
    begin in ``extent``; none where every rank makes all scales, which are in the weight then.
    """
    recipe, shape, tp_shard = present(entry.recipe), _own_shape(entry), entry.tp_shard
    device = to_local(entry.tensor).device
    (plane,) = recipe.planes(shape, columnwise=False)
    spans = tp_shard is not None and tp_shard.is_spanned_by(plane, recipe)
    is_owned = not (spans or recipe.has_one_block or not shape.numel())
    left_out = {plane.codes_name} | ({plane.scales_name} if is_owned else set())
    buffers = {
        name: spec.allocate(device)
        for name, spec in recipe.buffers(shape, columnwise=False).items()
        if name not in left_out
    }
    storage = CastShard(shape, entry.dtype, recipe, buffers, tp_shard)
    storage.device, storage.amax_group = device, entry.amax_group
    dtype, numel, scales = recipe.numerics.scale_dtype, plane.grid.numel, list[OwnScales]()
    for start in range(0, shape.numel(), numel) if is_owned else ():
        own = extent.intersect(Extent(start, start + numel))
        blocks = plane.grid.owned(own.shifted(-start)) if own else range(0)
        scales.append(OwnScales(blocks, torch.zeros(len(blocks), dtype=dtype, device=device)))
    return storage, scales


def _hold_amaxes(cast: ShardedCast, held: dict[str, torch.Tensor]) -> None:
    """Let NVFP4 be cast under the tensor amaxes that are ``held``, by name, or hold others."""
    for i, matrix in enumerate(cast.prepared.matrices):
        if isinstance(matrix.storage.recipe.numerics, NVFP4Numerics):
            amax = cast.exchange.buffers.tensor_amaxes[i]
            held[matrix.name] = hold(amax, held.get(matrix.name))
            amax.copy_(held[matrix.name][:1])


def _own_shape(entry: Entry) -> torch.Size:
    """Return the shape of what the ranks of its shard hold of an entry together."""
    return entry.tensor.shape if entry.tp_shard is None else entry.tp_shard.shape


def hold(amax: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
    """Return the tensor amax under which a weight is cast whose own is ``amax``, and the weight's
    own when that was taken, if it was cast under ``held`` before; all are bits of FP32, int32 [1],
    or [2] of both.

    It is the smallest power of two that is not less than ``amax``, and stays so until ``amax``
    grows past it, or shrinks to half of what it was then. 0, what is above 2**127, and what is not
    finite, stays.
    """
    power = (amax + 0x007FFFFF) & 0x7F800000
    subnormal = amax - 1  # has the places of the next power of two below it
    for shift in (1, 2, 4, 8, 16):
        subnormal = subnormal | (subnormal >> shift)
    power = torch.where(amax < 1 << 23, subnormal + 1, power)
    power = torch.where(amax > 0x7F000000, amax, power)  # 2**127, above which FP32 has no power
    taken = torch.cat([power, amax])
    if held is None:
        return taken
    under, own = held[:1], held[1:]
    half = torch.where(own < 2 << 23, own >> 1, own - (1 << 23))
    return torch.where((amax <= under) & (amax > half) & (under < INFINITY_BITS), held, taken)
