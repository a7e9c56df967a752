"""FusedAdamW: torch's fused AdamW to the bit, its options and parameters."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import zerocast
from tests.cuda_emulation.emulator import needs_emulation
from tests.support.compiled import EMULATED, ON_CPU
from tests.support.recipes import RECIPES
from tests.support.weights import through_a_file
from zerocast.backends.reference import ReferenceBackend
from zerocast.errors import UnsupportedError
from zerocast.numerics import AdamWNumbers, AdamWUpdate, Backend
from zerocast.optim import FusedAdamW

REGISTER = 16
"""Elements that torch's kernel takes at a time, or a divisor of that; those at a tensor's end it
rounds otherwise."""

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "amsgrad": {"amsgrad": True, "weight_decay": 0.1, "lr": 0.5, "eps": 1e-40},
    "maximize": {"maximize": True, "weight_decay": 0.0, "betas": (0.3, 0.99), "eps": 0.0},
    "no momentum": {"betas": (0.0, 0.0), "lr": 1e-38},
    "a beta that 1 - beta does not hold": {"betas": (1e-9, 0.999)},
    "more than one half by less than that": {"betas": (0.5 + 1e-9, 0.999)},
    "one half": {"betas": (0.5, 0.5), "lr": 1e30, "amsgrad": True},
}

BACKENDS: dict[str, Any] = {
    "reference": ReferenceBackend(),
    **ON_CPU,
    "cuda": pytest.param(EMULATED["random"], marks=needs_emulation),
}
fused_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's kernel fuses products and sums where the machine can",
)


def awkward(size: int, seed: int) -> torch.Tensor:
    """Values of all magnitudes: zeros, subnormals, the largest, infinities and NaN among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=g) * torch.exp(6 * torch.randn(size, generator=g))
    for i, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42, -1e-45, 3e38)):
        x[i::97] = value
    return x


