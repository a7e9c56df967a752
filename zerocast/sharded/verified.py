"""The comparison of a gathered weight between ranks: :mod:`zerocast.cast.verified` under FSDP2.

FSDP2 gathers parameters one by one, so they are compared one by one: at the first gather after each
cast, by a small collective over the ranks that shard the weight. Replicas of them (HSDP) are not
compared with each other; ``zerocast.verify`` does that for a model that is unsharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from zerocast.cast.verified import Verification, VerifyMode
from zerocast.cast.whole_cast import HeldWeight
from zerocast.comm import Communicator
from zerocast.layout import Extent
from zerocast.sharded.all_gather_input import AllGatherInput
from zerocast.sharded.state import State
from zerocast.tensors import QuantizedStorage
from zerocast.tensors.quantize import plain_master


class Gathered(Protocol):
    """What is known of a weight that FSDP2 gathers; a :class:`LowBitAllGather` is one.

    Attributes:
        name: the weight's.
        state: what its recipe remembers.
    """

    name: str
    state: State

    @property
    def shards(self) -> AllGatherInput: ...

    @property
    def master(self) -> torch.Tensor: ...


def compare_gathered(
    mode: VerifyMode, weight: QuantizedStorage, members: Sequence[Gathered]
) -> None:
    """Compare ``weight``, which has been gathered. Collective over the ranks that share it.

    Args:
        mode: what is compared.
        weight: codes, scales and derived copies.
        members: the weight, and the others of its amax group.

    Raises:
        VerificationError: on every rank, where one holds other bytes than were cast.
    """
    shards, label = members[0].shards, "together" if len(members) > 1 else None
    whole = shards.storage
    held = QuantizedStorage(
        whole.shape, shards.dtype, whole.recipe, weight.buffers | members[0].state, whole.tp_shard
    )
    weights = [HeldWeight(members[0].name, held, _owners(shards), label)]
    weights += [
        HeldWeight(m.name, m.shards.storage, _owners(m.shards), label, is_compared=False)
        for m in members[1:]
    ]

    def master(_: Communicator, place: int) -> torch.Tensor | None:
        own = members[place].master
        return plain_master(own, held.device) if own.numel() else None

    tp_comms = [] if whole.tp_shard is None else [whole.tp_shard.require_comm()]
    Verification(mode, {shards.comm: weights}, tp_comms, master).check(shards.casts)


def _owners(shards: AllGatherInput) -> list[tuple[int, Extent]]:
    extents = [(rank, shards.rows.extent(rank)) for rank in range(shards.comm.size)]
    return [(rank, extent) for rank, extent in extents if extent]
