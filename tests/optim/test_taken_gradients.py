"""What ``.grad`` is once a ``ZeroOptimizer`` with ``overlap_grad_reduce`` has taken the gradient,
and gradients that it must not take. What DDP, hooks and clipping find is in tests/edges.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import SGD

import zerocast
from tests.optim.overlapping import whole_gradients
from tests.support.claims import assert_same_tensors
from tests.support.ranks import on_ranks
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer

BUCKETS = pytest.mark.parametrize("bucket_size", [1, None])


def made(
    comm: Communicator | None = None, bucket_size: int | None = None
) -> tuple[list[torch.nn.Parameter], ZeroOptimizer]:
    """Three weights of zeros, and an optimizer that subtracts mean gradients."""
    params = [torch.nn.Parameter(torch.zeros(64)) for _ in range(3)]
    options: dict[str, Any] = {"overlap_grad_reduce": True, "bucket_size": bucket_size}
    return params, ZeroOptimizer(params, SGD, comm, lr=1.0, **options)


def loss_of(params: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
    """Its gradients are 1, 2 and 3 times the factor."""
    return torch.stack([(place * factor * p).sum() for place, p in enumerate(params, 1)]).sum()


def values(params: Sequence[torch.Tensor]) -> list[float]:
    """One of each weight, all of whose elements are equal."""
    assert all(torch.equal(p, p[:1].expand(64)) for p in params)
    return [p[0].item() for p in params]


USES: dict[str, Callable[[torch.Tensor], object]] = {
    "arithmetic": lambda grad: grad * 2,
    "a write": lambda grad: grad.zero_(),
    "a copy": lambda grad: torch.zeros(64).copy_(grad),
    "a clone": lambda grad: grad.clone(),
    "an element": lambda grad: grad[0],
    "numpy": lambda grad: grad.numpy(),
    "a list": lambda grad: grad.tolist(),
    "an address": lambda grad: grad.data_ptr(),
    "dlpack": torch.from_dlpack,
    ".data": lambda grad: grad.data,
    "other memory": lambda grad: setattr(grad, "data", torch.ones(64)),
}


@pytest.mark.parametrize("use", USES)
def test_a_taken_gradient_is_refused_where_it_is_used(use: str) -> None:
    """And the step is what it is without the attempt; it shows what it is, and has no memory."""
    params, optimizer = made()
    loss_of(params, 1.0).backward()
    assert not whole_gradients(params)
    with pytest.raises(InputError, match="optimizer.clip_grad_norm_, drop gradients with"):
        USES[use](params[0].grad)
    assert repr(params[0].grad) == "TakenGradient(shape=(64,), dtype=torch.float32)"
    optimizer.step()
    assert values(params) == [-1.0, -2.0, -3.0]
    assert all(p.grad is None for p in params)


def test_another_optimizer_does_not_step_without_them() -> None:
    """Torch's, which would leave the weights out, and a new one of zerocast's."""
    params, optimizer = made()
    loss_of(params, 1.0).backward()
    for other in (SGD(params, lr=1.0), ZeroOptimizer(params, SGD, lr=1.0)):
        with pytest.raises(InputError, match="taken during backward"):
            other.step()
    assert values(params) == [0.0, 0.0, 0.0]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in params)


@BUCKETS
@on_ranks("in_process", 2)
def test_gradients_that_the_model_forgets_between_passes_are_refused(
    comm: Communicator, bucket_size: int | None
) -> None:
    """``model.zero_grad()`` leaves a batch in the sums, and the next pass fills ``.grad`` again."""
    params, optimizer = made(comm, bucket_size)
    loss_of(params, 1.0).backward()
    for param in params:
        param.grad = None
    loss_of(params, 2.0).backward()
    with pytest.raises(InputError, match="has replaced or removed it in .grad since"):
        optimizer.step()
    assert values(params) == [0.0, 0.0, 0.0]


@BUCKETS
@on_ranks("in_process", 2)
def test_gradients_that_are_asked_for_are_no_pass(
    comm: Communicator, bucket_size: int | None
) -> None:
    """``torch.autograd.grad`` on one rank alone, before, between and after backward passes."""
    params, optimizer = made(comm, bucket_size)
    for _ in range(2):
        if comm.rank == 0:
            grads = torch.autograd.grad(loss_of(params, 5.0), params)
            assert [grad[0].item() for grad in grads] == [5.0, 10.0, 15.0]
        loss_of(params, 1.0 + comm.rank).backward()
    torch.autograd.grad(loss_of(params, 5.0), params[comm.rank])
    optimizer.step()
    assert values(params) == [-3.0, -6.0, -9.0]


@BUCKETS
@on_ranks("in_process", 2)
def test_gradients_of_a_zero_bubble_schedule(comm: Communicator, bucket_size: int | None) -> None:
    """They are asked for and added to ``.grad`` by hand, for each microbatch, as torch's pipelines
    do.
    """
    params, optimizer = made(comm, bucket_size)
    for _ in range(2):
        grads = torch.autograd.grad(loss_of(params, 1.0 + comm.rank), params)
        for param, grad in zip(params, grads, strict=True):
            if param.grad is None:
                param.grad = grad
            else:
                param.grad += grad
    for param in params:
        param.grad /= 2
    optimizer.step()
    assert values(params) == [-1.5, -3.0, -4.5]


@BUCKETS
@on_ranks("in_process", 2)
def test_a_hook_that_takes_a_gradient_away_has_it(
    comm: Communicator, bucket_size: int | None
) -> None:
    """As ``fuse_wgrad_accumulation`` does: the weight has none for the optimizer, in any pass."""
    params, optimizer = made(comm, bucket_size)
    taken = []

    def take(param: torch.Tensor) -> None:
        taken.append(param.grad)
        param.grad = None

    params[1].register_post_accumulate_grad_hook(take)
    for _ in range(2):
        loss_of(params, 1.0).backward()
    optimizer.step()
    assert [grad[0].item() for grad in taken] == [2.0, 2.0]
    assert values(params) == [-2.0, 0.0, -6.0]


@BUCKETS
@on_ranks("in_process", 2)
def test_a_gradient_in_a_buffer_of_other_code_stays_there(
    comm: Communicator, bucket_size: int | None
) -> None:
    """Until the step, so that what is done to the buffer counts."""
    params, optimizer = made(comm, bucket_size)
    flat = torch.zeros(2, 64)
    params[0].grad, params[2].grad = flat
    for _ in range(2):
        loss_of(params, 1.0 + comm.rank).backward()
    assert flat[:, 0].tolist() == [2.0 + 2 * comm.rank, 6.0 + 6 * comm.rank]
    flat.mul_(0.5)
    optimizer.step()
    assert values(params) == [-1.5, -6.0, -4.5]


@on_ranks("in_process", 2)
def test_a_scaler_unscales_taken_gradients_and_others_once(comm: Communicator) -> None:
    """One weight has a gradient of backward, which is in the sums, another one by hand."""
    params, optimizer = made(comm)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(params[0].sum()).backward()
    params[1].grad = torch.full((64,), 8.0)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert values(params) == [-1.0, -2.0, 0.0]


def test_a_copied_model_has_no_gradient_of_it() -> None:
    """Weights in codes, whose copies have gradients, are copied without."""
    model = torch.nn.Linear(32, 32)
    zerocast.nn.convert(model, "mxfp8", weights="quantized")
    optimizer = ZeroOptimizer(model.named_parameters(), SGD, lr=1.0, overlap_grad_reduce=True)
    model(torch.ones(1, 32)).sum().backward()
    copied = copy.deepcopy(model)
    assert copied.weight.grad is None
    optimizer.step()
    assert not torch.equal(model.weight, copied.weight)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_a_model_is_compiled_beside_taken_gradients() -> None:
    """Compiled again for a batch of another size, after the gradients of the first were taken."""

    def train(compile: Callable[[torch.nn.Module], Any]) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
        )
        zerocast.nn.convert(model, "mxfp8", weights="quantized")
        named = list(model.named_parameters())
        optimizer = ZeroOptimizer(named, SGD, lr=1.0, overlap_grad_reduce=True)
        forward = compile(model)
        for size in (4, 6, 8):
            forward(torch.linspace(-1, 1, 32 * size).view(size, 32)).square().mean().backward()
        optimizer.step()
        return {name: optimizer.gather_master(param) for name, param in named}

    compiled = train(lambda model: torch.compile(model, backend="aot_eager"))
    assert_same_tensors(compiled, train(lambda model: model))
