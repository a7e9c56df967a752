"""ShardPlan: casts this rank's shards of weights, which become whole only when gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from zerocast.arguments import present
from zerocast.cast.amax_buffers import planes_by_owner
from zerocast.cast.consistency import exchange_owners, members_by_group, tp_shards_by_group
from zerocast.cast.matrices import Matrices
from zerocast.cast.scale_gather import ScaleGather
from zerocast.cast.shard_spec import ShardSpec, check_amax_groups, check_specs
from zerocast.cast.sharded_cast import ShardedCast
from zerocast.comm import Communicator, announcing
from zerocast.export.entries import Entry
from zerocast.layout import Owners
from zerocast.numerics import INFINITY_BITS, NVFP4Numerics
from zerocast.sharded.placement import to_local
from zerocast.tensors import QuantizedStorage, QuantizedTensor, prepare_expansion
from zerocast.tensors.ledger import announce
from zerocast.tensors.owned_shard import OwnedShard
from zerocast.tensors.pipeline import CastPipeline

ONE_BY_ONE_FROM = 1 << 20
"""Weights of at least this many elements, and the largest of a plan, are gathered one by one,
directly into their codes: an additional collective takes less time than a copy."""


class EntryOwners:
    """The owners of all entries that are cast, exchanged once. Collective over their ranks.

    Raises:
        RankMismatchError: on every rank, if ranks have different entries, or their shards do not
            cover each entry exactly once.
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
            specs.append(ShardSpec(entry.name, True, storage, shard.extent, {}, entry.amax_group))
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
        """Return the owners of the entries ``names``, which the ranks of ``comm`` share."""
        return self._owners[comm].of_weights([self._places[comm, name] for name in names])


