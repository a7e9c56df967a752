"""update_masters: updates masters and measures their amaxes for the next cast.

Note: amaxes that an update took
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
:class:`zerocast.optim.FusedAdamW` computes the amaxes of updated rows in the same pass, by the plan
that cast them last. The next cast by that plan reuses these amaxes if the rows are unchanged on
this rank: no write has been seen since, by torch or otherwise
(:attr:`zerocast.sharded.state.CastValues.uncounted`), and no memory has moved. Otherwise it
measures again. Ranks may differ in this.

An update measures only if it covers all trained masters of a plan: if another optimizer writes the
others next, reading them would be wasted. If a cast writes codes before ranks reduce amaxes (of
whole blocks, and under delayed scaling), nothing is measured. The codes must remain those of the
latest cast, which a backward may still gather, and the next cast reads the rows once in any case.
"""

from collections.abc import Mapping, Sequence

import torch

from zerocast.numerics import AdamWUpdate
from zerocast.sharded.all_gather import LowBitAllGather, gather_of


def update_masters(
    params: Sequence[torch.Tensor], updates: Sequence[AdamWUpdate]
) -> list[AdamWUpdate]:
    """Run those of ``updates``, one for each of ``params``, whose masters can be measured for their
    next cast in the same pass. Return the other updates.
    """
    found = zip(map(gather_of, params), updates, strict=True)
    by_gather = {gather: update for gather, update in found if gather is not None}
    latest = [gather.latest for gather in by_gather if gather.latest is not None]
    plans = {plan: together for ref, together in latest if (plan := ref()) is not None}
    made: set[int] = set()
    for plan, gathers in plans.items():
        if not _are_all(by_gather, gathers):
            continue
        own = [u for gather in gathers if (u := by_gather.get(gather)) and u.master.numel()]
        masters = [gather.master if gather.master.numel() else None for gather in gathers]
        uncounted = [gather.cast_values.uncounted for gather in gathers]
        others = plan.update_masters(own, masters, uncounted)
        made |= set(map(id, own)) - set(map(id, others))
    return [update for update in updates if id(update) not in made]


def _are_all(
    updates: Mapping[LowBitAllGather, AdamWUpdate], gathers: Sequence[LowBitAllGather]
) -> bool:
    """Return whether ``updates`` cover all trained masters of ``gathers``, in the memory that a
    cast reads.
    """
    for gather in gathers:
        if not gather.is_found:
            return False
        master, update, shards = gather.master, updates.get(gather), gather.shards
        if master.device != shards.storage.device or master.is_inference():
            return False
        if master.numel() != shards.storage.extent.size:  # resharded since
            return False
        if update is None and gather.parameter.requires_grad:
            return False
        if update is not None and update.master.data_ptr() != master.data_ptr():
            return False
    return True
