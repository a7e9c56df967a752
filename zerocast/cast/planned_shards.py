"""What a CastPlan was given: its weights, and what this rank has of each master."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerocast.cast.plan import CastPlan
from zerocast.comm import Communicator
from zerocast.layout import Extent
from zerocast.tensors import QuantizedTensor


@dataclass(frozen=True)
class PlannedShard:
    """One weight of a plan.

    Attributes:
        name: what the plan's messages call it.
        weight: whole, or a tensor-parallel shard.
        master: what the next cast reads; None where this rank owns nothing.
        extent: the elements that it is.
        comm: the ranks that own the others.
    """

    name: str
    weight: QuantizedTensor
    master: torch.Tensor | None
    extent: Extent
    comm: Communicator


def planned_shards(plan: CastPlan) -> list[PlannedShard]:
    """Return the weights of ``plan``, in its order, with the masters as they are bound now."""
    comms = {i: comm for comm, indices in plan._members.items() for i in indices}
    found, first = [], 0  # the place of the first matrix of a weight
    for spec, master in zip(plan._specs, plan._prepared.bound, strict=True):
        weight = QuantizedTensor(spec.storage)
        found.append(PlannedShard(spec.name, weight, master, spec.extent, comms[first]))
        first += spec.storage.form.num_matrices
    return found