class ShardPlan:
    """A plan for a bucket of entries that are cast once.

    A cast writes the codes of this rank's elements, and the scales of the blocks that begin in
    them, into buffers of their size. No rank has whole codes or scales before :meth:`start_gather`.
    Making a plan is not collective, and may raise on this rank alone.

    Args:
        entries: the entries to cast.
        owners: the owners of all entries.
        held_amaxes: by name, int32 [2], the tensor amaxes of earlier NVFP4 casts, which this plan
            keeps or updates (see :func:`hold`); None to cast with the weights' amaxes.

    Attributes:
        storages: by name, this rank's part of each weight. In a byte of codes that this rank
            shares with another, the other rank's bits are 0.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        owners: EntryOwners,
        held_amaxes: dict[str, torch.Tensor] | None = None,
    ) -> None:
        self._names, self._owners = [entry.name for entry in entries], owners
        self.storages: dict[str, OwnedShard] = {}
        shards = [present(entry.shard) for entry in entries]
        for entry, shard in zip(entries, shards, strict=True):
            storage = self.storages[entry.name] = OwnedShard.allocate(
                _own_shape(entry), entry.dtype, present(entry.recipe),
                to_local(entry.tensor).device, shard.extent, tp_shard=entry.tp_shard,
            )  # fmt: skip
            storage.amax_group = entry.amax_group
        self._comm_of = [shard.comm for shard in shards]
        weights = [QuantizedTensor(storage) for storage in self.storages.values()]
        masters = [shard.values for shard in shards]
        starts = [None if shard.values is None else shard.extent.start for shard in shards]
        specs = check_specs(weights, masters, starts, None, self._names)
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

    def measure(self) -> None:
        """Run the steps of the cast before the first exchange between ranks. For recipes that cast
        whole blocks while measuring them, this is almost all of the work.
        """
        self._run(self._pipeline.before("reduce_amax"))

    def exchange(self) -> None:
        """Run the steps of the cast that exchange data between ranks. Collective."""
        self._run(self._pipeline.since("reduce_amax").before("compute_scale"))

    def encode(self) -> None:
        """Run the last steps of the cast: scales, and the codes that depend on them. Then release
        its amaxes and launches.
        """
        self._run(self._pipeline.since("compute_scale"))
        self._pipeline = CastPipeline()

    def _run(self, steps: CastPipeline) -> None:
        with announcing(self._comms):
            steps.run()

    def start_gather(self) -> Callable[[], dict[str, QuantizedStorage]]:
        """Start the gather of all codes and scales to every rank. The returned function waits for
        it, and returns the whole weights by name.

        That function keeps no memory of this plan, whose codes and scales have been copied, except
        codes of weights that this rank has cast entirely.
        """
        whole = {
            name: QuantizedStorage(
                each.shape, each.dtype, each.recipe, dict(each.buffers), each.tp_shard
            )
            for name, each in self.storages.items()
        }
        for name, weight in whole.items():
            for codes_name, own in self.storages[name].own_codes.items():
                codes = weight.form.buffers[codes_name]
                if len(own) == math.prod(codes.shape):  # this rank has cast all of them
                    weight.buffers[codes_name] = own.view(codes.shape)
        device = self._device
        _allocate_codes(
            [each for each in whole.values() if each.shape.numel() >= self._one_by_one_from],
            device,
        )  # the gather receives into them
        waits = [gather.start_into(whole) for gather in self._gathers]
        self._gathers = []  # each keeps the memory that it receives into
        waits += self._start_scales(whole)

        def finish() -> dict[str, QuantizedStorage]:
            _allocate_codes(whole.values(), device)
            while waits:  # each keeps the data that it received until that is stored
                waits.pop(0)()
            found = dict(whole)
            whole.clear()  # so that the caller can release weights
            return found

        return finish

    def all_gather_scales(self) -> None:
        """Gather the scales that each rank computed into :attr:`storages`, on every rank."""
        for wait in self._start_scales(self.storages):
            wait()

    def _start_scales(self, into: Mapping[str, QuantizedStorage]) -> list[Callable[[], None]]:
        """Start the gather of scales. The returned functions wait for it, then allocate the scales
        of the weights ``into`` and store them.
        """
        members: dict[Communicator, list[str]] = {}
        for name, comm in zip(self._names, self._comm_of, strict=True):
            if self.storages[name].own_scales:
                members.setdefault(comm, []).append(name)
        return [
            _start_scales(
                comm, self._owners.of(comm, names), {n: self.storages[n] for n in names}, into
            )
            for comm, names in members.items()
        ]

    def own_scales(self, name: str) -> torch.Tensor | None:
        """Return the scales of the blocks that begin in this rank's shard, flat, one per block.

        Return None if every rank has all stored scales, or needs all of them to find its part. The
        latter is so for blocks of several rows whose scale is stored for each row.
        """
        storage = self.storages[name]
        if storage.planes[0].scales.row_repeat > 1 or not storage.by_owner:
            return None
        return storage.own_scales["rowwise"].entries

    @property
    def repeats_scales(self) -> bool:
        """Whether any weight stores the scale of a block for each of its rows."""
        return any(each.planes[0].scales.row_repeat > 1 for each in self.storages.values())


def _allocate_codes(weights: Iterable[QuantizedStorage], device: torch.device) -> None:
    """Allocate whole codes, uninitialized, for weights without any; a gather writes all of them."""
    for weight in weights:
        name = weight.planes[0].codes_name
        if name not in weight.buffers:
            codes = weight.form.buffers[name]
            weight.buffers[name] = torch.empty(codes.shape, dtype=codes.dtype, device=device)
    announce()


def _start_scales(
    comm: Communicator,
    owners: Owners,
    shards: Mapping[str, OwnedShard],
    into: Mapping[str, QuantizedStorage],
) -> Callable[[], None]:
    """Start the gather of the scales of ``shards``, by name, to every rank of ``comm``. The
    returned function waits for it, then allocates the scales of ``into`` and stores them.
    """
    specs = [ShardSpec(name, True, each, each.extent, {}, None) for name, each in shards.items()]
    matrices, group = Matrices(specs), {comm: range(len(specs))}
    found = matrices.specs()
    planes = {i: (each.storage, planes_by_owner(each)) for i, each in enumerate(found)}
    gather = ScaleGather(comm, planes, matrices.owners(group, {comm: owners})[comm], is_kept=False)
    rooms, made = list[torch.Tensor](), list[torch.Tensor]()
    for i, spec in enumerate(found):
        assert isinstance(spec.storage, OwnedShard)
        for name, own in spec.storage.own_scales.items():
            if name in gather.own[i]:
                rooms.append(gather.own[i][name].entries)
                made.append(own.entries)
            else:  # every rank has computed all of them
                gather.compact[i][name] = own.entries
    wait = None
    if rooms:
        torch._foreach_copy_(rooms, made)
        wait = gather.start()
    names, device = list(shards), specs[0].storage.device

    def finish() -> None:
        if wait is not None:
            wait()
        for weight in map(into.__getitem__, names):
            name = weight.form.planes[0].scales_name
            weight.buffers[name] = weight.form.buffers[name].allocate(device)
        stored = [matrix for name in names for matrix in into[name].matrices]
        for launch in prepare_expansion(stored, gather.compact):
            launch()

    return finish


def _own_shape(entry: Entry) -> torch.Size:
    """Return the shape of the part of an entry that the ranks of its shard hold together."""
    return entry.tensor.shape if entry.tp_shard is None else entry.tp_shard.shape


def _hold_amaxes(cast: ShardedCast, held: dict[str, torch.Tensor]) -> None:
    """Set the tensor amaxes of NVFP4 weights by :func:`hold`, and update ``held``, by name."""
    for i, matrix in enumerate(cast.prepared.matrices):
        if isinstance(matrix.storage.recipe.numerics, NVFP4Numerics):
            amax = cast.exchange.buffers.tensor_amaxes[i]
            held[matrix.name] = hold(amax, held.get(matrix.name))
            amax.copy_(held[matrix.name][:1])


def hold(amax: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
    """Return int32 [2]: the tensor amax to cast with, and the weight's amax when it was chosen.

    The amax to cast with is the smallest power of two that is at least ``amax``. ``held`` is
    returned unchanged until ``amax`` exceeds its power of two, or shrinks to half of the weight's
    amax in ``held``. An ``amax`` that is 0, above 2**127 or not finite is used as it is.

    Args:
        amax: the weight's tensor amax, as FP32 bits, int32 [1].
        held: what this returned for the previous cast; None for the first.
    """
    power = (amax + 0x007FFFFF) & 0x7F800000
    subnormal = amax - 1  # all its bits below the highest are set next
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
