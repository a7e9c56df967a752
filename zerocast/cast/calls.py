"""The functional calls: the same cast for callers that keep no plan.

A call finds the plan that an earlier call made for the same weights, partition and group, or makes
one. A small all-reduce at the start of every call compares whether all ranks found the same plan,
and exchanges errors. If they did not, all ranks make a plan, so they never run different
collectives. Plans are found by the weights, not by the addresses of masters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

import torch

from zerocast.arguments import check_choice, check_flag
from zerocast.backends import backend_for
from zerocast.cast.consistency import agree_in_all, tp_shards_by_group
from zerocast.cast.master_checks import as_tensors
from zerocast.cast.plan import CastPlan
from zerocast.cast.plan_cache import find_plan, keep_plan
from zerocast.cast.shard_spec import ShardSpec, check_specs
from zerocast.comm import Attempt, Communicator, Group, as_communicator
from zerocast.errors import InputError
from zerocast.numerics import NVFP4Numerics
from zerocast.tensors import QuantizedTensor, rebuild_derived
from zerocast.tensors.untraced import untraced


@untraced
def quantize_master_weights(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Group = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    check_finite: bool = False,
    only: Literal["NVFP4", "FP8"] | None = None,
) -> None:
    """Cast sharded master weights into quantized model weights. Collective; recipes may be mixed.

    Afterwards every rank has correct scales, amaxes and padding of every weight, and the codes of
    the elements that it owns. The codes of other elements are untouched, to the nibble. The caller
    then all-gathers ``rowwise_data`` and calls :func:`post_all_gather_processing`.

    Args:
        model_weights: the quantized weights, whole on every rank.
        master_weights: for each weight this rank's shard, FP32, BF16 or FP16, contiguous, of any
            shape; None if it owns nothing.
        start_offsets: for each weight the element of the flattened weight at which the master
            starts.
        group: the ranks: a zerocast or mpi4py communicator, a torch.distributed ProcessGroup, or
            None for the default group (one rank if there is no default group).
        fsdp_shard_model_weights: for each weight None, or a uint8 buffer that receives the codes of
            this rank's shard instead of the weight; see :class:`zerocast.CastPlan`.
        manual_post_all_gather_processing: if False, the next forward rebuilds derived copies.
        check_finite: raise instead of writing NaN; costs a host synchronisation.
        only: the only numerics to accept; None accepts all, also mixed.

    Raises:
        InputError, RankMismatchError, NonFiniteError: on every rank, before anything is written.
    """
    comm = as_communicator(group)
    comms = [comm]
    specs: list[ShardSpec] = []
    plan: CastPlan | None = None
    attempt = Attempt()
    with attempt:
        check_flag("check_finite", check_finite)
        check_flag("manual_post_all_gather_processing", manual_post_all_gather_processing)
        comms += tp_shards_by_group(model_weights)
        master_weights = as_tensors(master_weights)
        specs = check_specs(
            model_weights, master_weights, start_offsets, fsdp_shard_model_weights, None
        )
        _check_family(specs, only)
        storages = [spec.storage for spec in specs]
        key = _key(specs, comm, manual_post_all_gather_processing, check_finite)
        plan = find_plan(storages, key)

    # One all-reduce: does any rank have an error, and have all ranks found the same plan?
    # If ranks have found different plans their arguments differ: making a plan raises that.
    found = [0] * len(comms) if plan is None else plan.fingerprints
    in_step = agree_in_all(list(zip(comms, found, strict=True)), attempt.error)
    if plan is None or not in_step:
        plan = CastPlan(
            model_weights, master_weights, start_offsets, comm,
            fsdp_shard_model_weights=fsdp_shard_model_weights,
            manual_post_all_gather_processing=manual_post_all_gather_processing,
            check_finite=check_finite,
        )  # fmt: skip
        keep_plan(storages, key, plan)
    plan.step = 0  # the plans that ranks found may have different numbers of casts
    plan.cast_and_release(master_weights)


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Group = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    check_finite: bool = False,
) -> None:
    """Run :func:`quantize_master_weights` on NVFP4 weights; refuse others (:class:`InputError`)."""
    quantize_master_weights(
        model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
        manual_post_all_gather_processing, check_finite=check_finite, only="NVFP4",
    )  # fmt: skip


def cast_master_weights_to_fp8(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    group: Group = None,
    fsdp_shard_model_weights: Sequence[torch.Tensor | None] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    check_finite: bool = False,
) -> None:
    """Run :func:`quantize_master_weights` on FP8 weights; refuse others (:class:`InputError`)."""
    quantize_master_weights(
        model_weights, master_weights, start_offsets, group, fsdp_shard_model_weights,
        manual_post_all_gather_processing, check_finite=check_finite, only="FP8",
    )  # fmt: skip


@untraced
def post_all_gather_processing(model_weights: torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Rebuild what is derived from gathered codes: columnwise codes and scales, with padding.

    Call it once the codes of all ranks are in ``rowwise_data``. Not collective.

    Args:
        model_weights: weights, or one weight. Plain tensors, and weights without a columnwise copy,
            are skipped.

    Raises:
        InputError: if an entry is not a tensor; nothing has been written.
    """
    given = [model_weights] if isinstance(model_weights, torch.Tensor) else model_weights
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InputError(
            f"model_weights must be a tensor or a list of tensors, got {type(given).__name__}."
        )
    attempt = Attempt()
    weights: list[torch.Tensor] = []
    with attempt:
        weights += given
    if attempt.error is not None:
        raise attempt.error
    for i, weight in enumerate(weights):
        if not isinstance(weight, torch.Tensor):
            raise InputError(
                f"model_weights[{i}] must be a tensor, got {type(weight).__name__}; give the "
                "weights themselves."
            )
    rebuild_derived([w.quantized_storage for w in weights if isinstance(w, QuantizedTensor)])


def _check_family(specs: Sequence[ShardSpec], family: Literal["NVFP4", "FP8"] | None) -> None:
    if family is None:
        return
    check_choice("only", family, ("NVFP4", "FP8"))
    for spec in specs:
        recipe = spec.storage.recipe
        own = "NVFP4" if isinstance(recipe.numerics, NVFP4Numerics) else None
        own = "FP8" if recipe.numerics.fmt.bits == 8 else own
        if family != own:
            raise InputError(
                f"cast_master_weights_to_{family.lower()} takes {family} weights only, but "
                f"{spec.name} has recipe {recipe}; use zerocast.quantize_master_weights for a "
                "mixture."
            )


def _key(
    specs: Sequence[ShardSpec], comm: Communicator, manual: bool, check_finite: bool
) -> Hashable:
    shards = tuple(
        (
            spec.storage.tp_shard,
            spec.extent,
            tuple(codes.data_ptr() for codes in spec.codes.values()),
        )
        for spec in specs
    )
    # A plan keeps the backend with which it was made.
    backend = backend_for(specs[0].storage.device) if specs else None
    return comm, manual, check_finite, backend and (type(backend), backend.name), shards
