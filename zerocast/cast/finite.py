"""``check_finite``: a NaN or an infinity in a master weight becomes an error instead of NaN codes.

It judges the reduced amaxes, so every rank comes to the same verdict, and it does so before any
scale is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerocast.cast.request import ShardRequest
from zerocast.cast.world import raise_in_all
from zerocast.comm import Communicator
from zerocast.errors import NonFiniteError
from zerocast.ops import INFINITY_BITS

Candidate = tuple[ShardRequest, torch.Tensor, torch.Tensor | None]
"""A weight, its reduced tensor amax (int32 [1]), and this rank's FP32 master of it."""


def raise_if_not_finite(groups: Sequence[tuple[Communicator, Sequence[Candidate]]]) -> None:
    """Raise :class:`NonFiniteError`, the same on every rank of every group, where an amax is not
    finite.

    The amax is taken after rounding to the weight's nominal dtype, so a finite FP32 master can fail
    here by overflowing FP16 or BF16; the message tells the two apart. Collective.
    """
    problems: list[str] = []
    for comm, candidates in groups:
        if not candidates:
            continue
        amaxes = torch.cat([amax for _, amax, _ in candidates]).cpu()
        bad = [
            c for c, amax in zip(candidates, amaxes.tolist(), strict=True) if amax >= INFINITY_BITS
        ]
        if bad:
            problems += _explain(comm, bad)
    error = None
    if problems:
        error = NonFiniteError(
            f"check_finite requires finite master weights, but {'; '.join(problems)}. Nothing was "
            "written; skip this step, or cast without check_finite to let the loss show NaN."
        )
    if len(groups) > 1:
        raise_in_all([comm for comm, _ in groups], error)
    elif error is not None:  # all ranks of the one group have read the same amaxes
        raise error


def _explain(comm: Communicator, bad: Sequence[Candidate]) -> list[str]:
    """What is wrong with which weight: asked of the ranks that own it, because weights may share
    an amax.
    """
    mine = [_trouble(request, master) for request, _, master in bad]
    found = torch.tensor(mine, dtype=torch.int32, device="cpu")
    comm.all_reduce_max_(found)
    return [
        f"{request.name} holds {_TROUBLES[trouble].format(request.storage.dtype)}"
        for (request, _, _), trouble in zip(bad, found.tolist(), strict=True)
        if trouble
    ]


_TROUBLES = {
    1: "finite values that overflow {} to an infinity",
    2: "an infinity",
    3: "a NaN",
}


def _trouble(request: ShardRequest, master: torch.Tensor | None) -> int:
    """The worst of :data:`_TROUBLES` in this rank's shard, or 0."""
    if master is None:
        return 0
    if bool(master.isnan().any()):
        return 3
    if bool(master.isinf().any()):
        return 2
    return int(master.to(request.storage.recipe.round_to(request.storage.dtype)).isinf().any())
