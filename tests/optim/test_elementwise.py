"""Which optimizers are accepted: those that update each element from that element alone."""

from typing import Any

import pytest
import torch

from tests.support.claims import message_of, one_message
from tests.support.ranks import on_ranks
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim import ZeroOptimizer


def optimizer_of(*args: Any, **options: Any) -> ZeroOptimizer:
    """For a weight of 4 elements."""
    return ZeroOptimizer([torch.nn.Parameter(torch.ones(4))], *args, **options)


@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.SparseAdam, torch.optim.Muon],
)
def test_torchs_other_optimizers_are_refused_by_name(optimizer_class: Any) -> None:
    """They need a closure, a statistic of the tensor, sparse gradients, a matrix."""
    with pytest.raises(UnsupportedError, match=optimizer_class.__name__):
        optimizer_of(optimizer_class)


class ByParameter(torch.optim.Optimizer):
    """Steps one parameter after the other, as a subclass says."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group)

    def momentum(self, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The sum of all gradients."""
        sums = self.state[p].setdefault("momentum", torch.zeros_like(p, dtype=dtype))
        return sums.add_(p.grad.to(dtype))


class Lamb(ByParameter):
    """Scales each tensor's step by a ratio of norms of the whole tensor."""

    def update(self, p: Any, group: Any) -> None:
        p.sub_(p.grad * (group["lr"] * p.norm() / p.grad.norm()))


class Sign(ByParameter):
    """Steps by the gradient's sign, element by element."""

    def update(self, p: Any, group: Any) -> None:
        p.sub_(p.grad.sign() * group["lr"])


class GlobalNorm(ByParameter):
    """SGD divided by the norm of all gradients: element-wise but for one number."""

    def step(self) -> None:
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.square().sum() for p in params]).sum().sqrt()
        for p in params:
            p.sub_(p.grad / norm)


class Columns(ByParameter):
    """Centres the gradients of a matrix row by row, and falls back on SGD elsewhere."""

    def update(self, p: Any, group: Any) -> None:
        p.sub_(p.grad - (p.grad.mean(1, keepdim=True) if p.dim() == 2 else 0))


class HalfState(ByParameter):
    """Element-wise; keeps momentum in a dtype in which it is not loaded again."""

    dtype = torch.bfloat16

    def update(self, p: Any, group: Any) -> None:
        p.sub_(self.momentum(p, self.dtype).float())


class CodesFromFourThousand(HalfState):
    """FP32 state for small tensors, codes for others: depends on how large a piece is."""

    def step(self) -> None:
        sizes = [p.numel() for group in self.param_groups for p in group["params"]]
        self.dtype = torch.uint8 if max(sizes) >= 4096 else torch.float32
        super().step()


class Rebinding(ByParameter):
    """Element-wise, but not in place: binds its parameters to new memory."""

    def update(self, p: Any, group: Any) -> None:
        if p.grad is not None:
            p.data = p.data - group["lr"] * p.grad


@pytest.mark.parametrize(
    ("optimizer_class", "match"),
    [
        (GlobalNorm, "takes statistics over all parameters"),
        (Columns, "steps a matrix otherwise than the same elements flat"),
        (
            Lamb,
            r"Lamb does not: it gave tensor 0 other values in two .*statistics over a tensor or",
        ),
        (HalfState, r"keeps 'momentum' as a Tensor \(72, 64\) of torch.bfloat16"),
        (CodesFromFourThousand, r"keeps 'momentum' as a Tensor \(72, 64\) of torch.uint8"),
    ],
)
def test_what_depends_on_more_than_the_element_is_refused_with_the_reason(
    optimizer_class: Any, match: str
) -> None:
    """All parameters, rows, a tensor, the size of a piece; and the message says what would do."""
    with pytest.raises(UnsupportedError, match=f"{match}.*such as torch.optim.AdamW"):
        optimizer_of(optimizer_class)


TORCHS = {
    "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {"fused": True},
    "Adamax": {}, "ASGD": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9},
    "Rprop": {}, "SGD": {"lr": 0.1, "momentum": 0.9},
}  # fmt: skip


@pytest.mark.own_defaults("meta")
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_elementwise_optimizers_pass(name: str) -> None:
    """With state, with options, fused; and torch's generator goes on as if nothing had been."""
    torch.manual_seed(5)
    optimizer_of(getattr(torch.optim, name), **TORCHS[name])
    drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))


