"""Buckets of tensors, and the stages in which the ranks cast and gather each.

Note: two buckets
~~~~~~~~~~~~~~~~~
A bucket is what the caller asks for at once, such as a file. Besides it, a rank holds data in
flight: the stage that is gathered, until it is stored; the codes and scales that this rank cast for
that stage and for the next; and the amaxes of the next. A bucket is split into stages such that the
data in flight is at most another bucket, on the rank that owns most. If stages are used one by one,
the data in flight and the stage in use are at most two buckets. So a rank holds its shards and two
buckets. Each stage needs a plan, so stages are large where each rank owns little.

A stage has at least one tensor, and all that share its tensor amax. A stage without room for
another goes alone: nothing else is in flight while it is cast, gathered and used.
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
    """Entries that ranks cast and gather at once.

    Attributes:
        entries: its entries, in order.
        goes_alone: whether a rank has no room for another stage beside it.
    """

    entries: list[Entry]
    goes_alone: bool


def in_buckets(entries: Iterable[Entry], num_bytes: int) -> list[list[Entry]]:
    """Return the entries of each bucket, in order: a bucket is closed once it has ``num_bytes``.
    Entries that share a tensor amax are in the same bucket.
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
    """Return by name the largest fraction of each entry that a rank casts. Collective."""
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
        num_bytes: the target size of a bucket; its tensors may have more bytes.
        shares: the result of :func:`largest_shares`.
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
    """Return the bytes of an entry's tensors, and those that a rank which casts ``share`` of it
    needs besides: scales in flight, its codes and scales twice, and amaxes.
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
    """Yield the tensors of each stage. While one is gathered, the next is cast and the one after
    that is measured. The gather of the next starts before one is yielded.

    Args:
        stages: the entries of each stage.
        begin: plans and measures a stage; returns the plan and an error.
        exchange: runs the exchanges of that plan, or raises the error on all ranks.
        gather: starts the gather of a stage that was cast; returns a function that waits for it.
    """
    # Collectives run in order, and a small one would wait for the gather before it. So the
    # exchanges of a stage come before the gather of the previous stage.
    plan: ShardPlan | None = None
    finish: Callable[[], NamedTensors] = dict
    for stage, after in itertools.pairwise([[], *stages, [], []]):
        if plan is not None:
            plan.encode()
        following, error = begin(after)
        tensors = finish()
        finish = dict  # releases what the previous one held
        exchange(following, error)
        finish, plan = gather(stage, plan), following
        if tensors:
            yield tensors
        del tensors