def differs(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where the bits do; every NaN is one value."""
    same = actual.view(torch.int32) == expected.view(torch.int32)
    return ~(same | (actual.isnan() & expected.isnan()))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise where they differ."""
    wrong = differs(actual, expected).nonzero().flatten()
    if len(wrong):
        i = int(wrong[0])
        raise AssertionError(f"{what}: element {i} is {actual[i]:.9g}, not {expected[i]:.9g}")


@fused_torch
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_bits_are_those_of_torch(options: dict[str, Any], backend: Backend) -> None:
    """Masters and state after 3 steps, of 1 to 1025 elements that start anywhere in memory, are
    those that torch's fused kernel gives in whole registers, each element by itself.
    """
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    given = {**defaults, "maximize": False, "amsgrad": False, **options}
    size = 1040
    whole = awkward(size, 0).requires_grad_()
    optimizer = torch.optim.AdamW([whole], fused=True, **given)
    sizes = (1, 15, 16, 17, 1025)
    own = [
        torch.cat([torch.zeros(n % 5), whole.detach()[:n], *[torch.zeros(n)] * 3]) for n in sizes
    ]
    amsgrad = given.pop("amsgrad")
    for step in range(1, 4):
        whole.grad = awkward(size, step)
        optimizer.step()
        updates = []
        for n, memory in zip(sizes, own, strict=True):
            master, average, square, largest = memory[n % 5 :].split(n)
            numbers = AdamWNumbers.of(step, **given)
            gradient = whole.grad[:n].clone()
            updates.append(
                AdamWUpdate(
                    master, gradient, average, square, largest if amsgrad else None, numbers
                )
            )
        backend.adamw(updates)()
        expected = [whole.detach(), *list(optimizer.state[whole].values())[1:]]
        for n, update in zip(sizes, updates, strict=True):
            found = [update.master, update.exp_avg, update.exp_avg_sq, update.max_exp_avg_sq]
            for i, (one, other) in enumerate(zip(found, expected, strict=False)):
                if one is not None:
                    assert_same_bits(one, other[:n], f"step {step}, {n} elements, tensor {i}")


def pair(size: int = 4 * REGISTER) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Two parameters, twice; the second of them never has a gradient."""
    g = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=g), torch.randn(3, REGISTER, generator=g)]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    return ours, theirs


def train(optimizers: Sequence[Any], lists: Sequence[Any], steps: range) -> None:
    """Steps of both with equal gradients, of the first parameter alone."""
    for step in steps:
        for optimizer, params in zip(optimizers, lists, strict=True):
            g = torch.Generator().manual_seed(step)
            params[0].grad = torch.randn(params[0].shape, generator=g)
            optimizer.step()


@fused_torch
def test_it_takes_the_place_of_torchs() -> None:
    """Param groups, a learning rate that is a tensor and one that a scheduler moves, a parameter
    without a gradient; state dicts go both ways in mid-run.
    """
    ours, theirs = pair()
    classes = (FusedAdamW, torch.optim.AdamW)
    makes = [
        lambda params, c=c: c(
            [{"params": params[:1], "lr": torch.tensor(0.1)}, {"params": params[1:], "eps": 1e-3}],
            fused=True,
            amsgrad=True,
        )
        for c in classes
    ]
    optimizers = [make(params) for make, params in zip(makes, (ours, theirs), strict=True)]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    for first in range(0, 4, 2):
        train(optimizers, (ours, theirs), range(first, first + 2))
        for scheduler in schedulers:
            scheduler.step()
        assert not optimizers[0].state[ours[1]]
        one, other = optimizers[0].state[ours[0]], optimizers[1].state[theirs[0]]
        assert list(one) == list(other)
        for name in one:
            assert (one[name].shape, one[name].dtype) == (other[name].shape, other[name].dtype)
            assert torch.equal(one[name], other[name]), name
        # Each goes on from the other's state.
        states = [through_a_file(each.state_dict()) for each in reversed(optimizers)]
        optimizers = [make(params) for make, params in zip(makes, (ours, theirs), strict=True)]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in optimizers]
    train(optimizers, (ours, theirs), range(4, 6))
    assert torch.equal(ours[0], theirs[0])


def test_parameters_of_any_strides() -> None:
    """Parameters that are not contiguous, or empty, are stepped as contiguous ones; a closure's
    loss is returned, and torch counts the writes.
    """
    g = torch.Generator().manual_seed(0)
    value = torch.randn(6, 8, 4, 4, generator=g)
    plain, last = value.clone(), value.clone(memory_format=torch.channels_last)
    cut = torch.randn(6, 16, 4, 4)[:, ::2].copy_(value)
    params = [torch.nn.Parameter(each) for each in (plain, last, cut, torch.empty(0))]
    optimizer = FusedAdamW(params)
    versions = [param._version for param in params]

    def closure() -> float:
        for param in params:
            param.grad = value.clone() if param.numel() else torch.empty(0)
        return 7.0

    assert optimizer.step(closure) == 7.0
    optimizer.step(closure)
    assert torch.equal(params[0], params[1])
    assert torch.equal(params[0], params[2])
    assert all(param._version > before for param, before in zip(params, versions, strict=True))
    copied = copy.deepcopy(optimizer).state_dict()["state"]
    assert torch.equal(copied[0]["exp_avg"], optimizer.state[params[0]]["exp_avg"])


@pytest.mark.parametrize(
    "param",
    [
        torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)),
        torch.nn.Parameter(zerocast.quantize(torch.zeros(16, 16), RECIPES["nvfp4"])),
    ],
    ids=["bf16", "fp64", "quantized"],
)
def test_parameters_that_are_refused(param: torch.nn.Parameter) -> None:
    """What is not plain FP32 is refused before anything is written."""
    other = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdamW([other, param])
    other.grad = torch.ones(3)
    param.grad = torch.zeros(param.shape, dtype=param.dtype)
    with pytest.raises(UnsupportedError, match="dense FP32"):
        optimizer.step()
    assert torch.equal(other, torch.ones(3))
    assert not optimizer.state
