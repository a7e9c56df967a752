"""What a caller says who has written masters: cast them all now, or when they are gathered."""

from __future__ import annotations

import itertools

import torch

from zerocast.cast.plan_cache import find_plan, keep_plan
from zerocast.errors import InputError
from zerocast.sharded.casts import (
    CastGroup,
    CastGroupMember,
    cast_group_of,
    plan_casts,
    run_casts,
    written_groups,
)
from zerocast.sharded.low_bit_all_gather import LowBitAllGather
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import is_sharded, reshard, to_local


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
    cast_groups = [
        cast_group
        for cast_group in _cast_groups("precompute_scales_for_fsdp", model)
        if all(member.gather.shards is not None for member in cast_group)
    ]
    due = cast_groups
    if only_written and cast_groups:
        comms = [cast_group[0].shards.comm for cast_group in cast_groups]
        due = list(itertools.compress(cast_groups, written_groups(cast_groups, comms)))
    if due:
        storages = [member.shards.storage for member in itertools.chain(*due)]
        plan = find_plan(storages, "sharded")
        run_casts(plan or keep_plan(storages, "sharded", plan_casts(due)), due)
        for member in itertools.chain(*due):
            member.gather.plan = None  # this one casts from now on
    for member in itertools.chain(*cast_groups):
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
    for member in itertools.chain(*_cast_groups("mark_written", model)):
        member.gather.cast_values.forget()


def _cast_groups(function: str, model: torch.nn.Module) -> list[CastGroup]:
    """The units of ``model``, whose parameters are sharded from now on, for a public ``function``
    that needs some.
    """
    reshard(model)
    cast_groups = sharded_cast_groups(model)
    if not cast_groups:
        raise InputError(
            f"{function} needs a model with parameters that FSDP2 all-gathers in codes, got one "
            f"with none; convert it by zerocast.nn.convert(model, recipe, weights='master'), then "
            f"call torch.distributed.fsdp.fully_shard."
        )
    return cast_groups


def sharded_cast_groups(model: torch.nn.Module) -> list[CastGroup]:
    """The masters that are sharded now, those of an amax group together."""
    cast_groups: dict[LowBitAllGather, CastGroup] = {}  # by the first weight of each
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            rows = to_local(parameter)
            if is_sharded(parameter) and isinstance(rows, MasterWeight):
                member = CastGroupMember(rows.low_bit_all_gather, rows.value, parameter)
                cast_group = cast_group_of(module, member)
                cast_groups.setdefault(cast_group[0].gather, cast_group)
    return list(cast_groups.values())
