"""The world check: do the ranks of a group mean the same weights, and do their shards cover each
exactly once? Of weights that a tensor-parallel group holds in parts: do the parts?

It runs once, when a plan is made. Every rank computes the verdict from the same exchanged data, so
all ranks raise the same error or none does.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocast.cast.request import ShardRequest
from zerocast.comm import (
    Communicator,
    Group,
    agree,
    as_communicator,
    lines_that_differ,
    raise_together,
)
from zerocast.errors import InputError, RankMismatchError, ZerocastError
from zerocast.layout import Extent, check_partition, first_wrong_partition
from zerocast.ops import NUMERICS_VERSION
from zerocast.recipes import describe_recipe
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.part import LINES, check_parts


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


def raise_in_all(comms: Sequence[Communicator], error: ZerocastError | None) -> None:
    """Every rank of every group raises where one rank has an error, even if it shares only some
    groups with it. Ranks that share the group that hears of it first raise the same message.
    """
    if len(comms) == 1:
        raise_together(comms[0], error)
        return
    agreed: ZerocastError | None = None
    # Once through the groups tells the neighbours, the second time tells those who share an earlier
    # group with them.
    for comm in (*comms, *comms):
        try:
            raise_together(comm, agreed or error)
        except ZerocastError as e:  # noqa: PERF203  (the loop goes on: others must hear of it)
            agreed = agreed or e
    agreed = agreed or error  # a plan of no group has nobody to tell
    if agreed is not None:
        raise agreed


def parts_by_group(model_weights: Any) -> dict[Communicator, list[int]]:
    """The places of the weights that are parts of larger ones, by the tensor-parallel group that
    holds them, in the order in which these first appear. What is no list or no weight is passed
    over: the groups are asked for before anything is checked, so that all of them hear of errors.
    """
    parts: dict[Communicator, list[int]] = {}
    is_list = hasattr(model_weights, "__iter__") and not isinstance(model_weights, torch.Tensor)
    for i, weight in enumerate(model_weights if is_list else ()):
        part = weight.storage.part if isinstance(weight, QuantizedTensor) else None
        if part is not None and part.comm is not None:
            parts.setdefault(part.comm, []).append(i)
    return parts


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
    for comm, answer in (*votes, *votes):
        try:
            in_step = agree(comm, answer if in_step else 0, agreed or error) and in_step
        except ZerocastError as e:  # noqa: PERF203  (the loop goes on: others must hear of it)
            agreed = agreed or e
    if agreed is not None:
        raise agreed
    return in_step


def exchange_extents(
    members: Mapping[Communicator, Sequence[int]],
    parts: Mapping[Communicator, Sequence[int]],
    requests: Sequence[ShardRequest],
    options: str,
    error: ZerocastError | None,
) -> tuple[dict[Communicator, torch.Tensor], dict[Communicator, torch.Tensor]]:
    """Compare what all ranks of all groups were given; return who owns what. Collective: for a plan
    of one group two exchanges, of a digest and of the extents.

    Args:
        members: by group the places of its weights among ``requests``.
        parts: by tensor-parallel group the places of the weights that it holds in parts.
        requests: this rank's weights, in order; of no matter where there is an ``error``.
        options: whatever else must be the same on every rank, readable.
        error: what is wrong with this rank's weights, if anything.

    Returns:
        By group int64 [size, members, 2] on the CPU: start and end of each rank's shard of each
        weight. By tensor-parallel group the same of each rank's part, in rows or columns.

    Raises:
        ZerocastError: on every rank of every group, where one has an ``error``.
        RankMismatchError: on every rank of every group, naming both sides of the disagreement.
    """
    comms = [*members, *parts]
    if len(comms) == 1:
        return {comms[0]: _exchange(comms[0], requests, options, error)}, {}
    raise_in_all(comms, error)
    by_group: tuple[dict[Communicator, torch.Tensor], dict[Communicator, torch.Tensor]] = ({}, {})
    steps = ((members, _exchange), (parts, _exchange_parts))
    for found, (groups, exchange) in zip(by_group, steps, strict=True):
        for comm, indices in groups.items():
            try:
                found[comm] = exchange(comm, [requests[i] for i in indices], options)
            except ZerocastError as e:  # noqa: PERF203  (the loop goes on: others wait in it)
                error = error or e
    raise_in_all(comms, error)
    return by_group


def _exchange(
    comm: Communicator,
    requests: Sequence[ShardRequest],
    options: str,
    error: ZerocastError | None = None,
) -> torch.Tensor:
    """Within one group."""
    _check_descriptions(comm, [_describe(request) for request in requests], options, error)
    extents = torch.zeros(comm.size, len(requests), 2, dtype=torch.int64, device="cpu")
    pairs = [[request.extent.start, request.extent.end] for request in requests]
    mine = torch.tensor(pairs, dtype=torch.int64, device="cpu")
    extents[comm.rank] = mine.view(len(requests), 2)
    comm.all_gather_(extents.view(-1))
    _check_coverage(requests, extents)
    return extents


def _exchange_parts(
    comm: Communicator, requests: Sequence[ShardRequest], options: str
) -> torch.Tensor:
    """Within one tensor-parallel group."""
    _check_descriptions(comm, [_describe_whole(request) for request in requests], options, None)
    parts = [request.storage.part for request in requests]
    return check_parts(comm, [r.name for r in requests], [part for part in parts if part])


def fingerprint(
    requests: Sequence[ShardRequest], options: str, extents: torch.Tensor, *, parts: bool
) -> int:
    """What :func:`exchange_extents` compared and returned, of a group that shares weights or holds
    them in ``parts``, as a number from 1 to 2**31 - 2.

    Ranks whose numbers differ are not in the same world.
    """
    describe = _describe_whole if parts else _describe
    digest = hashlib.sha256("\n".join([options, *map(describe, requests)]).encode())
    digest.update(ctypes.string_at(extents.data_ptr(), extents.nbytes))
    return int.from_bytes(digest.digest()[:8], "big") % (2**31 - 2) + 1


def _describe(request: ShardRequest) -> str:
    """What the ranks that share a weight have in common."""
    part = request.storage.part
    place = "" if part is None else f", {part}"
    return _described(request, tuple(request.storage.shape), place)


def _describe_whole(request: ShardRequest) -> str:
    """What the ranks that hold parts of a weight have in common."""
    storage = request.storage
    assert storage.part is not None
    # Amaxes of the columnwise copy are exchanged, too.
    copies = " and a columnwise copy" if storage.has_columnwise else ""
    cut = f" cut by {LINES[storage.part.dim]}{copies}"
    return _described(request, tuple(storage.part.whole), cut)


def _described(request: ShardRequest, shape: tuple[int, ...], place: str) -> str:
    storage = request.storage
    name = f"{request.name}: " if request.is_named else ""
    recipe = describe_recipe(storage.recipe)
    group = "" if request.amax_group is None else f", amax group {request.amax_group}"
    return f"{name}{shape} {storage.dtype} {recipe}{_state(storage)}{group}{place}"


def _state(storage: QuantizedStorage) -> str:
    """What casts have left in the weight and later casts go on from, as a short text."""
    names = storage.recipe.state
    if not names:
        return ""
    digest = hashlib.sha256()
    for name in names:
        buffer = storage.buffers[name].cpu()
        digest.update(ctypes.string_at(buffer.data_ptr(), buffer.nbytes))
    return f", {', '.join(names)} {digest.hexdigest()[:8]}"


def _check_descriptions(
    comm: Communicator, lines: list[str], options: str, error: ZerocastError | None
) -> None:
    lines = [f"zerocast numerics version {NUMERICS_VERSION}, {options}", *lines]
    by_rank = lines_that_differ(comm, lines, error)
    if by_rank is None:
        return
    for rank, theirs in enumerate(by_rank):
        if theirs == by_rank[0]:
            continue
        if len(theirs) != len(by_rank[0]):
            difference = (
                f"rank 0 has {len(by_rank[0]) - 1} weights and rank {rank} has {len(theirs) - 1}"
            )
        else:
            i = next(i for i, (a, b) in enumerate(zip(by_rank[0], theirs, strict=True)) if a != b)
            place = "" if i == 0 else f" (weight {i - 1})"
            difference = f"rank 0 has '{by_rank[0][i]}' where rank {rank} has '{theirs[i]}'{place}"
            if sorted(theirs) == sorted(by_rank[0]):
                difference += "; they hold the same weights in another order"
        raise RankMismatchError(
            "every rank must give the same weights in the same order with the same recipes: "
            f"{difference}."
        )


def _check_coverage(requests: Sequence[ShardRequest], extents: torch.Tensor) -> None:
    """Raise where the shards of a weight leave a gap or overlap."""
    numels = [r.storage.shape.numel() for r in requests]
    i = first_wrong_partition(numels, extents)
    if i is not None:
        request = requests[i]
        problem = check_partition(numels[i], [Extent(*e) for e in extents[:, i].tolist()])
        raise RankMismatchError(
            f"the ranks' shards of {request.name} {tuple(request.storage.shape)} must cover each "
            f"of its {numels[i]} elements exactly once: {problem}."
        )
