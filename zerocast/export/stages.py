"""Buckets of tensors, and the stages in which the ranks cast and gather each.

Note: two buckets
~~~~~~~~~~~~~~~~~
A bucket is what its user asks for at once, such as a file. Beside it a rank holds what is on the
way: a stage that travels, and is stored when it has come; of that and of the next the codes and
scales that it cast itself; the amaxes of the latter. A bucket is cut into stages of which that is
no more than another bucket, on the rank that owns most; or, where stages are used one by one, of
which that and the one that is used are no more than two. So a rank holds its shards and two
buckets. Stages are few where each rank owns little: every one is planned anew.

A stage has one tensor at least, and all that share a tensor amax. One that does not fit beside
others goes alone: nothing else is on the way while it is cast, gathered and used.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerocast.comm import Communicator
from zerocast.errors import ZerocastError
from zerocast.export.entries import Entry
from zerocast.export.shard_plan import ShardPlan

NamedTensors = dict[str, torch.Tensor]
"""Tensors of a checkpoint by their names."""


@dataclass(frozen=True)
class Stage:
    """What ranks cast and gather at once.

    Attributes:
        entries: what it consists of, in order.
        goes_alone: whether a rank has no room for another stage beside it.
    """

    entries: list[Entry]
    goes_alone: bool


def in_buckets(entries: Iterable[Entry], num_bytes: int) -> list[list[Entry]]:
    """Return the entries of each bucket, in order: a bucket is closed once it has ``num_bytes``.
    Those that share a tensor amax are in one.
    """
    buckets: list[list[Entry]] = []
    placed: dict[str, list[Entry]] = {}
    size = num_bytes
    for entry in entries:
        together = placed.get(entry.amax_group or "")
        if together is not None:
            together.append(entry)
            continue
        if not buckets or size >= num_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(entry)
        size += entry.num_bytes
        if entry.amax_group is not None:
            placed[entry.amax_group] = buckets[-1]
    return buckets


def largest_shares(comm: Communicator, entries: Iterable[Entry]) -> dict[str, float]:
    """Return by name how much of each entry the rank casts that casts most of it. Collective."""
    own = {
        entry.name: entry.shard.extent.size / max(entry.shape.numel(), 1) if entry.shard else 0.0
        for entry in entries
    }
    bits = torch.tensor(list(own.values()), dtype=torch.float32, device="cpu").view(torch.int32)
    comm.all_reduce_max_(bits)
    return dict(zip(own, bits.view(torch.float32).tolist(), strict=True))


def in_stages(
    bucket: Sequence[Entry], num_bytes: int, shares: Mapping[str, float], *, keeps_bucket: bool
) -> list[Stage]:
    """Return the stages of a bucket, in order, the same on all ranks.

    Args:
        bucket: its entries.
        num_bytes: what a bucket has, or more.
        shares: those of :func:`largest_shares`.
        keeps_bucket: whether a bucket's tensors are held until it is complete, and then used.
    """
    last = {entry.amax_group or entry.name: i for i, entry in enumerate(bucket)}
    together: list[list[Entry]] = []
    open_until = -1
    for i, entry in enumerate(bucket):
        if i > open_until:
            together.append([])
        together[-1].append(entry)
        open_until = max(open_until, last[entry.amax_group or entry.name])
    room = max(num_bytes, sum(_whole_and_work(entry, 0.0)[0] for entry in bucket))
    room = room if keeps_bucket else 2 * room
    stages: list[Stage] = []
    size = 0.0
    for entries in together:
        found = [_whole_and_work(entry, shares[entry.name]) for entry in entries]
        used = sum(whole if keeps_bucket else 2 * whole for whole, _ in found)
        needed = used + sum(work for _, work in found)
        size += needed
        if stages and size <= room:
            stages[-1].entries.extend(entries)
        else:
            stages.append(Stage(entries, needed > room))
            size = needed
    return stages


def _whole_and_work(entry: Entry, share: float) -> tuple[int, float]:
    """Return the bytes that the tensors of an entry have, and that a rank needs beside them which
    casts so much of it: for scales as they travel, for its own codes and scales twice, and amaxes.
    """
    if entry.recipe is None:
        return entry.num_bytes, 0
    grid, numel = entry.recipe.planes(entry.shape, columnwise=False)[0].grid, entry.shape.numel()
    blocks = grid.num_blocks * numel // max(grid.numel, 1)
    scales = blocks * entry.recipe.numerics.scale_dtype.itemsize
    whole = entry.num_bytes + scales
    return whole, scales + share * (2 * whole + 4 * blocks)


def in_turn(
    stages: Sequence[Sequence[Entry]],
    begin: Callable[[Sequence[Entry]], tuple[ShardPlan | None, ZerocastError | None]],
    exchange: Callable[[ShardPlan | None, ZerocastError | None], None],
    gather: Callable[[Sequence[Entry], ShardPlan | None], Callable[[], NamedTensors]],
) -> Iterator[NamedTensors]:
    """Yield the tensors of one stage after the other. While one is gathered the next is cast and
    the one after it is measured, and the gather of the next is begun before one is yielded.

    Args:
        stages: their entries.
        begin: plans and measures a stage; returns the plan or an error.
        exchange: what ranks exchange for that, and where they raise.
        gather: begins to gather a stage that was cast; what it returns ends that.
    """
    # Collectives follow one another, and a small one would wait behind the gather before it. So all
    # that is exchanged for a stage comes before the gather of the one before it.
    plan: ShardPlan | None = None
    finish: Callable[[], NamedTensors] = dict
    for stage, after in itertools.pairwise([[], *stages, [], []]):
        if plan is not None:
            plan.encode()
        following, error = begin(after)
        tensors = finish()
        finish = dict  # what the other held is let go of
        exchange(following, error)
        finish, plan = gather(stage, plan), following
        if tensors:
            yield tensors
        del tensors
