"""Casts masters: decides which are cast together and when, and keeps the plans that cast them.

Most masters are cast alone, when they are gathered. Those of an amax group share one tensor amax,
for which a cast needs them all: they are one cast group, and are cast together as soon as one of
them is due. :func:`precompute_scales_for_fsdp` casts many groups with one plan.

Note: one cast for one value
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A weight may be gathered several times between two steps of the optimizer: in the forward, again in
the backward, for every microbatch. The codes are those of one cast, so a recipe's state advances
once and the backward multiplies by what the forward did. A cast is due if any rank has written its
rows since the latest one, whether torch saw that or not (:class:`zerocast.sharded.state.
CastValues`), so the ranks ask each other by one small all-reduce. They do not ask

* inside a backward, which gathers what its forward did;
* the first time after a cast that was not the gather's own: that of another weight of its amax
  group, or of :func:`precompute_scales_for_fsdp`. Only a rank on which torch sees a write asks
  then, so all ranks must have made that write.
"""

import itertools
from collections.abc import Sequence

import torch

from zerocast.cast import CastPlan
from zerocast.cast.plan_cache import drop_plan, find_plan, keep_plan
from zerocast.cast.verified import VerifyMode, check_mode
from zerocast.comm import Communicator, Group, announcing, as_communicator
from zerocast.errors import InputError
from zerocast.sharded.all_gather import AllGatherInput, CodesState, LowBitAllGather, gather_of
from zerocast.sharded.amax_group import AmaxGroup, CastGroup
from zerocast.sharded.placement import is_sharded, reshard
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.quantize import plain_master

_KEY = "sharded"
"""Tells plans of this module from others of the same weights."""


def cast_group_of(
    layer: torch.nn.Module, weight: torch.Tensor, dtype: torch.dtype | None = None
) -> CastGroup:
    """Return what is cast with ``weight``, a DTensor of master rows, of ``layer``: it alone, or all
    of its amax group. A group that dissolves does so if it was cast for another ``dtype``.
    """
    gather = gather_of(weight)
    assert gather is not None
    gather.find(weight)
    group: AmaxGroup | None = getattr(layer, "amax_group", None)
    if group is None:
        return [gather]
    if group.dissolves and dtype is not None and _is_cast_for_another(gather, dtype):
        group.dissolve()
        return [gather]
    return group.members() or [gather]


# --- when a cast is due, and making it ---


def _written_groups(
    cast_groups: Sequence[CastGroup], comms: Sequence[Communicator], device: torch.device
) -> list[bool]:
    """Say of each group whether any rank has written one of its masters since their latest cast,
    seen by torch or not.

    Collective over ``comms``, for each group the ranks that share its weights, and over those that
    hold tensor-parallel shards of them: one small all-reduce for each of these communicators, on
    the ``device`` of the codes.
    """
    votes = torch.stack([_vote(cast_group, device) for cast_group in cast_groups])
    tp_comms = [
        [tp_shard.require_comm() for gather in group if (tp_shard := gather.tp_shard) is not None]
        for group in cast_groups
    ]
    for comms_of_group in [[comm] for comm in comms], tp_comms:
        for comm in dict.fromkeys(itertools.chain(*comms_of_group)):
            indices = [i for i, mine in enumerate(comms_of_group) if comm in mine]
            shared = votes[indices]
            comm.all_reduce_max_(shared)
            votes[indices] = shared
    return votes.bool().tolist()


def _vote(cast_group: CastGroup, device: torch.device) -> torch.Tensor:
    """Return int32 [] on ``device``: 1 if this rank has written one of the masters."""
    written = [gather.cast_values.differ_from(gather.master).to(device) for gather in cast_group]
    return torch.stack(written).amax()


def _is_due_anywhere(
    gather: LowBitAllGather, cast_group: CastGroup, comm: Communicator, device: torch.device
) -> bool:
    """Say whether any rank of ``comm``, or of tensor parallelism, has written a master of
    ``cast_group`` since its latest cast; see the note above on when they are asked.
    """
    is_settled, gather.is_settled = gather.is_settled, False
    is_due = True
    if all(each.codes is not CodesState.NONE or each.cast_values.are_loaded for each in cast_group):
        in_backward = torch._C._current_graph_task_id() != -1
        is_seen = not all(member.cast_values.are_in(member.master) for member in cast_group)
        if in_backward or (is_settled and not is_seen):
            return False
        (is_due,) = _written_groups([cast_group], [comm], device)
    for member in cast_group:
        member.is_settled = member is not gather
    return is_due


