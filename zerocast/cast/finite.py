"""``check_finite``: raises an error for a NaN or an infinity in a master instead of casting NaN.

It checks the reduced amaxes, so every rank has the same result, and it does so before any
scale is written.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import torch

from zerocast.cast.consistency import raise_in_all
from zerocast.cast.shard_spec import ShardSpec
from zerocast.comm import Communicator
from zerocast.comm.failure import name
from zerocast.errors import NonFiniteError
from zerocast.numerics import E4M3, FLT_MAX, INFINITY_BITS, NVFP4Numerics


def raise_if_not_finite(
    comms: Sequence[Communicator],
    members: Mapping[Communicator, Sequence[int]],
    specs: Sequence[ShardSpec],
    amaxes: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor | None],
) -> None:
    """Raise :class:`NonFiniteError` if an amax is not finite, the same on every rank of all groups.

    The amax is taken after rounding to the weight's nominal dtype, so a finite FP32 master fails if
    it overflows FP16 or BF16. An NVFP4 master above :data:`LARGEST_NVFP4` fails because it decodes
    to infinities. The message distinguishes these. Collective.

    Args:
        comms: all groups of the cast.
        members: for each group that shares weights, their indices in the lists that follow.
        specs: the weights.
        amaxes: int32 [1] each, the reduced tensor amaxes.
        masters: this rank's masters.
    """
    bad: list[ShardSpec] = []
    troubles: list[int] = []
    for comm, indices in members.items():
        if not indices:
            continue
        reduced = torch.cat([amaxes[i] for i in indices]).tolist()
        found = [
            i for i, amax in zip(indices, reduced, strict=True) if amax > _largest_bits(specs[i])
        ]
        # Weights may share an amax, so the ranks that own each weight look for the cause; then
        # those that own other tensor-parallel shards of it.
        bad += [specs[i] for i in found]
        own = [_trouble(specs[i], masters[i]) for i in found]
        troubles += _worst(comm, [trouble and trouble * _RANKS + comm.rank for trouble in own])
    tp_shards: dict[Communicator, list[int]] = {}
    for i, spec in enumerate(bad):
        # Under other schemes a shard has a separate tensor amax, known to these ranks.
        if spec.storage.tp_shard is not None and spec.storage.recipe.scales_tensor:
            tp_shards.setdefault(spec.storage.tp_shard.require_comm(), []).append(i)
    for comm, indices in tp_shards.items():
        worst = _worst(comm, [troubles[i] for i in indices])
        for i, trouble in zip(indices, worst, strict=True):
            troubles[i] = trouble
    problems = [
        f"{spec.name} holds {_TROUBLES[trouble // _RANKS].format(spec.storage.dtype)}"
        for spec, trouble in zip(bad, troubles, strict=True)
        if trouble
    ]
    error = None
    if problems:
        ranks = sorted({trouble % _RANKS for trouble in troubles if trouble})
        error = NonFiniteError(
            f"check_finite requires finite master weights, but {'; '.join(problems)}. Nothing was "
            "written; skip this step, or cast without check_finite to let the loss show NaN. Found "
            f"on {name(ranks)} of the group that shares the weight."
        )
    if len(comms) > 1:
        raise_in_all(comms, error)
    elif error is not None:  # all ranks of the one group have read the same amaxes
        raise error


def _worst(comm: Communicator, troubles: Sequence[int]) -> list[int]:
    """Return the elementwise maxima over the group's ranks; an empty list takes no collective."""
    found = torch.tensor(troubles, dtype=torch.int32, device="cpu")
    if troubles:
        comm.all_reduce_max_(found)
    return found.tolist()


_RANKS = 2**24
"""Votes are trouble * _RANKS + rank: the maximum is the worst trouble, and its last rank."""

LARGEST_NVFP4 = FLT_MAX / E4M3.max
"""The largest FP32 number that decoding can multiply by a block's scale."""

_LARGEST_NVFP4_BITS = struct.unpack("<i", struct.pack("<f", LARGEST_NVFP4))[0]

_TROUBLES = {
    1: f"finite values above {LARGEST_NVFP4:.4g}, which NVFP4 decodes as infinities",
    2: "finite values that overflow {} to an infinity",
    3: "an infinity",
    4: "a NaN",
}


def _largest_bits(spec: ShardSpec) -> int:
    """Return the bits of the largest amax that is decoded to finite values."""
    is_nvfp4 = isinstance(spec.storage.recipe.numerics, NVFP4Numerics)
    return _LARGEST_NVFP4_BITS if is_nvfp4 else INFINITY_BITS - 1


def _trouble(spec: ShardSpec, master: torch.Tensor | None) -> int:
    """Return the worst of :data:`_TROUBLES` in this rank's shard, or 0."""
    if master is None:
        return 0
    if bool(master.isnan().any()):
        return 4
    if bool(master.isinf().any()):
        return 3
    rounded = master.to(spec.storage.recipe.round_to(spec.storage.dtype)).float().abs()
    if bool(rounded.isinf().any()):
        return 2
    return int((rounded.view(torch.int32) > _largest_bits(spec)).any())
