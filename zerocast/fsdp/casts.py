"""The casts of masters: which are made together, and the plans that make them.

Most masters are cast alone, when they are gathered. Those of an amax group share one tensor amax,
for which a cast needs them all: they are one *unit*, and are cast together as soon as one of them
is due. :func:`zerocast.fsdp.precompute_scales_for_fsdp` casts many units with one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from zerocast.cast import CastPlan
from zerocast.fsdp.parts import part_of
from zerocast.tensors import Part, QuantizedTensor
from zerocast.tensors.quantize import plain_fp32

if TYPE_CHECKING:
    from zerocast.fsdp.low_bit_gather import LowBitGather


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
    def is_due(self) -> bool:
        """Whether the master was written since its latest cast."""
        return self.gather.is_due(self.master)

    @property
    def fp32(self) -> torch.Tensor | None:
        """The master as a plan reads it, on the device of the codes; None where this rank has no
        rows.
        """
        assert self.gather.shards is not None
        device = self.gather.shards.storage.device
        return plain_fp32(self.master, device) if self.master.numel() else None


Unit: TypeAlias = Sequence[Member]
"""Weights that are cast together: one, or those of an amax group."""


def unit_of(layer: torch.nn.Module, weight: Member) -> Unit:
    """What is cast with ``weight``, the weight of ``layer``; in an amax group all of it."""
    group = getattr(layer, "amax_group", None)
    return [weight] if group is None else group.members()


def plan_casts(units: Sequence[Unit]) -> CastPlan:
    """One plan for the casts of these weights, from this rank's rows of each. Collective.

    All have been prepared for a gather, on one device.
    """
    members = [member for unit in units for member in unit]
    shards = [gather.shards for gather, _, _ in members if gather.shards is not None]
    assert len(shards) == len(members)
    for i, unit in enumerate(units):
        for gather, _, _ in unit:
            assert gather.shards is not None
            gather.shards.storage.amax_group = str(i) if len(unit) > 1 else None
    extents = [s.rows.extent(s.comm.rank) for s in shards]
    return CastPlan(
        [QuantizedTensor(s.storage) for s in shards],
        [member.fp32 for member in members],
        [extent.start if extent else None for extent in extents],
        [s.comm for s in shards],
        names=[gather.name for gather, _, _ in members],
        fsdp_shard_model_weights=[s.own for s in shards],
    )


def run_casts(plan: CastPlan, units: Sequence[Unit]) -> None:
    """Run what :func:`plan_casts` made. Collective: one all-reduce a group of ranks."""
    members = [member for unit in units for member in unit]
    plan.cast_and_release([member.fp32 for member in members])
    for gather, master, _ in members:
        gather.mark_cast(master)
