"""The consistency check: ranks of a group must mean the same weights, and their shards must cover
each exactly once; so must the shards of a tensor-parallel group.

It runs once, when a plan is made. Every rank computes the verdict from the same exchanged data, so
all ranks raise the same error or none does.
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
"""By group the places of its weights."""


def members_by_group(group: Group | Sequence[Group], weights: int) -> dict[Communicator, list[int]]:
    """The places of the weights of each group, in the order in which the groups first appear.

    Args:
        group: one group for all weights, or a list or tuple with one a weight; see
            :func:`zerocast.comm.as_communicator`.
        weights: how many weights there are.

    Raises:
        InputError: for a list of another length, or for what is no group.
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
    comms: Sequence[Communicator], error: ZerocastError | None, said: bool = False
) -> bool:
    """Every rank of every group raises where one rank has an error, even if it shares only some
    groups with it. Ranks that share the group that hears of it first raise the same message.
    Return whether any has ``said`` yes.
    """
    if len(comms) == 1:
        return raise_together(comms[0], error, said)
    return not agree_in_all([(comm, 1 + said) for comm in comms], error) or said


def tp_shards_by_group(model_weights: Any) -> dict[Communicator, list[int]]:
    """The places of the weights that are shards of larger ones, by the tensor-parallel group that
    holds these, in the order in which these first appear. What is no list or no weight is passed
    over: the groups are asked for before anything is checked, so that all of them hear of errors.
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
    """Whether the ranks of each group give the same answer, beside :func:`zerocast.comm.agree` on
    one group; where ranks of any group do not, no rank hears yes.

    Args:
        votes: by group this rank's answer, 1 or more, or 0 for a rank that has none.

    Raises:
        ZerocastError: as :func:`raise_in_all`.
    """
    if len(votes) == 1:
        return agree(*votes[0], error)
    in_step, agreed = True, None
    # Once through the groups tells the neighbours, the second time tells those who share an earlier
    # group with them.
    for comm, answer in (*votes, *votes):
        try:
            in_step = agree(comm, answer if in_step else 0, agreed or error) and in_step
        except ZerocastError as e:  # noqa: PERF203  (the loop goes on: others must hear of it)
            agreed = agreed or e
    agreed = agreed or error  # a plan of no group has nobody to tell
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
    """Compare what all ranks of all groups were given; return who owns what. Collective: for a plan
    of one group three exchanges, of a digest, and of the number and the places of shards.

    Args:
        members: by group the places of its weights among ``specs``.
        tp_shards: by tensor-parallel group the places of the weights whose shards it holds.
        specs: this rank's weights, in order; of no matter where there is an ``error``.
        options: whatever else must be the same on every rank, readable.
        error: what is wrong with this rank's weights, if anything.

    Returns:
        By group the owners of its members. And the fingerprints of all groups, then of all
        tensor-parallel groups: numbers from 1 to 2**31 - 2 of what was compared and exchanged;
        ranks whose numbers differ do not make the same plan.

    Raises:
        ZerocastError: on every rank of every group, where one has an ``error``.
        RankMismatchError: on every rank of every group, naming both sides of the disagreement.
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
            except ZerocastError as e:  # noqa: PERF203  (the loop goes on: others wait in it)
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
    """Compare and exchange within one tensor-parallel group; return the rows or columns of each
    rank's shards, and the fingerprint.
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
    """Raise where the shards of a weight leave a gap or overlap."""
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
    """What most often makes a partition wrong in this way, with what to do; or nothing."""
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
