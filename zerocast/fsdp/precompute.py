"""What a caller says who has written masters: cast them all now, or when they are gathered."""

from __future__ import annotations

import itertools
import operator
import weakref

import torch

from zerocast.cast import CastPlan
from zerocast.errors import InputError
from zerocast.fsdp.casts import Member, Unit, plan_casts, run_casts, unit_of, written_units
from zerocast.fsdp.low_bit_gather import LowBitGather, ShardCodes
from zerocast.fsdp.master_weight import MasterWeight
from zerocast.fsdp.sharded import is_sharded, local_part, reshard

PLANS_KEPT = 4
"""Plans remembered with a model: one for all masters, a few where steps alternate between some of
them (``only_written``)."""

_plans: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[list[ShardCodes], CastPlan]]] = (
    weakref.WeakKeyDictionary()
)


@torch.no_grad()
def precompute_scales_for_fsdp(model: torch.nn.Module, *, only_written: bool = False) -> None:
    """Cast all masters of ``model`` with one all-reduce.

    Call it after ``optimizer.step()``, whoever wrote the masters. The next all-gather of each sends
    the codes that it made. It is never needed: without it each parameter is cast when it is
    gathered after a write, with a small all-reduce of its own and one more to find out, to the same
    bytes. Collective over the ranks that shard the model, and like ``optimizer.step()`` it leaves
    the parameters sharded. Under tensor parallelism there is one all-reduce more, over the ranks
    that hold parts of a weight; where it alone distributes the model, that is the only one.

    A parameter that no forward has gathered yet is left to its first gather, for only FSDP2 knows
    which dtype it will be gathered for.

    Args:
        model: converted with ``weights="master"`` and sharded by
            ``torch.distributed.fsdp.fully_shard``, or a module around such.
        only_written: leave out masters that no rank has written since their latest cast, such as
            frozen ones, for one more all-reduce. Without it what a recipe remembers of a master
            (delayed scaling, stochastic rounding) moves on, written or not.

    Raises:
        InputError: where no parameter is all-gathered in codes.
    """
    units = [
        unit
        for unit in _units("precompute_scales_for_fsdp", model)
        if all(member.gather.shards is not None for member in unit)
    ]
    due = units
    if only_written and units:
        comms = [unit[0].shards.comm for unit in units]
        due = list(itertools.compress(units, written_units(units, comms)))
    if due:
        run_casts(_plan(model, due), due)
        for member in itertools.chain(*due):
            member.gather.plan = None  # this one casts from now on
    for member in itertools.chain(*units):
        member.gather.is_settled = True


def mark_written(model: torch.nn.Module) -> None:
    """Let the next all-gather of every master of ``model``, or the next
    :func:`precompute_scales_for_fsdp`, cast it.

    For code that writes masters where torch does not see it, by their addresses say, between
    :func:`precompute_scales_for_fsdp` and the next forward; at any other time a gather finds out by
    itself. All ranks that shard the model call it; nothing travels, and like ``optimizer.step()``
    it leaves the parameters sharded.

    Args:
        model: as for :func:`precompute_scales_for_fsdp`.

    Raises:
        InputError: where no parameter is all-gathered in codes.
    """
    for member in itertools.chain(*_units("mark_written", model)):
        member.gather.cast_values.forget()


def _units(function: str, model: torch.nn.Module) -> list[Unit]:
    """The units of ``model``, whose parameters are sharded from now on, for a public ``function``
    that needs some.
    """
    reshard(model)
    units = sharded_units(model)
    if not units:
        raise InputError(
            f"{function} needs a model with parameters that FSDP2 all-gathers in codes, got one "
            f"with none; convert it by zerocast.nn.convert(model, recipe, weights='master'), then "
            f"call torch.distributed.fsdp.fully_shard."
        )
    return units


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


def _plan(model: torch.nn.Module, units: list[Unit]) -> CastPlan:
    """The plan for these weights that an earlier step has made, or a new one."""
    shards = [member.shards for unit in units for member in unit]
    plans = _plans.setdefault(model, [])
    for known, plan in plans:
        if len(known) == len(shards) and all(map(operator.is_, known, shards)):
            return plan
    plan = plan_casts(units)
    plans.insert(0, (shards, plan))
    del plans[PLANS_KEPT:]
    return plan
