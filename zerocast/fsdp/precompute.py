"""One all-reduce for the casts of all parameters, ahead of their all-gathers."""

from __future__ import annotations

import operator
import weakref

import torch

from zerocast.cast import CastPlan
from zerocast.errors import InputError
from zerocast.fsdp.low_bit_gather import LowBitGather, ShardCodes, plan_casts, run_casts
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
    ``optimizer.step()`` it leaves the parameters sharded.

    A parameter that no forward has gathered yet is left to its first gather, for only FSDP2 knows
    which dtype it will be gathered for.

    Args:
        model: converted with ``weights="master"`` and sharded by
            ``torch.distributed.fsdp.fully_shard``, or a module around such.

    Raises:
        InputError: where no parameter is all-gathered in codes.
    """
    reshard(model)
    found = sharded_masters(model)
    if not found:
        raise InputError(
            "precompute_scales_for_fsdp needs a model with parameters that FSDP2 all-gathers in "
            "codes, got one with none; convert it by zerocast.nn.convert(model, recipe, "
            "weights='master'), then call torch.distributed.fsdp.fully_shard."
        )
    due = [(gather, master) for gather, master in found.values() if _is_due(gather, master)]
    if due:
        gathers, masters = [gather for gather, _ in due], [master for _, master in due]
        run_casts(_plan(model, gathers, masters), gathers, masters)
        for gather in gathers:
            gather.forget_plan()  # this one casts from now on


def sharded_masters(model: torch.nn.Module) -> dict[str, tuple[LowBitGather, torch.Tensor]]:
    """By parameter name, the masters that are sharded now: their gather and this rank's rows."""
    found = {}
    for name, parameter in model.named_parameters():
        rows = local_part(parameter)
        if is_sharded(parameter) and isinstance(rows, MasterWeight):
            found[name] = rows.low_bit_gather, rows.value
    return found


def _is_due(gather: LowBitGather, master: torch.Tensor) -> bool:
    return gather.shards is not None and gather.is_due(master)


def _plan(
    model: torch.nn.Module, gathers: list[LowBitGather], masters: list[torch.Tensor]
) -> CastPlan:
    """The plan for these weights that an earlier step has made, or a new one."""
    shards = [gather.shards for gather in gathers if gather.shards is not None]
    plans = _plans.setdefault(model, [])
    for known, plan in plans:
        if len(known) == len(shards) and all(map(operator.is_, known, shards)):
            return plan
    plan = plan_casts(gathers, masters)
    plans.insert(0, (shards, plan))
    del plans[PLANS_KEPT:]
    return plan
