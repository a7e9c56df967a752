"""``check_finite``: a NaN or an infinity in a master weight becomes an error instead of NaN codes.

It judges the reduced amaxes, so every rank comes to the same verdict, and it does so before any
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
    """Raise :class:`NonFiniteError`, the same on every rank of every group, where an amax is not
    finite.

    The amax is taken after rounding to the weight's nominal dtype, so a finite FP32 master can fail
    here by overflowing FP16 or BF16; so can one of NVFP4 above :data:`LARGEST_NVFP4`, of which
    decoding makes infinities. The message tells them apart. Collective.

    Args:
        comms: all groups of the cast.
        members: by group that shares weights, the places of these in the lists that follow.
        specs: the weights.
        amaxes: int32 [1] each, the reduced tensor amaxes.
        masters: this rank's.
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
        # Asked of the ranks that own it, because weights may share an amax; and then of those that
        # own other shards of it.
        bad += [specs[i] for i in found]
        own = [_trouble(specs[i], masters[i]) for i in found]
        troubles += _worst(comm, [trouble and trouble * _RANKS + comm.rank for trouble in own])
    tp_shards: dict[Communicator, list[int]] = {}
    for i, spec in enumerate(bad):
        # Under other schemes a shard's tensor amax is its own, which these ranks have.
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
    """The largest numbers of the group's ranks; none are asked for where there are none."""
    found = torch.tensor(troubles, dtype=torch.int32, device="cpu")
    if troubles:
        comm.all_reduce_max_(found)
    return found.tolist()


_RANKS = 2**24
"""Votes are a trouble times this, and the rank that has it: of the worst the last rank is named."""

LARGEST_NVFP4 = FLT_MAX / E4M3.max
"""The largest FP32 number that a block's scale can be multiplied by, as decoding does."""

_LARGEST_NVFP4_BITS = struct.unpack("<i", struct.pack("<f", LARGEST_NVFP4))[0]

_TROUBLES = {
    1: f"finite values above {LARGEST_NVFP4:.4g}, of which NVFP4 decodes infinities",
    2: "finite values that overflow {} to an infinity",
    3: "an infinity",
    4: "a NaN",
}


def _largest_bits(spec: ShardSpec) -> int:
    """The bits of the largest amax that is decoded to finite values."""
    is_nvfp4 = isinstance(spec.storage.recipe.numerics, NVFP4Numerics)
    return _LARGEST_NVFP4_BITS if is_nvfp4 else INFINITY_BITS - 1


def _trouble(spec: ShardSpec, master: torch.Tensor | None) -> int:
    """The worst of :data:`_TROUBLES` in this rank's shard, or 0."""
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
