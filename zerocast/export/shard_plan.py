"""ShardPlan: weights cast into codes of this rank's shards, whole only when they are gathered."""

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
"""Weights of so many elements or more are gathered one by one, each where its codes are to lie: a
collective more takes less time than copying them would. So is the largest of a plan."""


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
        storages: by name what this rank casts. In the bytes of its codes, bits of other ranks'
            elements are 0.
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
            for codes_name, own in self.storages[name].own_codes.items():
                codes = weight.form.buffers[codes_name]
                if len(own) == math.prod(codes.shape):  # this rank has cast all of them
                    weight.buffers[codes_name] = own.view(codes.shape)
        device = self._device
        _allocate_codes(
            [each for each in whole.values() if each.shape.numel() >= self._one_by_one_from],
            device,
        )  # where they are received
        waits = [gather.start_into(whole) for gather in self._gathers]
        self._gathers = []  # each holds what it receives
        waits += self._start_scales(whole)

        def finish() -> dict[str, QuantizedStorage]:
            _allocate_codes(whole.values(), device)
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
            if self.storages[name].own_scales:
                members.setdefault(comm, []).append(name)
        return [
            _start_scales(
                comm, self._owners.of(comm, names), {n: self.storages[n] for n in names}, into
            )
            for comm, names in members.items()
        ]

    def own_scales(self, name: str) -> torch.Tensor | None:
        """Return the scales of the blocks that begin in this rank's shard, one a block, flat; None
        where every rank has all that are stored, or has to have them before it can tell which are
        its own: those of blocks of several rows, stored for each row.
        """
        storage = self.storages[name]
        if storage.planes[0].scales.row_repeat > 1 or not storage.by_owner:
            return None
        return storage.own_scales["rowwise"].entries

    @property
    def repeats_scales(self) -> bool:
        """Whether a weight stores the scale of a block for each of its rows."""
        return any(each.planes[0].scales.row_repeat > 1 for each in self.storages.values())


def _allocate_codes(weights: Iterable[QuantizedStorage], device: torch.device) -> None:
    """Allocate the whole codes, all of which a gather writes, of the weights that have none."""
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
    """Begin to bring the scales of ``shards``, by name, to every rank of ``comm``; what is returned
    ends that, and stores them in the weights ``into``, which get memory for them then.
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
            else:  # every rank has made them
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
    """Return the shape of what the ranks of its shard hold of an entry together."""
    return entry.tensor.shape if entry.tp_shard is None else entry.tp_shard.shape


def _hold_amaxes(cast: ShardedCast, held: dict[str, torch.Tensor]) -> None:
    """Let NVFP4 be cast under the tensor amaxes that are ``held``, by name, or hold others."""
    for i, matrix in enumerate(cast.prepared.matrices):
        if isinstance(matrix.storage.recipe.numerics, NVFP4Numerics):
            amax = cast.exchange.buffers.tensor_amaxes[i]
            held[matrix.name] = hold(amax, held.get(matrix.name))
            amax.copy_(held[matrix.name][:1])


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
