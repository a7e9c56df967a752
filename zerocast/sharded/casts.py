"""Casts masters: decides which are cast together and when, and keeps the plans that cast them.

Most masters are cast alone, when they are gathered. Masters of an amax group share one tensor amax,
so a cast needs all of them. They form one cast group, and are cast together as soon as one of them
is due. :func:`precompute_scales_for_fsdp` casts many groups with one plan.

Note: one cast for one value
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A weight may be gathered several times between two optimizer steps: in the forward, in the backward,
and for every microbatch. All these gathers send the codes of one cast. So the recipe's state
advances once, and the backward uses the same weight as the forward. A cast is due if any rank has
written its rows since the latest one, whether torch saw the write or not
(:class:`zerocast.sharded.state.CastValues`). The ranks determine this by one small all-reduce,
which they skip

* inside a backward, which gathers the codes of its forward;
* once after a cast that this gather did not make: that of another weight of its amax group, or of
  :func:`precompute_scales_for_fsdp`. A rank on which torch sees a write still enters the
  all-reduce, so all ranks must have made that write.
"""

import itertools
from collections.abc import Sequence

import torch

from zerocast.cast import CastPlan
from zerocast.cast.plan_cache import drop_plan, find_plan, keep_plan
from zerocast.cast.verified import VerifyMode, check_mode
from zerocast.comm import Communicator, Group, announcing, as_communicator
from zerocast.errors import InputError
from zerocast.sharded.all_gather import AllGatherInput, LowBitAllGather, gather_of
from zerocast.sharded.amax_group import AmaxGroup, CastGroup
from zerocast.sharded.placement import is_sharded, reshard
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.quantize import plain_master

_KEY = "sharded"
"""The key of this module's plans in the plan cache."""


def cast_group_of(
    layer: torch.nn.Module, weight: torch.Tensor, dtype: torch.dtype | None = None
) -> CastGroup:
    """Return what is cast with ``weight``, a DTensor of master rows of ``layer``: itself, or its
    amax group. A group with ``dissolves`` is dissolved if it was cast for another ``dtype``.
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
    """Return for each group whether any rank has written one of its masters since the latest cast,
    seen by torch or not.

    Collective over ``comms``, the ranks that share each group's weights, and over the ranks that
    hold tensor-parallel shards of them. It costs one small all-reduce for each of these
    communicators, on the ``device`` of the codes.
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
    """Return whether any rank of ``comm``, or of tensor parallelism, has written a master of
    ``cast_group`` since its latest cast. The note above says when the ranks communicate.
    """
    is_settled, gather.is_settled = gather.is_settled, False
    is_due = True
    if all(each.is_cast or each.cast_values.are_loaded for each in cast_group):
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
    all-reduce for each communicator, and those of making a new plan.

    All weights must be prepared for a gather, on one device.
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
    """Return the tensors that this rank sends for one weight, and their :class:`AllGatherInput`.

    Cast first if a cast is due. Collective over ``group``, and over the tensor-parallel ranks.

    Args:
        gather: the gather of the weight.
        cast_group: the weight, and those that are cast with it.
        group: the ranks that share them.
        dtype: the nominal dtype.
        device: the device of the codes; masters elsewhere are moved there for the cast.

    Raises:
        InputError: on every rank, if tensor-parallel shards begin or end inside a block, or if the
            group was cast for a gather in another dtype.
    """
    comm = as_communicator(group)
    with torch.inference_mode(False), announcing([comm]):  # so buffers work in any mode
        _check_dtype(gather, cast_group, dtype)
        is_due = _is_due_anywhere(gather, cast_group, comm, device)
        new = [member.prepare(comm, dtype, device, is_due=is_due) for member in cast_group]
        if is_due or any(new):
            _run_casts([cast_group])
    gather.is_sent = True
    return gather.shards.padded, gather.shards


def _is_cast_for_another(gather: LowBitAllGather, dtype: torch.dtype) -> bool:
    """Return whether its group had this weight cast for a gather in another dtype."""
    return gather.is_cast and not gather.is_sent and gather.shards.storage.dtype != dtype


def _check_dtype(gather: LowBitAllGather, cast_group: CastGroup, dtype: torch.dtype) -> None:
    """Raise :class:`InputError` if the weight was cast for another dtype. FSDP2 passes the same
    dtype on every rank.
    """
    if len(cast_group) == 1 or not _is_cast_for_another(gather, dtype):
        return
    others = ", ".join(member.name for member in cast_group if member is not gather)
    given = gather.shards.storage.dtype
    raise InputError(
        "weights of one amax group are cast together, so they must be gathered in one dtype, got "
        f"{given} for {others} and {dtype} for {gather.name}; give their modules one "
        "MixedPrecisionPolicy, or remove one from amax_groups."
    )


# --- calls of code that has written masters ---


@torch.no_grad()
def precompute_scales_for_fsdp(
    model: torch.nn.Module, *, only_written: bool = False, number: int | None = None
) -> None:
    """Cast all masters of ``model`` with one all-reduce.

    Call it after ``optimizer.step()``, or after any other write of the masters. The next all-gather
    of each master sends the resulting codes. The call is optional: without it each gather after a
    write casts its parameter to the same bytes. That costs one small all-reduce for the cast and
    one to detect the write, per parameter.

    Collective over the ranks that shard the model. It leaves the parameters sharded, like
    ``optimizer.step()``. Under tensor parallelism there is one more all-reduce, over the ranks that
    hold shards of a weight. Without FSDP2 sharding that is the only one.

    A parameter that no forward has gathered yet is cast at its first gather, which sets its dtype.

    Args:
        model: a module converted with ``weights="master"`` and sharded by
            ``torch.distributed.fsdp.fully_shard``, or a module that contains such.
        only_written: whether to skip masters that no rank has written since their latest cast, such
            as frozen ones, at the cost of one more all-reduce. Otherwise the recipe's state of
            every master (delayed scaling, stochastic rounding) advances.
        number: the caller's step number, 0 or more, which ranks compare.

    Raises:
        InputError: if no parameter is all-gathered in codes.
        RankMismatchError: on every rank, on CPU only, if the ranks' numbers differ.
    """
    found = _cast_groups("precompute_scales_for_fsdp", model)
    cast_groups = [group for group in found if all(each.is_cast for each in group)]
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
        # This plan replaces the plan of the group alone, whose memory is released.
        drop_plan([gather.shards.storage for gather in cast_group], _KEY)
    for gather in itertools.chain(*cast_groups):
        gather.is_settled = True


def mark_written(model: torch.nn.Module) -> None:
    """Make the next all-gather or :func:`precompute_scales_for_fsdp` cast every master of
    ``model``.

    Call it after writes that torch does not see, such as writes by address, between
    :func:`precompute_scales_for_fsdp` and the next forward. At other times a gather detects such
    writes. Call it on all ranks that shard the model. It does not communicate, and leaves the
    parameters sharded, like ``optimizer.step()``.

    Args:
        model: as for :func:`precompute_scales_for_fsdp`.

    Raises:
        InputError: if no parameter is all-gathered in codes.
    """
    for gather in itertools.chain(*_cast_groups("mark_written", model)):
        gather.cast_values.forget()


def verify_gathers(model: torch.nn.Module, mode: VerifyMode) -> None:
    """From now on, compare the weights between ranks after the first gather of each cast.

    A difference raises :class:`zerocast.VerificationError` on every rank that shards the weight.
    Call it on every rank. It leaves the parameters sharded, like ``optimizer.step()``.

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
    """Reshard ``model`` and return the cast groups of its masters.

    Raises:
        InputError: if there are no masters; it names ``function``, the public caller.
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