def _run_casts(cast_groups: Sequence[CastGroup], number: int = 0) -> None:
    """Cast these weights in step ``number``, from this rank's rows of each. Collective: one
    all-reduce for each communicator, and what a new plan needs.

    All have been prepared for a gather, on one device.
    """
    gathers = list(itertools.chain(*cast_groups))
    storages = [gather.shards.storage for gather in gathers]
    masters = [  # None if this rank has no rows
        plain_master(gather.master, storage.device) if gather.master.numel() else None
        for gather, storage in zip(gathers, storages, strict=True)
    ]
    plan = find_plan(storages, _KEY)
    if plan is None:
        for i, cast_group in enumerate(cast_groups):
            for gather in cast_group:
                gather.shards.storage.amax_group = str(i) if len(cast_group) > 1 else None
        names = [gather.name for gather in gathers]
        for storage, name in zip(storages, names, strict=True):
            storage.name_weight(name)
        if len({*names}) < len(names):  # parts of a model that were converted one by one
            names = [f"{name} ({i})" for i, name in enumerate(names)]
        plan = CastPlan(
            list(map(QuantizedTensor, storages)),
            masters,
            [each.extent.start if each.extent else None for each in storages],
            [gather.comm for gather in gathers],
            names=names,
            exchange="boundary",
        )
        keep_plan(storages, _KEY, plan)
    plan.step = number
    plan.cast_and_release(masters, [gather.cast_values.uncounted for gather in gathers])
    for cast_group in cast_groups:
        for gather in cast_group:
            gather.mark_cast(cast_group, plan, gathers)


