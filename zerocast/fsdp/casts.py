"""The casts of masters: which are made together, and the plans that make them.

Most masters are cast alone, when they are gathered. Those of an amax group share one tensor amax,
for which a cast needs them all: they are one *unit*, and are cast together as soon as one of them
is due. :func:`zerocast.fsdp.precompute_scales_for_fsdp` casts many units with one plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from zerocast.cast import CastPlan
from zerocast.comm import Communicator
from zerocast.fsdp.parts import part_of
from zerocast.tensors import Part, QuantizedTensor
from zerocast.tensors.quantize import plain_master

if TYPE_CHECKING:
    from zerocast.fsdp.low_bit_gather import LowBitGather, ShardCodes


class Member(NamedTuple):
    """One weight of a cast.

    Attributes:
        gather: what all pieces of its master have in common.
        master: this rank's rows, where they are between two steps: under FSDP2's CPU offload on
            another device than the codes.
        weight: the parameter of which they are, a DTensor.
    """

    gather: LowBitGather
    master: torch.Tensor
    weight: torch.Tensor

    @property
    def part(self) -> Part | None:
        """What this rank holds of the weight, once FSDP2 has gathered it; None for all of it."""
        gather = self.gather
        return part_of(gather.name, self.weight, is_fsdp_sharded=gather.is_gathered)

    @property
    def shards(self) -> ShardCodes:
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


Unit: TypeAlias = Sequence[Member]
"""Weights that are cast together: one, or those of an amax group."""


def unit_of(layer: torch.nn.Module, weight: Member) -> Unit:
    """What is cast with ``weight``, the weight of ``layer``; in an amax group all of it."""
    group = getattr(layer, "amax_group", None)
    return [weight] if group is None else group.members()


def written_units(units: Sequence[Unit], comms: Sequence[Communicator]) -> list[bool]:
    """Which of ``units`` any rank has written since their latest casts, seen by torch or not.

    Collective over ``comms``, of each unit the ranks that share its weights, and over those that
    hold parts of them: one small all-reduce a group of ranks.
    """
    votes = torch.cat([_vote(unit) for unit in units])
    groups = [[comm] for comm in comms], [_part_comms(unit) for unit in units]
    for comms_of_unit in groups:
        for comm in dict.fromkeys(itertools.chain(*comms_of_unit)):
            indices = [i for i, mine in enumerate(comms_of_unit) if comm in mine]
            shared = votes[indices]
            comm.all_reduce_max_(shared)
            votes[indices] = shared
    return votes.bool().tolist()


def _vote(unit: Unit) -> torch.Tensor:
    """int32 [1] on the device of the codes: 1 where this rank has written one of the masters."""
    device = unit[0].shards.storage.device
    written = [gather.cast_values.differ_from(master).to(device) for gather, master, _ in unit]
    return torch.stack(written).amax().view(1)


def _part_comms(unit: Unit) -> list[Communicator]:
    return [part.require_comm() for member in unit if (part := member.part) is not None]


def plan_casts(units: Sequence[Unit]) -> CastPlan:
    """One plan for the casts of these weights, from this rank's rows of each. Collective.

    All have been prepared for a gather, on one device.
    """
    members = [member for unit in units for member in unit]
    shards = [member.shards for member in members]
    for i, unit in enumerate(units):
        for member in unit:
            member.shards.storage.amax_group = str(i) if len(unit) > 1 else None
    extents = [s.rows.extent(s.comm.rank) for s in shards]
    return CastPlan(
        [QuantizedTensor(s.storage) for s in shards],
        [member.shard for member in members],
        [extent.start if extent else None for extent in extents],
        [s.comm for s in shards],
        names=[gather.name for gather, _, _ in members],
        fsdp_shard_model_weights=[s.own for s in shards],
    )


def run_casts(plan: CastPlan, units: Sequence[Unit]) -> None:
    """Run what :func:`plan_casts` made. Collective: one all-reduce a group of ranks."""
    members = [member for unit in units for member in unit]
    plan.cast_and_release([member.shard for member in members])
    for gather, master, _ in members:
        gather.mark_cast(master)
