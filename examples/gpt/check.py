"""Is what training left on this rank really the cast of the masters?

The FP32 masters are gathered whole, cast unsharded by the reference backend (plain torch, the
numerics written out), and every stored byte is compared: codes, scales, amaxes and columnwise
copies, recipe state, plain weights too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import zerocast
from zerocast.comm import Communicator


def check_weights(
    model: torch.nn.Module,
    gather_master: Callable[[torch.Tensor], torch.Tensor],
    comm: Communicator,
) -> tuple[bool, str]:
    """Whether the weights are right on every rank, and that in one line. Collective.

    ``gather_master`` gives the whole FP32 master of a parameter on every rank.
    """
    compared, difference = 0, None
    for name, parameter in model.named_parameters():
        master = gather_master(parameter)
        for buffer, (stored, expected) in stored_and_expected(parameter, master).items():
            compared += stored.nbytes
            difference = difference or first_difference(f"{name}.{buffer}", stored, expected)
    for rank, found in enumerate(comm.all_gather_object(difference)):
        if found is not None:
            return False, f"WRONG: on rank {rank} {found}"
    return True, (
        f"The sharded weights equal the unsharded cast on every rank: {compared:,} bytes compared "
        f"on each of {comm.size}."
    )


def stored_and_expected(
    parameter: torch.Tensor, master: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """By name every buffer of a weight, and what the unsharded cast of ``master`` puts there."""
    if not isinstance(parameter, zerocast.QuantizedTensor):
        return {"data": (parameter.detach(), master.to(parameter.dtype))}
    stored = parameter.quantized_storage.buffers
    expected = unsharded_cast(master, parameter.quantized_storage).quantized_storage.buffers
    return {name: (stored[name], buffer) for name, buffer in expected.items()}


def unsharded_cast(
    master: torch.Tensor, sharded: zerocast.tensors.QuantizedStorage
) -> zerocast.QuantizedTensor:
    """What the latest cast of ``sharded``, or of a part, makes of the whole ``master`` on this rank
    alone, by the reference backend.
    """
    whole = zerocast.empty(master.shape, sharded.recipe, dtype=sharded.dtype)
    buffers = whole.quantized_storage.buffers
    for name in sharded.recipe.state:  # what that cast began with: delayed scaling's history, say
        buffers[name].copy_(sharded.buffers[name])
    sharded.recipe.rewind(buffers)
    with zerocast.use_backend("reference"):
        whole.copy_(master)
    return whole


def first_difference(name: str, stored: torch.Tensor, expected: torch.Tensor) -> str | None:
    """The first element of a buffer that differs in any bit, and both values."""
    same = (stored.view(torch.uint8) == expected.view(torch.uint8)).unflatten(
        -1, (-1, stored.element_size())
    )
    wrong = (~same.all(-1)).nonzero()
    if not len(wrong):
        return None
    place = tuple(wrong[0].tolist())
    return (
        f"{name}{list(place)} is {stored[place].item()}, and the unsharded cast gives "
        f"{expected[place].item()} ({len(wrong)} of {stored.numel()} entries differ)."
    )
