"""The casts of masters: which are made together, and the plans that make them.

Most masters are cast alone, when they are gathered. Those of an amax group share one tensor amax,
for which a cast needs them all: they are one *unit*, and are cast together as soon as one of them
is due. :func:`zerocast.sharded.precompute_scales_for_fsdp` casts many units with one plan.

Note: one cast for one value
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A weight may be gathered several times between two steps of the optimizer: in the forward, again in
the backward, for every microbatch. The codes are those of one cast, so what a recipe remembers
moves on once and the backward multiplies by what the forward did. A cast is due where any rank has
written its rows since the latest one, whether torch saw that or not
(:mod:`zerocast.sharded.cast_values`), so the ranks ask each other by one small all-reduce. They do
not ask

* inside a backward, which gathers what its forward did;
* the first time after a cast that was not the gather's own: that of another weight of its amax
  group, or of :func:`zerocast.sharded.precompute_scales_for_fsdp`. Only a rank on which torch sees
  a write asks then, so all ranks must have made that write.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from zerocast.cast import CastPlan
from zerocast.comm import Communicator, Group, SingleRank, as_communicator
from zerocast.errors import InputError
from zerocast.sharded.low_bit_all_gather import AllGatherInput, LowBitAllGather
from zerocast.sharded.placement import tp_shard_of
from zerocast.tensors import QuantizedTensor, TensorParallelShard
from zerocast.tensors.quantize import plain_master


class CastGroupMember(NamedTuple):
    """One weight of a cast.

    Attributes:
        gather: what all pieces of its master have in common.
        master: this rank's rows, where they are between two steps: under FSDP2's CPU offload on
            another device than the codes.
        weight: the parameter of which they are, a DTensor.
    """

    gather: LowBitAllGather
    master: torch.Tensor
    weight: torch.Tensor

    @property
    def tp_shard(self) -> TensorParallelShard | None:
        """What this rank holds of the weight, once FSDP2 has gathered it; None for all of it."""
        gather = self.gather
        return tp_shard_of(gather.name, self.weight, is_fsdp_sharded=gather.is_gathered)

    @property
    def shards(self) -> AllGatherInput:
        """Of a gather that has been prepared."""
        assert self.gather.shards is not None
        return self.gather.shards

    @property
    def shard(self) -> torch.Tensor | None:
        """The master as a plan reads it, on the device of the codes; None where this rank has no
        rows.
        """
        device = self.shards.storage.device
        return plain_master(self.master, device) if self.master.numel() else None


CastGroup: TypeAlias = Sequence[CastGroupMember]
"""Weights that are cast together: one, or those of an amax group."""


def cast_group_of(layer: torch.nn.Module, weight: CastGroupMember) -> CastGroup:
    """What is cast with ``weight``, the weight of ``layer``; in an amax group all of it."""
    group = getattr(layer, "amax_group", None)
    return [weight] if group is None else group.members()


def written_groups(cast_groups: Sequence[CastGroup], comms: Sequence[Communicator]) -> list[bool]:
    """Which of ``units`` any rank has written since their latest casts, seen by torch or not.

    Collective over ``comms``, of each unit the ranks that share its weights, and over those that
    hold parts of them: one small all-reduce a group of ranks.
    """
    votes = torch.cat([_vote(cast_group) for cast_group in cast_groups])
    groups = [[comm] for comm in comms], [_part_comms(cast_group) for cast_group in cast_groups]
    for comms_of_group in groups:
        for comm in dict.fromkeys(itertools.chain(*comms_of_group)):
            indices = [i for i, mine in enumerate(comms_of_group) if comm in mine]
            shared = votes[indices]
            comm.all_reduce_max_(shared)
            votes[indices] = shared
    return votes.bool().tolist()


def _vote(cast_group: CastGroup) -> torch.Tensor:
    """int32 [1] on the device of the codes: 1 where this rank has written one of the masters."""
    device = cast_group[0].shards.storage.device
    written = [
        gather.cast_values.differ_from(master).to(device) for gather, master, _ in cast_group
    ]
    return torch.stack(written).amax().view(1)


def _part_comms(cast_group: CastGroup) -> list[Communicator]:
    return [
        tp_shard.require_comm()
        for member in cast_group
        if (tp_shard := member.tp_shard) is not None
    ]


def plan_casts(cast_groups: Sequence[CastGroup]) -> CastPlan:
    """One plan for the casts of these weights, from this rank's rows of each. Collective.

    All have been prepared for a gather, on one device.
    """
    members = [member for cast_group in cast_groups for member in cast_group]
    shards = [member.shards for member in members]
    for i, cast_group in enumerate(cast_groups):
        for member in cast_group:
            member.shards.storage.amax_group = str(i) if len(cast_group) > 1 else None
    extents = [s.rows.extent(s.comm.rank) for s in shards]
    return CastPlan(
        [QuantizedTensor(s.storage) for s in shards],
        [member.shard for member in members],
        [extent.start if extent else None for extent in extents],
        [s.comm for s in shards],
        names=[gather.name for gather, _, _ in members],
        fsdp_shard_model_weights=[s.own for s in shards],
    )


def run_casts(plan: CastPlan, cast_groups: Sequence[CastGroup]) -> None:
    """Run what :func:`plan_casts` made. Collective: one all-reduce a group of ranks."""
    members = [member for cast_group in cast_groups for member in cast_group]
    plan.cast_and_release([member.shard for member in members])
    for gather, master, _ in members:
        gather.mark_cast(master)


def codes_to_send(
    gather: LowBitAllGather,
    cast_group: CastGroup,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[torch.Tensor, ...], AllGatherInput]:
    """What this rank sends of its rows of one weight, cast where a cast is due, and what the ranks
    know besides. Collective over ``group``, and over that of a part.

    Args:
        gather: of the weight.
        unit: the weight, and those that are cast with it.
        group: the ranks that share them.
        dtype: the nominal one.
        device: where the codes are; masters elsewhere are moved there for the cast.

    Raises:
        InputError: on every rank, where parts begin or end inside a block, or where the unit was
            cast for a gather in another dtype.
    """
    with torch.inference_mode(False):  # else only inference could ever write the buffers
        comm = as_communicator(group)
        _check_group(gather, cast_group, dtype)
        is_due = _is_due_anywhere(gather, cast_group, comm)
        prepared = [
            member.gather.prepare(comm, dtype, device, member.tp_shard, is_due=is_due)
            for member in cast_group
        ]
        if is_due or any(prepared):
            if gather.plan is None:
                gather.plan = plan_casts([cast_group])
            run_casts(gather.plan, [cast_group])
    shards = gather.shards
    assert shards is not None
    shards.was_asked_for = True
    return tuple(shards.rows.to_send(codes) for codes in shards.sent.values()), shards


def ungathered_weight(
    gather: LowBitAllGather, cast_group: CastGroup, master: torch.Tensor
) -> QuantizedTensor:
    """The weight of ``master``, which FSDP2 does not shard, in its dtype; cast with its ``unit``
    where a cast is due. Collective over the group of its part.
    """
    codes, shards = codes_to_send(gather, cast_group, SingleRank(), master.dtype, master.device)
    if gather.ungathered is None:
        gather.ungathered = gather.gathered_weight(codes, shards)[0].quantized_storage
    return QuantizedTensor(gather.ungathered)


def _check_group(gather: LowBitAllGather, cast_group: CastGroup, dtype: torch.dtype) -> None:
    """Raise where others of its unit, gathered in another dtype, had this weight cast for that.
    FSDP2 says the same on every rank.
    """
    shards = gather.shards
    if shards is None or shards.was_asked_for or shards.dtype == dtype:
        return
    others = ", ".join(member.gather.name for member in cast_group if member.gather is not gather)
    raise InputError(
        f"weights of one amax group are cast together, so they must be gathered in one dtype, got "
        f"{shards.dtype} for {others} and {dtype} for {gather.name}; give their modules one "
        f"MixedPrecisionPolicy, or leave one out of amax_groups."
    )


def _is_due_anywhere(gather: LowBitAllGather, cast_group: CastGroup, comm: Communicator) -> bool:
    """Whether any rank of ``comm``, or of the parts' groups, has written a master of ``unit`` since
    its latest cast; see the note above on when they are asked.
    """
    is_settled, gather.is_settled = gather.is_settled, False
    is_due = True
    if all(member.gather.shards is not None for member in cast_group):
        in_backward = torch._C._current_graph_task_id() != -1
        is_seen = not all(each.cast_values.are_in(master) for each, master, _ in cast_group)
        if in_backward or (is_settled and not is_seen):
            return False
        (is_due,) = written_groups([cast_group], [comm])
    for member in cast_group:
        member.gather.is_settled = member.gather is not gather
    return is_due
