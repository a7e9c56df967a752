"""``torch.amp.GradScaler`` as it is: one scale on all ranks, a step is skipped by all or none."""

from functools import partial

import pytest
import torch
from torch.optim import SGD

from tests.optim.training import NVFP4, Training, assert_cast_of, train_whole
from tests.support.ranks import on_ranks
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer


@pytest.mark.parametrize("unscale_first", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_on_all(unscale_first: bool) -> None:
    """Of three steps the second overflows on rank 1 alone: all ranks skip it, halve the scale, and
    end with the weights of the two others, bit for bit (scales are powers of two).
    """

    def train(comm: Communicator) -> tuple[list[torch.nn.Parameter], list[float]]:
        training = Training(comm, NVFP4, SGD, lr=0.5, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        scales = []
        for step in (0, None, 1):
            training.scaled_backward(scaler, step or 0, overflows=step is None and comm.rank == 1)
            if unscale_first:
                scaler.unscale_(training.optimizer)
            scaler.step(training.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return training.params, scales

    whole = train_whole(NVFP4, 2, 3, partial(SGD, lr=0.5, momentum=0.9))
    for params, scales in run_in_process(3, train):
        assert scales == [1024.0, 512.0, 512.0]
        assert_cast_of(params, whole)


def test_clipping_between_unscale_and_step() -> None:
    """``unscale_``, ``clip_grad_norm_``, ``step``: the norm is that of unscaled gradients, and a
    skipped step leaves nothing behind for the next one.
    """

    def train(comm: Communicator) -> tuple[list[float], torch.Tensor]:
        weight = torch.nn.Parameter(torch.zeros(300))
        optimizer = ZeroOptimizer([weight], SGD, group=comm, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        norms = []
        for gradient in (torch.inf, 2.0):
            weight.grad = None  # the model's zero_grad, of which the optimizer does not hear
            scaler.scale((weight * (gradient if comm.rank == 0 else 2.0)).sum()).backward()
            scaler.unscale_(optimizer)
            norms.append(optimizer.clip_grad_norm_(1e9).item())
            scaler.step(optimizer)
            scaler.update()
        return norms, weight.detach()

    for norms, weight in run_in_process(2, train):
        assert norms == [torch.inf, pytest.approx(2.0 * 300**0.5)]
        assert torch.equal(weight, torch.full((300,), -2.0))


def test_fp16_gradients_are_unscaled_in_fp32_after_they_are_reduced() -> None:
    """An FP16 gradient of 2^-30 exists only scaled: unscaled in FP16 it would be zero."""

    def train(comm: Communicator) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(40, dtype=torch.float16))
        optimizer = ZeroOptimizer([weight], SGD, group=comm, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scaler.scale(torch.zeros(()))  # the scaler makes its scale at the first loss it sees
        weight.grad = torch.full((40,), 2.0**-14, dtype=torch.float16)
        scaler.step(optimizer)
        scaler.update()
        return optimizer.gather_master(weight)

    for master in run_in_process(3, train):
        assert torch.equal(master, torch.full((40,), -(2.0**-30)))


def test_a_disabled_scaler_changes_nothing() -> None:
    """``GradScaler(enabled=False)`` steps as if it were not there."""

    def train(comm: Communicator) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.zeros(10))
        optimizer = ZeroOptimizer([weight], SGD, group=comm, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return weight.detach()

    for weight in run_in_process(2, train):
        assert torch.equal(weight, torch.full((10,), -1.0))


@pytest.mark.parametrize("call", ["unscale_", "step"])
@on_ranks("in_process", 2)
def test_clipping_before_unscaling_is_refused(comm: Communicator, call: str) -> None:
    """Gradients clipped with their scale would be tiny, or clipped in vain."""
    weight = torch.nn.Parameter(torch.zeros(10))
    optimizer = ZeroOptimizer([weight], SGD, group=comm, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    optimizer.clip_grad_norm_(0.5)
    with pytest.raises(InputError, match=r"scaler.unscale_\(optimizer\) before optimizer.clip"):
        getattr(scaler, call)(optimizer)
