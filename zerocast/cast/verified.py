"""Verification: whether all ranks hold, after a gather, what they have cast.

Note: what verify sees
~~~~~~~~~~~~~~~~~~~~~~
``"hash"`` compares a digest of codes, scales, amaxes and recipe state, and the step number, in one
all-reduce of two integers. It detects whatever makes the bytes of one rank differ from those of
another: a flipped bit, a stale scale, codes that were not gathered or were stored at the wrong
place, a rank with another recipe or step. It does not detect wrong bytes that all ranks have
gathered: bytes that their owner cast wrongly, or that changed in its memory before the gather.
Copies that each rank derives are not compared. Digests are read from memory after the gather.

``"full"`` also takes one weight of each group in each cast (all in turn, in an order that depends
on the step number). The ranks gather its masters; each casts it whole by the reference and
compares every buffer, derived copies included. So it also detects an owner that cast wrongly,
under another recipe, or from other masters than it has now.

Neither detects wrong masters. Masters must not change between the cast and the comparison.

If ranks differ, the first weight that differs is cast whole, as for ``"full"``, to decide which
ranks hold the right bytes. Every rank then raises the same :class:`VerificationError`. A rank with
other bytes writes a file from which ``python -m zerocast reproduce FILE`` repeats the cast. The sum
of the shards' digests shows whether a rank received other masters than their owners sent. Then no
decision is possible, and the error says so.
"""

from __future__ import annotations

import ctypes
import re
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch

from zerocast.arguments import check_choice, why_no_memory
from zerocast.cast.capture import is_captured
from zerocast.cast.consistency import agree_in_all, raise_in_all
from zerocast.cast.fault_file import write_fault
from zerocast.cast.prepared_cast import PreparedCast
from zerocast.cast.shard_spec import ShardSpec
from zerocast.cast.whole_cast import (
    Difference,
    HeldWeight,
    WholeCast,
    cast_whole,
    first_difference,
)
from zerocast.comm import Attempt, Communicator, failure, raise_together
from zerocast.errors import InputError, UnsupportedError, VerificationError, ZerocastError
from zerocast.layout import Owners
from zerocast.numerics import NUMERICS_VERSION
from zerocast.recipes import describe_recipe
from zerocast.tensors.digest import RepeatedDigests
from zerocast.tensors.ledger import announced

VerifyMode: TypeAlias = Literal["off", "hash", "full"]

MastersOf: TypeAlias = Callable[[Communicator, int], "torch.Tensor | None"]
"""Takes a group and the index of one of its weights; returns this rank's shard of the master."""

_MOST = 2**31 - 3
_NO_NUMBERS = torch.empty(0, dtype=torch.int64, device="cpu")
_WEIGHTS_NAMED = 5
"""The number of weights that a message names besides the first."""


def check_mode(mode: VerifyMode) -> VerifyMode:
    """Return ``mode``; raise :class:`InputError` for an unknown one."""
    check_choice("verify", mode, get_args(VerifyMode))
    return mode


