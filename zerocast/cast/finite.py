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
from zerocast.ops import INFINITY_BITS, NAN_BITS

Candidate = tuple[ShardRequest, torch.Tensor, torch.Tensor | None]
"""A weight, its reduced amaxes (int32; the last one is the tensor's), and this rank's FP32 master
of it."""


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
        amaxes = torch.stack([amax[-1] for _, amax, _ in candidates]).cpu()
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
    """What is wrong with each weight; whether FP32 itself is not finite is asked of the ranks that
    own it.
    """
    in_fp32 = torch.tensor(
        [master is not None and not bool(master.isfinite().all()) for _, _, master in bad],
        dtype=torch.int32,
        device="cpu",
    )
    comm.all_reduce_max_(in_fp32)
    reasons = []
    for (request, amax, _), already in zip(bad, in_fp32.tolist(), strict=True):
        kind = "a NaN" if int(amax[-1]) == NAN_BITS else "an infinity"
        if already:
            reasons.append(f"{request.name} holds {kind}")
        else:
            reasons.append(
                f"{request.name} holds finite values that overflow {request.storage.dtype} to an "
                "infinity"
            )
    return reasons
