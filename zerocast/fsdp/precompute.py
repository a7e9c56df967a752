"""One all-reduce for the casts of all parameters, ahead of their all-gathers."""

from __future__ import annotations

import operator
import weakref

import torch

from zerocast.cast import CastPlan
from zerocast.errors import InputError
from zerocast.fsdp.casts import Member, Unit, plan_casts, run_casts, unit_of
from zerocast.fsdp.low_bit_gather import LowBitGather, ShardCodes
from zerocast.fsdp.master_weight import MasterWeight
from zerocast.fsdp.sharded import is_sharded, local_part, reshard

PLANS_KEPT = 4
"""Plans remembered with a model: one where every step writes every master, a few where steps
alternate between some of them."""

_plans: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[list[ShardCodes], CastPlan]]] = (
    weakref.WeakKeyDictionary()
)


@torch.no_grad()
def precompute_scales_for_fsdp(model: torch.nn.Module) -> None:
    """Cast all masters of ``model`` that were written since their latest cast, with one all-reduce.

    Call it after ``optimizer.step()``. The all-gathers that follow send the codes that it made. It
    is never needed: without it each parameter is cast when it is gathered, with a small all-reduce
    of its own, to the same bytes. Collective over the ranks that shard the model, and like
    ``optimizer.step()`` it leaves the parameters sharded. Under tensor parallelism there is one
    all-reduce more, over the ranks that hold parts of a weight; where it alone distributes the
    model, that is the only one.

    A parameter that no forward has gathered yet is left to its first gather, for only FSDP2 knows
    which dtype it will be gathered for.

    Args:
        model: converted with ``weights="master"`` and sharded by
            ``torch.distributed.fsdp.fully_shard``, or a module around such.

    Raises:
        InputError: where no parameter is all-gathered in codes.
    """
    reshard(model)
    units = sharded_units(model)
    if not units:
        raise InputError(
            "precompute_scales_for_fsdp needs a model with parameters that FSDP2 all-gathers in "
            "codes, got one with none; convert it by zerocast.nn.convert(model, recipe, "
            "weights='master'), then call torch.distributed.fsdp.fully_shard."
        )
    due = [unit for unit in units if _is_due(unit)]
    if due:
        run_casts(_plan(model, due), due)
        for unit in due:
            for member in unit:
                member.gather.forget_plan()  # this one casts from now on


def sharded_units(model: torch.nn.Module) -> list[Unit]:
    """The masters that are sharded now, those of an amax group together."""
    units: dict[LowBitGather, Unit] = {}  # by the first weight of each
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            rows = local_part(parameter)
            if is_sharded(parameter) and isinstance(rows, MasterWeight):
                member = Member(rows.low_bit_gather, rows.value, parameter)
                unit = unit_of(module, member)
                units.setdefault(unit[0].gather, unit)
    return list(units.values())


def _is_due(unit: Unit) -> bool:
    return all(member.gather.shards is not None for member in unit) and any(
        member.is_due for member in unit
    )


def _plan(model: torch.nn.Module, units: list[Unit]) -> CastPlan:
    """The plan for these weights that an earlier step has made, or a new one."""
    found = (member.gather.shards for unit in units for member in unit)
    shards = [each for each in found if each is not None]
    plans = _plans.setdefault(model, [])
    for known, plan in plans:
        if len(known) == len(shards) and all(map(operator.is_, known, shards)):
            return plan
    plan = plan_casts(units)
    plans.insert(0, (shards, plan))
    del plans[PLANS_KEPT:]
    return plan