class Verification:
    """A comparison of what the ranks of some groups hold. All methods are collective over them.

    Args:
        mode: what is compared.
        weights: for each group its weights.
        tp_comms: the groups that hold tensor-parallel shards of the weights.
        masters: returns the masters that they are cast from.
    """

    def __init__(
        self,
        mode: VerifyMode,
        weights: Mapping[Communicator, Sequence[HeldWeight]],
        tp_comms: Iterable[Communicator],
        masters: MastersOf,
    ) -> None:
        self._mode, self._weights, self._masters = mode, weights, masters
        self._tp_comms = list(tp_comms)
        self._comms = [*weights, *self._tp_comms]
        self._digests = {comm: RepeatedDigests() for comm in weights}
        # The compared tensors, valid until a replaced buffer is announced.
        self._version, self._tensors = -1, dict[Communicator, list[torch.Tensor]]()

    def check(self, step: int) -> None:
        """Compare, in step number ``step``; do nothing if the mode is "off".

        Raises:
            UnsupportedError: in the capture of a CUDA graph.
            VerificationError: on every rank, if bytes differ between ranks or from the reference
                cast. It names weight, element, ranks and values.
        """
        if self._mode == "off":
            return
        if any(is_captured(each[0].storage.device) for each in self._weights.values() if each):
            raise UnsupportedError(
                f"a CUDA graph cannot hold a comparison on the host, got verify={self._mode!r}; "
                f"capture forward and backward only, or leave verify out."
            )
        numbers: dict[Communicator, torch.Tensor] = {}
        votes = [(comm, 1 + step % _MOST) for comm in self._tp_comms]
        attempt = Attempt()
        with attempt:
            numbers = {comm: self._numbers(comm) for comm in self._weights}
            votes += [(comm, _vote(step, numbers[comm])) for comm in self._weights]
        if attempt.error is not None:
            votes = [(comm, 0) for comm in self._comms]
        if not agree_in_all(votes, attempt.error):
            self._explain(step, numbers)
        if self._mode == "full":
            self._compare_sample(step)

    # --- digests ---

    def _numbers(self, comm: Communicator) -> torch.Tensor:
        """Return the digests of all buffers, weight by weight, on the CPU until the next call."""
        if self._version != (version := announced("tensor")):
            self._tensors = {
                each: [tensor for weight in weights for tensor in _compared(weight)]
                for each, weights in self._weights.items()
            }
            self._version = version
        tensors = self._tensors[comm]
        return self._digests[comm].of(tensors).cpu() if tensors else _NO_NUMBERS

    def _explain(self, step: int, numbers: Mapping[Communicator, torch.Tensor]) -> None:
        """Raise what differs between ranks."""
        error: ZerocastError | None = None
        differing: dict[Communicator, list[str]] = {}
        for comm in self._comms:  # ranks of a tensor-parallel group must be at one step, too
            mine = numbers.get(comm, _NO_NUMBERS).tolist()
            by_rank = comm.all_gather_object((step, mine))
            if len({at for at, _ in by_rank}) > 1:
                steps = ", ".join(f"rank {r} at {at}" for r, (at, _) in enumerate(by_rank))
                error = VerificationError(
                    f"all ranks must be at the same step, got {steps}; load the last checkpoint on "
                    "every rank."
                )
            weights = self._weights.get(comm, ())
            names = [weight.name for weight in weights for _ in _compared(weight)]
            held = zip(names, zip(*(theirs for _, theirs in by_rank), strict=False), strict=False)
            differing[comm] = list(dict.fromkeys(n for n, each in held if len(set(each)) > 1))
        raise_in_all(self._comms, error)
        # Decide the first of a group; ranks with other tensor-parallel shards of it take part.
        judged = {name for names in differing.values() for name in names[:1]}
        for comm in self._tp_comms:
            judged = judged.union(*comm.all_gather_object(judged))
        for comm, names in differing.items():
            for i, weight in enumerate(self._weights.get(comm, ())):
                if weight.name in judged:
                    error = self._judge(comm, i, step, names[1:]) or error
            if error is None and names:
                error = VerificationError(
                    f"ranks held different bytes of {names[0]}, and now hold the right ones: other "
                    "code wrote it during the comparison. Load the last checkpoint."
                )
        raise_in_all(self._comms, error)

    # --- the whole cast ---

    def _compare_sample(self, step: int) -> None:
        """Compare one weight of each group with its whole cast; n steps take each of n weights."""
        error: ZerocastError | None = None
        for comm, weights in self._weights.items():
            compared = [i for i, weight in enumerate(weights) if weight.is_compared]
            if count := len(compared):
                draws = torch.Generator("cpu").manual_seed(step // count)
                order = torch.randperm(count, generator=draws, dtype=torch.int64, device="cpu")
                error = self._judge(comm, compared[order[step % count]], step) or error
        raise_in_all(self._comms, error)

    def _judge(
        self, comm: Communicator, i: int, step: int, others: Sequence[str] = ()
    ) -> ZerocastError | None:
        """Cast a weight whole; return the error that names the ranks with other bytes, or None.

        It is the same on all ranks of ``comm``. ``others`` names other weights that differ.
        """
        weights, weight = self._weights[comm], self._weights[comm][i]
        places = [i]
        if weight.amax_group is not None:
            label = weight.amax_group
            places += [k for k, w in enumerate(weights) if w.amax_group == label and k != i]
        shards = [self._masters(comm, k) for k in places]
        attempt, found = Attempt(), None
        with attempt:
            for k, shard in zip(places, shards, strict=True):
                if shard is not None and (problem := why_no_memory(shard)) is not None:
                    raise InputError(
                        f"{weights[k].name}: the master must not change between the cast and the "
                        f"comparison, got {problem}."
                    )
        if attempt.error is not None:  # the other ranks wait for values
            shards = [None if shard is None else torch.zeros_like(shard) for shard in shards]
        whole = cast_whole(comm, [weights[k] for k in places], shards)
        with attempt:
            found = None if attempt.error else first_difference(weight, whole.storage)
        raise_together(comm, attempt.error)
        reports = comm.all_gather_object((found, whole.owned, whole.gathered))
        sent = sum(owned for _, owned, _ in reports)
        if astray := [rank for rank, (*_, got) in enumerate(reports) if (got - sent) % 2**64]:
            return VerificationError(
                f"{weight.name}: its right bytes cannot be determined, because "
                f"{failure.name(astray)} gathered other bytes of its master than the owners sent: "
                "the transport or memory changes data. Do not use these weights; repair that, then "
                "load the last checkpoint."
            )
        if all(each is None for each, *_ in reports):
            return None
        left = "" if found is None else _leave_file(comm, weight, whole, found, step)
        everyone: list[tuple[Difference | None, str]] = comm.all_gather_object((found, left))
        message = _message(weight, everyone)
        if others:
            more = f" and {len(others) - _WEIGHTS_NAMED} more" * (len(others) > _WEIGHTS_NAMED)
            message += f" Ranks also differ in {', '.join(others[:_WEIGHTS_NAMED])}{more}."
        return VerificationError(message)


def verification_of(
    mode: VerifyMode,
    specs: Sequence[ShardSpec],
    prepared: PreparedCast,
    members: Mapping[Communicator, Sequence[int]],
    owners: Mapping[Communicator, Owners],
    tp_comms: Iterable[Communicator],
) -> Verification:
    """Return the verification of a plan's weights.

    Args:
        specs: the weights.
        prepared: the launches, with the masters that are cast.
        members: for each group the indices of its weights.
        owners: for each group the owners of its members.
        tp_comms: the groups that hold tensor-parallel shards.
    """
    weights: dict[Communicator, list[HeldWeight]] = {comm: [] for comm in members}
    for comm, places in members.items() if mode != "off" else ():
        for at, i in enumerate(places):
            each = specs[i]
            held = HeldWeight(each.name, each.storage, owners[comm].of_weight(at), each.amax_group)
            weights[comm].append(held)
    return Verification(mode, weights, tp_comms, lambda comm, at: prepared.bound[members[comm][at]])


def _compared(weight: HeldWeight) -> list[torch.Tensor]:
    """Return the buffers that are equal on all ranks, except those that each rank derives."""
    if not weight.is_compared:
        return []
    buffers, derived = weight.storage.buffers, weight.storage.derived_names
    return [buffers[name] for name in sorted(buffers) if name not in derived]


def _vote(step: int, numbers: torch.Tensor) -> int:
    """Return a checksum of the step and of all digests."""
    held = ctypes.string_at(numbers.data_ptr(), numbers.nbytes)
    return 1 + zlib.crc32(held, zlib.crc32(step.to_bytes(8, "little"))) % _MOST


def _message(weight: HeldWeight, everyone: Sequence[tuple[Difference | None, str]]) -> str:
    """Return the message: which ranks hold what, and what the whole cast has there."""
    ranks_of: dict[Difference, list[int]] = {}
    right = [rank for rank, (found, _) in enumerate(everyone) if found is None]
    for rank, (found, _) in enumerate(everyone):
        if found is not None:
            ranks_of.setdefault(found, []).append(rank)
    reports = []
    for found, ranks in ranks_of.items():
        owner = f", of the shard of rank {found.owner}" if found.owner >= 0 else ""
        more = f", the first of {found.count} elements that differ," * (found.count > 1)
        reports.append(
            f"{_ranks_hold(ranks)} {found.held} at element {list(found.place)} of "
            f"{found.buffer}{owner}{more} where the unsharded cast has {found.cast}"
        )
    rest = f"; {_ranks_hold(right)} the right bytes" if right else ""
    if all(found.owner not in (-1, *ranks) for found, ranks in ranks_of.items()):
        cause = "the codes of other ranks were not gathered, or were changed since"
    elif right:
        cause = "it is stale there, was changed, or was cast under another recipe"
    else:
        cause = (
            "its owner holds other bytes as well: it cast under another recipe, cast another "
            "master than it has now, or cast wrongly, or the codes were changed before the gather"
        )
    files = [left for _, left in everyone if left]
    return (
        f"{weight.name} {tuple(weight.storage.shape)} differs from the cast of its master: "
        f"{'; '.join(reports)}{rest}: {cause}. Do not use these weights; load the last checkpoint. "
        f"python -m zerocast reproduce FILE repeats the cast: {', '.join(files)}."
    )


def _ranks_hold(ranks: Sequence[int]) -> str:
    return f"{failure.name(ranks)} {'hold' if len(ranks) > 1 else 'holds'}"


def _leave_file(
    comm: Communicator, weight: HeldWeight, whole: WholeCast, found: Difference, step: int
) -> str:
    """Write what repeats the cast into the working directory; return the path, or why not."""
    storage, tp_shard = weight.storage, weight.storage.tp_shard
    name = re.sub(r"[^\w.-]+", "_", weight.name)
    # Ranks of several groups can have one number, and other runs and hosts may write here, too.
    where = f"{name}-step{step}-rank{comm.rank}-{secrets.token_hex(4)}"
    path = Path.cwd() / f"zerocast-fault-{where}.safetensors"
    fault = {
        "numerics version": NUMERICS_VERSION,
        "name": weight.name,
        "shape": list(storage.shape),
        "dtype": str(storage.dtype).removeprefix("torch."),
        "scheme": describe_recipe(storage.recipe),
        "step": step,
        "rank": comm.rank,
        "owners": [[rank, extent.start, extent.end] for rank, extent in weight.owners],
        "ranks": comm.size,
        "columnwise": storage.has_columnwise,
        "grouped": weight.amax_group is not None,
        "found": asdict(found),
    }
    if tp_shard is not None:
        fault["tensor parallel shard"] = [
            list(tp_shard.whole), tp_shard.dim, tp_shard.start, tp_shard.size, tp_shard.per_matrix,
        ]  # fmt: skip
    tensors = {"master": whole.master, "amaxes": whole.amaxes}
    tensors |= {f"before/{name}": tensor for name, tensor in whole.before.items()}
    tensors |= {f"held/{name}": tensor for name, tensor in storage.buffers.items()}
    try:
        fault["recipe"] = storage.recipe.text
    except TypeError:  # it holds a function, which cannot be stored: reproduce says so
        fault["recipe"] = None
    try:
        write_fault(path, fault, tensors)
    except OSError as error:
        return f"rank {comm.rank} could not write {path} ({error})"
    return str(path)
