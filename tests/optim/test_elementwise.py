"""Which optimizers are accepted: those that update each element from that element alone."""

from typing import Any

import pytest
import torch

from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim import ZeroOptimizer


@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, torch.optim.Muon],
)
def test_torchs_other_optimizers_are_refused_by_name(optimizer_class: Any) -> None:
    """They need a closure, a statistic of the tensor, sparse gradients, a matrix."""
    with pytest.raises(UnsupportedError, match=optimizer_class.__name__):
        ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], optimizer_class)


class Lamb(torch.optim.Optimizer):
    """Scales each tensor's step by a ratio of norms."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        """Not element-wise: norms of the whole tensor."""
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Sign(Lamb):
    """Steps by the gradient's sign."""

    def step(self) -> None:
        """Element-wise."""
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"])


@pytest.mark.parametrize("given", ["AdamW", torch.nn.Linear, torch.optim.AdamW([torch.ones(1)])])
def test_what_is_no_optimizer_class_is_refused_on_every_rank(given: Any) -> None:
    """A name, another class, an optimizer instead of its class: wrong on rank 1, heard by all."""

    def make(comm: Communicator) -> str:
        chosen = given if comm.rank == 1 else torch.optim.AdamW
        with pytest.raises(InputError, match="must be a class of torch optimizers") as caught:
            ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], chosen, comm)
        return str(caught.value)

    messages = run_in_process(2, make)
    assert messages == [messages[0]] * 2


def test_an_unknown_optimizer_that_looks_at_the_tensor_is_refused() -> None:
    """It is tried, and the message shows an element that came out differently."""
    with pytest.raises(
        UnsupportedError, match=r"Lamb is not: it gave element .* in two pieces and"
    ):
        ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], Lamb)


def test_an_unknown_optimizer_that_is_elementwise_is_accepted() -> None:
    """A class that zerocast has never heard of steps the masters."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = ZeroOptimizer([weight], Sign, lr=0.25)
    weight.grad = torch.tensor([3.0, -3.0, 0.0, 1.0])
    optimizer.step()
    assert weight.tolist() == [0.75, 1.25, 1.0, 0.75]


def test_an_option_that_the_class_refuses_is_the_callers_mistake() -> None:
    """A wrong option is an InputError with the class's own words, not a refusal of the class."""
    with pytest.raises(InputError, match="AdamW refused its options: Invalid learning rate: -3"):
        ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], lr=-3)
    with pytest.raises(InputError, match=r"AdamW refused its options: .*'momentum'"):
        ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], momentum=0.9)


class NeedsParams(Sign):
    """Cannot be made for a rank that owns nothing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("no parameters")


def test_a_class_that_refuses_its_groups_on_one_rank_is_refused_on_all() -> None:
    """Of 2 ranks the second owns none of 4 elements, and the first hears of it too."""

    def make(comm: Communicator) -> str:
        with pytest.raises(InputError, match="NeedsParams refused its param groups") as caught:
            ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], NeedsParams, group=comm)
        return str(caught.value)

    message = "on rank 1: NeedsParams refused its param groups: no parameters"
    assert run_in_process(2, make) == [message] * 2