MIXING = {
    "pytorch_optimizer": ("Prodigy", "DAdaptAdam", "SOAP", "ScalableShampoo", "CAME"),
    "torchao.optim": ("AdamW8bit", "AdamW4bit"),
    "bitsandbytes.optim": ("AdamW8bit",),
}


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in MIXING for name in MIXING[package]]
)
@pytest.mark.filterwarnings("ignore")
def test_other_packages_optimizers_that_mix_elements_are_refused(package: str, name: str) -> None:
    """Statistics over all parameters, matrices, state in blocks of codes."""
    optimizer_class = getattr(pytest.importorskip(package), name)
    with pytest.raises(UnsupportedError, match=f"{name}.*torch.optim.AdamW"):
        optimizer_of(optimizer_class)


@pytest.mark.parametrize("name", ["Lion", "AdaBelief", "Adan"])
def test_other_packages_elementwise_optimizers_pass(name: str) -> None:
    """Classes that zerocast has never heard of."""
    optimizer_class = getattr(pytest.importorskip("pytorch_optimizer"), name)
    optimizer_of(optimizer_class)


@on_ranks("in_process", 3)
def test_an_optimizer_that_rebinds_its_parameters_trains(comm: Communicator) -> None:
    """What it computes is brought back to where masters are cast from."""
    weight = torch.nn.Parameter(torch.ones(2, 4))
    optimizer = ZeroOptimizer([weight], Rebinding, comm, lr=0.25)
    for _ in range(2):
        weight.grad = torch.ones(2, 4)
        optimizer.step()
    assert torch.equal(optimizer.gather_master(weight), weight)
    assert weight.tolist() == [[0.5] * 4] * 2


def test_an_unknown_optimizer_that_is_elementwise_is_accepted() -> None:
    """A class that zerocast has never heard of steps the masters."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = ZeroOptimizer([weight], Sign, lr=0.25)
    weight.grad = torch.tensor([3.0, -3.0, 0.0, 1.0])
    optimizer.step()
    assert weight.tolist() == [0.75, 1.25, 1.0, 0.75]


class NeedsParams(Sign):
    """Cannot be made for a rank that owns nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        if not any(group["params"] for group in self.param_groups):
            raise ValueError("no parameters")


def test_a_class_that_refuses_its_groups_on_one_rank_is_refused_on_all() -> None:
    """Of 2 ranks the second owns none of 4 elements, and the first hears of it too."""
    by_rank = run_in_process(
        2, lambda comm: message_of(InputError, optimizer_of, NeedsParams, comm)
    )
    assert one_message(by_rank) == (
        "on rank 1: NeedsParams refused its param groups: no parameters"
    )


class Projecting(ByParameter):
    """Removes the gradient's part along a matrix that is orthogonal to it, or nearly so:
    element-wise for most values.
    """

    def update(self, p: Any, group: Any) -> None:
        momentum = self.momentum(p)
        cosine = (p * p.grad).sum() / p.norm() / p.grad.norm()
        along = (p * momentum).sum() / p.norm().square() if cosine.abs() < 1e-4 else 0
        p.sub_((momentum - along * p) * group["lr"])


class Optional(ByParameter):
    """A matrix optimizer in groups that ask for it, and element-wise in others."""

    def update(self, p: Any, group: Any) -> None:
        p.sub_(p.grad / p.grad.norm() if group.get("whole") else p.grad)


class Shared(ByParameter):
    """Element-wise; counts its steps in a state of no parameter."""

    def step(self) -> None:
        self.state["k"] = self.state.get("k", 0) + 1


def test_classes_that_look_at_more_than_the_element_at_times_are_refused() -> None:
    """For orthogonal gradients; in groups with other options than the class's own."""
    weight = torch.nn.Parameter(torch.ones(4))
    for lr in (1e-3, 0.5):
        with pytest.raises(UnsupportedError, match="Projecting does not: "):
            ZeroOptimizer([weight], Projecting, lr=lr)
    other = torch.nn.Parameter(torch.ones(4))
    groups = [{"params": [weight], "lr": 1.0}, {"params": [other], "whole": True}]
    ZeroOptimizer(groups[:1], Optional)
    with pytest.raises(UnsupportedError, match="Optional does not: "):
        ZeroOptimizer(groups, Optional)


def test_state_of_no_parameter_is_refused() -> None:
    """No rank would save it."""
    with pytest.raises(UnsupportedError, match="Shared does not: it keeps state of 'k', which"):
        optimizer_of(Shared)