def codes_to_send(
    gather: LowBitAllGather,
    cast_group: CastGroup,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[tuple[torch.Tensor, ...], AllGatherInput]:
    """Return what this rank sends of its rows of one weight, cast if a cast is due, and what the
    ranks know besides. Collective over ``group``, and over that of tensor parallelism.

    Args:
        gather: the gather of the weight.
        cast_group: the weight, and those that are cast with it.
        group: the ranks that share them.
        dtype: the nominal one.
        device: where the codes are; masters elsewhere are moved there for the cast.

    Raises:
        InputError: on every rank, if tensor-parallel shards begin or end inside a block, or if the
            group was cast for a gather in another dtype.
    """
    comm = as_communicator(group)
    with torch.inference_mode(False), announcing([comm]):  # buffers are for any mode
        _check_dtype(gather, cast_group, dtype)
        is_due = _is_due_anywhere(gather, cast_group, comm, device)
        new = [member.prepare(comm, dtype, device, is_due=is_due) for member in cast_group]
        if is_due or any(new):
            _run_casts([cast_group])
    if gather.codes is CodesState.CAST:
        gather.codes = CodesState.GATHERED
    return gather.shards.padded, gather.shards


def _is_cast_for_another(gather: LowBitAllGather, dtype: torch.dtype) -> bool:
    """Whether others of its group had this weight cast for a gather in another dtype."""
    return gather.codes is CodesState.CAST and gather.shards.storage.dtype != dtype


def _check_dtype(gather: LowBitAllGather, cast_group: CastGroup, dtype: torch.dtype) -> None:
    """Raise if a weight is cast for another dtype; FSDP2 says the same on every rank."""
    if len(cast_group) == 1 or not _is_cast_for_another(gather, dtype):
        return
    others = ", ".join(member.name for member in cast_group if member is not gather)
    given = gather.shards.storage.dtype
    raise InputError(
        f"weights of one amax group are cast together, so they must be gathered in one dtype, got "
        f"{given} for {others} and {dtype} for {gather.name}; give their modules one "
        f"MixedPrecisionPolicy, or leave one out of amax_groups."
    )


# --- what a caller says who has written masters ---


@torch.no_grad()
def precompute_scales_for_fsdp(
    model: torch.nn.Module, *, only_written: bool = False, number: int | None = None
) -> None:
    """Cast all masters of ``model`` with one all-reduce.

    Call it after ``optimizer.step()``, whoever wrote the masters. The next all-gather of each sends
    the codes that it made. It is never needed: without it each parameter is cast when it is
    gathered after a write, with a separate small all-reduce and one more to find out, to the same
    bytes. Collective over the ranks that shard the model, and like ``optimizer.step()`` it leaves
    the parameters sharded. Under tensor parallelism there is one all-reduce more, over the ranks
    that hold shards of a weight; if it alone distributes the model, that is the only one.

    A parameter that no forward has gathered yet waits for its first gather, whose dtype decides.

    Args:
        model: converted with ``weights="master"`` and sharded by
            ``torch.distributed.fsdp.fully_shard``, or a module around such.
        only_written: leave out masters that no rank has written since their latest cast, such as
            frozen ones, for one more all-reduce. Without it the recipe's state of a master (delayed
            scaling, stochastic rounding) advances, written or not.
        number: the caller's number of the step, 0 or more, for ranks to compare.

    Raises:
        InputError: if no parameter is all-gathered in codes.
        RankMismatchError: on every rank of a CPU, where ranks' numbers differ.
    """
    found = _cast_groups("precompute_scales_for_fsdp", model)
    cast_groups = [group for group in found if all(g.codes is not CodesState.NONE for g in group)]
    due = cast_groups
    for gather in itertools.chain(*found) if not only_written else ():
        gather.cast_values.are_loaded = False
    if only_written and cast_groups:
        comms = [cast_group[0].comm for cast_group in cast_groups]
        device = cast_groups[0][0].shards.storage.device
        due = list(itertools.compress(cast_groups, _written_groups(cast_groups, comms, device)))
    if due:
        _run_casts(due, number or 0)
    for cast_group in due if len(due) > 1 else ():
        # This plan casts from now on, so that of the group alone gives its memory back.
        drop_plan([gather.shards.storage for gather in cast_group], _KEY)
    for gather in itertools.chain(*cast_groups):
        gather.is_settled = True


def mark_written(model: torch.nn.Module) -> None:
    """Let the next all-gather of every master of ``model``, or the next
    :func:`precompute_scales_for_fsdp`, cast it.

    For code that writes masters where torch does not see it, by their addresses say, between
    :func:`precompute_scales_for_fsdp` and the next forward; at any other time a gather finds such
    writes itself. All ranks that shard the model call it; nothing is communicated, and like
    ``optimizer.step()`` it leaves the parameters sharded.

    Args:
        model: as for :func:`precompute_scales_for_fsdp`.

    Raises:
        InputError: if no parameter is all-gathered in codes.
    """
    for gather in itertools.chain(*_cast_groups("mark_written", model)):
        gather.cast_values.forget()


def verify_gathers(model: torch.nn.Module, mode: VerifyMode) -> None:
    """Compare what ranks hold after the first gather of each cast, from now on. A difference raises
    :class:`zerocast.VerificationError` on every rank that shards the weight. Call it on every rank;
    like ``optimizer.step()`` it leaves the parameters sharded.

    Args:
        model: as for :func:`precompute_scales_for_fsdp`.
        mode: "off", "hash" or "full", as for :class:`zerocast.CastPlan`.

    Raises:
        InputError: for another mode, or if no parameter is all-gathered in codes.
    """
    check_mode(mode)
    for gather in itertools.chain(*_cast_groups("verify_gathers", model)):
        gather.verify = mode


def _cast_groups(function: str, model: torch.nn.Module) -> list[CastGroup]:
    """Reshard ``model`` and return its masters, those of an amax group together.

    Raises:
        InputError: if there are none; ``function`` is the public one that needs some.
    """
    reshard(model)
    cast_groups: dict[LowBitAllGather, CastGroup] = {}  # by the first weight of each
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if is_sharded(parameter) and gather_of(parameter) is not None:
                cast_group = cast_group_of(module, parameter)
                cast_groups.setdefault(cast_group[0], cast_group)
    if not cast_groups:
        raise InputError(
            f"{function} needs a model with parameters that FSDP2 all-gathers in codes, got one "
            f"with none; convert it by zerocast.nn.convert(model, recipe, weights='master'), then "
            f"call torch.distributed.fsdp.fully_shard."
        )
    return list(cast_groups.values())
