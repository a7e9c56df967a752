"""``torch.amp.GradScaler`` as it is: one scale on all ranks, a step is skipped by all or none."""

from typing import Any

import pytest
import torch
from torch.optim import SGD

from tests.support.ranks import on_ranks
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer

OVERLAP = pytest.mark.parametrize("overlap", [False, True])


def scaled(
    comm: Communicator, overlap: bool, size: int, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[torch.nn.Parameter, ZeroOptimizer, torch.amp.GradScaler]:
    """A weight of zeros, its optimizer, which subtracts gradients, and a scaler."""
    weight = torch.nn.Parameter(torch.zeros(size, dtype=dtype))
    optimizer = ZeroOptimizer([weight], SGD, comm, lr=1.0, overlap_grad_reduce=overlap)
    return weight, optimizer, torch.amp.GradScaler("cpu", **options)


@OVERLAP
@on_ranks("in_process", 2)
def test_clipping_between_unscale_and_step(comm: Communicator, overlap: bool) -> None:
    """``unscale_``, ``clip_grad_norm_``, ``step``: the norm is that of unscaled gradients, and a
    skipped step leaves nothing behind for the next one.
    """
    weight, optimizer, scaler = scaled(comm, overlap, 300, init_scale=256.0)
    for gradient, norm in ((torch.inf, torch.inf), (2.0, 2.0 * 300**0.5)):
        weight.grad = None  # the model's zero_grad, of which the optimizer does not hear
        scaler.scale((weight * (gradient if comm.rank == 0 else 2.0)).sum()).backward()
        scaler.unscale_(optimizer)
        assert optimizer.clip_grad_norm_(1e9).item() == pytest.approx(norm)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(weight.detach(), torch.full((300,), -2.0))


@OVERLAP
@on_ranks("in_process", 3)
def test_fp16_gradients_are_unscaled_in_fp32_after_they_are_reduced(
    comm: Communicator, overlap: bool
) -> None:
    """An FP16 gradient of 2^-30 exists only scaled: unscaled in FP16 it would be zero."""
    weight, optimizer, scaler = scaled(comm, overlap, 40, torch.float16, init_scale=2.0**16)
    scaler.scale(torch.zeros(()))  # the scaler makes its scale at the first loss it sees
    weight.grad = torch.full((40,), 2.0**-14, dtype=torch.float16)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(optimizer.gather_master(weight), torch.full((40,), -(2.0**-30)))


@OVERLAP
@on_ranks("in_process", 2)
def test_a_disabled_scaler_changes_nothing(comm: Communicator, overlap: bool) -> None:
    """``GradScaler(enabled=False)`` steps as if it were not there."""
    weight, optimizer, scaler = scaled(comm, overlap, 10, enabled=False)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(weight.detach(), torch.full((10,), -1.0))


@OVERLAP
@pytest.mark.parametrize("call", ["unscale_", "step"])
@on_ranks("in_process", 2)
def test_clipping_before_unscaling_is_refused(comm: Communicator, call: str, overlap: bool) -> None:
    """Gradients clipped with their scale would be tiny, or clipped in vain."""
    weight, optimizer, scaler = scaled(comm, overlap, 10, init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    optimizer.clip_grad_norm_(0.5)
    with pytest.raises(InputError, match=r"scaler.unscale_\(optimizer\) before optimizer.clip"):
        getattr(scaler, call)(optimizer)


@OVERLAP
@on_ranks("in_process", 3)
def test_an_overflow_on_one_rank_skips_the_step_of_all(comm: Communicator, overlap: bool) -> None:
    """Also where the gradient is sent before the scaler could look at it; the scale is halved
    everywhere, and the next step is made.
    """
    weight, optimizer, scaler = scaled(comm, overlap, 300, init_scale=256.0)
    for gradient in (torch.nan if comm.rank == 1 else 1.0, 2.0):
        optimizer.zero_grad()
        scaler.scale((weight * gradient).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 128.0
    assert torch.equal(weight.detach(), torch.full((300,), -2.0))
