"""The consistency check: the same weights on all ranks, whose shards cover each exactly once.

It also checks the shards of a tensor-parallel group. It runs once, when a plan is made. Every rank
computes the result from the same exchanged data, so all ranks raise the same error or none does.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from zerocast.cast.descriptions import check_descriptions, describe, describe_whole
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import (
    Communicator,
    Group,
    agree,
    as_communicator,
    raise_together,
)
from zerocast.errors import InputError, RankMismatchError, ZerocastError
from zerocast.layout import NOTHING, Extent, Owners, check_partition
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.tp_shard import check_tp_shards

Members: TypeAlias = Mapping[Communicator, Sequence[int]]
"""For each group the indices of its weights."""


def members_by_group(group: Group | Sequence[Group], weights: int) -> dict[Communicator, list[int]]:
    """Return the indices of the weights of each group, ordered by first appearance of the groups.

    Args:
        group: one group for all weights, or a list or tuple with one per weight; see
            :func:`zerocast.comm.as_communicator`.
        weights: how many weights there are.

    Raises:
        InputError: for a list of another length, or an entry that is not a group.
    """
    if not isinstance(group, Sequence):
        return {as_communicator(group): list(range(weights))}
    if len(group) != weights:
        raise InputError(
            f"group must be one group, or have one entry for each of the {weights} model_weights, "
            f"got {len(group)}."
        )
    members: dict[Communicator, list[int]] = {}
    for i, one in enumerate(group):
        members.setdefault(as_communicator(one), []).append(i)
    return members


def raise_in_all(
    comms: Sequence[Communicator], error: ZerocastError | None, flag: bool = False
) -> bool:
    """Raise on every rank of every group if one rank has an error.

    This includes ranks that share only some groups with it. All ranks of the group that first
    receives the error raise the same message. Return whether any rank passed ``flag=True``.
    """
    if len(comms) == 1:
        return raise_together(comms[0], error, flag)
    return not agree_in_all([(comm, 1 + flag) for comm in comms], error) or flag


def tp_shards_by_group(model_weights: Any) -> dict[Communicator, list[int]]:
    """Return the indices of the weights that are tensor-parallel shards, by their group.

    Groups are ordered by first appearance. Anything that is not a list or not a weight is skipped:
    this runs before any check, so that all groups receive errors.
    """
    tp_shards: dict[Communicator, list[int]] = {}
    is_list = hasattr(model_weights, "__iter__") and not isinstance(model_weights, torch.Tensor)
    for i, weight in enumerate(model_weights if is_list else ()):
        tp_shard = (
            weight.quantized_storage.tp_shard if isinstance(weight, QuantizedTensor) else None
        )
        if tp_shard is not None and tp_shard.comm is not None:
            tp_shards.setdefault(tp_shard.comm, []).append(i)
    return tp_shards


def agree_in_all(votes: Sequence[tuple[Communicator, int]], error: ZerocastError | None) -> bool:
    """Return whether the ranks of each group give the same answer; False on all if any do not.

    For one group this is :func:`zerocast.comm.agree`.

    Args:
        votes: for each group this rank's answer, 1 or more, or 0 if it has no answer.

    Raises:
        ZerocastError: as :func:`raise_in_all`.
    """
    if len(votes) == 1:
        return agree(*votes[0], error)
    in_step, agreed = True, None
    # The first pass informs the ranks of the same groups, the second those that share an earlier
    # group with them.
    for comm, answer in (*votes, *votes):
        try:
            in_step = agree(comm, answer if in_step else 0, agreed or error) and in_step
        except ZerocastError as e:  # noqa: PERF203  (the loop continues: others need the error)
            agreed = agreed or e
    agreed = agreed or error  # without groups no call above has raised it
    if agreed is not None:
        raise agreed
    return in_step


def exchange_owners(
    members: Members,
    tp_shards: Members,
    specs: Sequence[ShardSpec],
    options: str,
    error: ZerocastError | None,
) -> tuple[dict[Communicator, Owners], list[int]]:
    """Compare what all ranks of all groups were given; return which rank owns what. Collective.

    A plan of one group takes three exchanges: a digest, and the number and the places of shards.

    Args:
        members: for each group the indices of its weights among ``specs``.
        tp_shards: for each tensor-parallel group the indices of the weights whose shards it holds.
        specs: this rank's weights, in order; ignored with an ``error``.
        options: readable text of whatever else must be the same on every rank.
        error: what is wrong with this rank's weights, or None.

    Returns:
        For each group the owners of its members. And the fingerprints of all groups, then of all
        tensor-parallel groups: numbers from 1 to 2**31 - 2 of what was compared and exchanged.
        Ranks whose numbers differ do not make the same plan.

    Raises:
        ZerocastError: on every rank of every group, if one has an ``error``.
        RankMismatchError: on every rank of every group, naming both sides of the difference.
    """
    comms = [*members, *tp_shards]
    if len(comms) == 1:
        owners, number = _exchange(comms[0], specs, options, error)
        return {comms[0]: owners}, [number]
    raise_in_all(comms, error)
    found: list[tuple[Owners, int]] = []
    for groups, exchange in ((members, _exchange), (tp_shards, _exchange_tp_shards)):
        for comm, indices in groups.items():
            try:
                found.append(exchange(comm, [specs[i] for i in indices], options))
            except ZerocastError as e:  # noqa: PERF203  (the loop continues: others wait in it)
                error = error or e
    raise_in_all(comms, error)
    all_owners, fingerprints = zip(*found, strict=True) if found else ((), ())
    return dict(zip(members, all_owners, strict=False)), list(fingerprints)


def _exchange(
    comm: Communicator,
    specs: Sequence[ShardSpec],
    options: str,
    error: ZerocastError | None = None,
) -> tuple[Owners, int]:
    """Compare and exchange within one group; return its owners and fingerprint."""
    lines = check_descriptions(comm, describe, specs, options, error)
    owned = [
        number
        for i, spec in enumerate(specs)
        if spec.extent
        for number in (i, comm.rank, spec.extent.start, spec.extent.end)
    ]
    mine = torch.tensor(owned, dtype=torch.int64, device="cpu")
    counts = torch.zeros(comm.size, dtype=torch.int64, device="cpu")
    counts[comm.rank] = mine.numel()
    comm.all_gather_(counts)
    shards = torch.cat(comm.all_gather_parts(mine, counts.tolist())).view(-1, 4)
    owners = Owners.of(len(specs), shards)
    _check_coverage(specs, owners, comm.size)
    return owners, _fingerprint(options, lines, shards)


def _exchange_tp_shards(
    comm: Communicator, specs: Sequence[ShardSpec], options: str
) -> tuple[Owners, int]:
    """Compare and exchange within one tensor-parallel group; return its owners and fingerprint.

    The owners are those of rows or columns.
    """
    lines = check_descriptions(comm, describe_whole, specs, options, None)
    tp_shards = [spec.storage.tp_shard for spec in specs]
    places = check_tp_shards(
        comm, [r.name for r in specs], [tp_shard for tp_shard in tp_shards if tp_shard]
    )
    return Owners.of_extents(places), _fingerprint(options, lines, places)


def _fingerprint(options: str, lines: Sequence[str], shards: torch.Tensor) -> int:
    digest = hashlib.sha256("\n".join([options, *lines]).encode())
    digest.update(ctypes.string_at(shards.data_ptr(), shards.nbytes))
    return int.from_bytes(digest.digest()[:8], "big") % (2**31 - 2) + 1


def _check_coverage(specs: Sequence[ShardSpec], owners: Owners, size: int) -> None:
    """Raise if the shards of a weight leave a gap or overlap."""
    numels = [r.storage.shape.numel() for r in specs]
    i = owners.first_wrong(numels)
    if i is not None:
        spec = specs[i]
        owned = [NOTHING] * size
        for rank, extent in owners.of_weight(i):
            owned[rank] = extent
        problem = check_partition(numels[i], owned)
        raise RankMismatchError(
            f"the ranks' shards of {spec.name} {tuple(spec.storage.shape)} must cover each "
            f"of its {numels[i]} elements exactly once: {problem}.{_likely_cause(numels[i], owned)}"
        )


def _likely_cause(numel: int, owned: Sequence[Extent]) -> str:
    """Return the usual cause of such a wrong partition and its remedy, or an empty text."""
    held = [extent for extent in owned if extent]
    if len(owned) == 1:
        return (
            " The group has one rank; give group= the ranks that hold the other shards (None means "
            "this rank alone where torch.distributed is not initialised)."
        )
    if len(held) > 1 and all(extent.size == numel for extent in held):
        return (
            " Each of these ranks holds the whole weight: for replicated masters give "
            "group=zerocast.comm.SingleRank()."
        )
    if len(held) > 1 and sum(extent.size for extent in held) == numel:
        ends = list(itertools.accumulate(extent.size for extent in held))
        starts = [extent.start for extent in held]
        if not any(starts):
            return " Every start offset is 0; give the element at which each shard starts."
        if any(starts == [int(f * end) for end in (0, *ends[:-1])] for f in (0.5, 2, 4)):
            return " The start offsets are bytes; give elements of the flattened weight."
    return ""
