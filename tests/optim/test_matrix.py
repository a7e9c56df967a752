"""Optimizers that look at whole matrices: ``shard="matrix"``, bit for bit the unsharded run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from tests.optim.training import (
    NVFP4,
    Training,
    Whole,
    assert_cast_of,
    assert_same_lists,
    named,
)
from tests.support.claims import message_of, one_message
from tests.support.nightly import nightly
from tests.support.ranks import on_ranks, run_ranks
from tests.support.recipes import RECIPES
from zerocast.comm import Communicator, RecordingCommunicator, run_in_process
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim import ZeroOptimizer
from zerocast.optim.matrix_owners import deal, step_cost

MUON = {"lr": 0.05, "weight_decay": 0.1}


def matrices(params: Sequence[Any]) -> list[Any]:
    """What the optimizers are given: three weights in codes, of some recipes four, and one in
    FP32.
    """
    named_or_not = [p[1] if isinstance(p, tuple) else p for p in params]
    return [given for given, p in zip(params, named_or_not, strict=True) if p.dim() == 2]


class Shampoo(Optimizer):
    """Preconditions a gradient [M, K] from both sides, by state [M, M] and [K, K]."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """G L^-1/4 R^-1/4 with L the sum of G G', R that of G' G."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g, state, update = p.grad, self.state[p], p.grad
                for name, square, side in (("left", g @ g.t(), 0), ("right", g.t() @ g, 1)):
                    state.setdefault(name, torch.eye(len(square), device=p.device))
                    state[name] += square
                    values, vectors = torch.linalg.eigh(state[name])
                    root = vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.t()
                    update = update @ root if side else root @ update
                p.sub_(update, alpha=group["lr"])


def alone(optimizer_class: Any, ranks: int, steps: int, **options: Any) -> list[torch.Tensor]:
    """Whole masters after these steps, in a thread as ranks are: more would multiply otherwise."""

    def train(comm: Communicator) -> list[torch.Tensor]:
        whole = Whole(NVFP4, optimizer_class, ranks=ranks, given=matrices, **options)
        return matrices(whole.train(*range(steps)))

    return run_in_process(1, train)[0]


def sharded(
    comm: Communicator, optimizer_class: Any, steps: int, recipe: Any = NVFP4, **options: Any
) -> Training:
    """The same, every rank with gradients of its own."""
    t = Training(
        comm, recipe, optimizer_class, given=lambda params: matrices(named(params)),
        shard="matrix", **options,
    )  # fmt: skip
    t.train(*range(steps))
    return t


def assert_trains_as_a_whole(
    kind: str, size: int, steps: int, optimizer_class: Any, **options: Any
) -> None:
    """Every rank's weights are the cast of the masters of the unsharded run, to the byte."""
    expected = alone(optimizer_class, size, steps, **options)
    for params in run_ranks(
        kind, size, lambda comm: sharded(comm, optimizer_class, steps, **options).params
    ):
        assert_cast_of(matrices(params), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "chosen", [(torch.optim.Muon, MUON), (Shampoo, {})], ids=["muon", "shampoo"]
)
@pytest.mark.parametrize("steps", [6, nightly(200)])
def test_training_is_that_of_the_unsharded_optimizer(
    size: int, chosen: tuple[Any, Any], steps: int
) -> None:
    """On any number of ranks, more than there are matrices included; for as long as any difference
    would grow.
    """
    optimizer_class, options = chosen
    assert_trains_as_a_whole("in_process", size, steps, optimizer_class, **options)


def test_every_communicator_moves_whole_matrices(comm_kind: str) -> None:
    """Muon on three ranks."""
    assert_trains_as_a_whole(comm_kind, 3, 3, torch.optim.Muon, **MUON)


@pytest.mark.parametrize("recipe", ["mxfp8", "block", "delayed"])
def test_other_recipes_gather_the_same_codes(recipe: str) -> None:
    """From equal gradients three ranks hold the bytes of one, also where gathers and gradients
    overlap.
    """

    def train(comm: Communicator, **options: Any) -> list[torch.Tensor]:
        t = sharded(comm, torch.optim.Muon, 0, RECIPES[recipe], **MUON, **options)
        return matrices(t.train(0, 1, 2, alike=True))

    overlap = {"overlap_all_gather": True, "overlap_grad_reduce": True, "bucket_size": 1000}
    (expected,) = run_in_process(1, train)
    for options in ({}, overlap):
        for found in run_in_process(3, partial(train, **options)):
            assert_same_lists(found, expected, "weights")


@on_ranks("in_process", 3)
def test_a_matrix_without_a_gradient_is_left_out(comm: Communicator) -> None:
    """No momentum and no weight decay for it, whoever owns it; one that a single rank has a
    gradient for is stepped with the mean.
    """
    t = sharded(comm, torch.optim.Muon, 1, **MUON)
    before = t.optimizer.gather_master(t.params[0]), t.optimizer.gather_master(t.params[2])
    t.feed(1)
    t.params[0].grad = None
    if comm.rank != 2:
        t.params[2].grad = None
    t.optimizer.step()
    after = t.optimizer.gather_master(t.params[0]), t.optimizer.gather_master(t.params[2])
    assert torch.equal(before[0], after[0])
    assert not torch.equal(before[1], after[1])


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize(
    "chosen", [(torch.optim.Muon, MUON), (Shampoo, {})], ids=["muon", "shampoo"]
)
def test_a_checkpoint_continues_on_any_number_of_ranks(
    saved_on: int, loaded_on: int, chosen: tuple[Any, Any]
) -> None:
    """State of a matrix travels with its owner's dict, averages with the shards."""
    optimizer_class, options = chosen

    def save(comm: Communicator) -> list[Any]:
        t = sharded(comm, optimizer_class, 0, **options)
        average = t.optimizer.ema(0.5)
        t.train(0, 1, alike=True)
        states = comm.all_gather_object(t.saved())
        t.train(2, alike=True)
        return [states, t.params, average.gather(t.params[2])]

    states, expected, average = run_in_process(saved_on, save)[0]

    def load(comm: Communicator) -> list[Any]:
        t = sharded(comm, optimizer_class, 1, **options)
        t.optimizer.load_state_dict(states[comm.rank] if saved_on == loaded_on else states)
        t.train(2, alike=True)
        return [t.params, t.optimizer.ema(0.5).gather(t.params[2])]

    for params, found in run_in_process(loaded_on, load):
        assert_same_lists(matrices(params), matrices(expected), "weights")
        assert torch.equal(found, average)


@on_ranks("in_process", 3)
def test_what_other_code_writes_is_stepped_from(comm: Communicator) -> None:
    """A plain and a quantized weight, written on every rank: the owner's master starts again."""
    t = sharded(comm, torch.optim.Muon, 2, lr=0.0)
    with torch.no_grad():
        for i in (2, 4):
            t.params[i].copy_(torch.full(t.params[i].shape, 0.375))
    t.train(3)
    for i in (2, 4):
        master = t.optimizer.gather_master(t.params[i])
        assert torch.equal(master, torch.full(master.shape, 0.375))


def test_matrices_are_dealt_by_cost() -> None:
    """The costliest first, each to the rank that has least to do; no rank has more than the mean
    and one matrix.
    """
    shapes = [(64, 64), (16, 256), (256, 64), (8, 8), (64, 64), (256, 64), (1, 9), (7,)]
    owners = deal(shapes, 3)
    costs = [step_cost(shape) for shape in shapes]
    assert costs[:3] + costs[-1:] == [64**3, 256 * 16**2, 256 * 64**2, 7]
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(3)]
    assert loads == [256 * 64**2, 256 * 64**2, 2 * 64**3 + 256 * 16**2 + 8**3 + 9 + 7]
    assert deal([(4, 4)] * 2, 5) == [0, 1]


@on_ranks("in_process", 4)
def test_a_step_sends_each_element_to_its_owner_and_back(comm: Communicator) -> None:
    """8 bytes an element of this rank's shards and matrices, less what stays here."""
    spy = RecordingCommunicator(comm)
    weights = [torch.nn.Parameter(torch.ones(64, 32)) for _ in range(4)]
    optimizer = ZeroOptimizer(weights, torch.optim.Muon, spy, shard="matrix")
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    spy.reset()
    optimizer.step()
    traffic = spy.total(kind="all_to_all")
    own = 64 * 32 * (optimizer._owners.owner[comm.rank] == comm.rank)
    tail = 5 * 8 + 8
    gradients = 3 * (4 * 64 * 32 + tail)
    assert (traffic.calls, traffic.sent_bytes) == (3, gradients + 2 * 4 * (64 * 32 - own))


class Coupled(torch.optim.SGD):
    """Divides its rate by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        """One step."""
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        norm = torch.stack([g.norm() for g in grads if g is not None]).norm()
        for grad in grads:
            grad.div_(norm)
        return super().step(closure)


def test_an_optimizer_that_couples_matrices_is_refused() -> None:
    """On every rank, before a weight is touched; so are vectors by Muon itself, and other words."""

    def make(comm: Communicator, optimizer_class: Any, *shape: int, shard: str = "matrix") -> str:
        weight = torch.nn.Parameter(torch.ones(shape))
        kind = UnsupportedError if optimizer_class is Coupled else InputError
        return message_of(kind, ZeroOptimizer, [weight], optimizer_class, comm, shard=shard, lr=0.5)

    for arguments, message in (
        ((Coupled, 8, 8), "Coupled does not: it gave"),
        ((torch.optim.Muon, 8), "Muon refused its param groups"),
    ):
        assert message in one_message(
            run_in_process(2, lambda comm, arguments=arguments: make(comm, *arguments))
        )
    wrong = run_in_process(2, lambda comm: make(comm, torch.optim.SGD, 8, shard="rows"))
    assert "shard must be 'element' or 'matrix', got 'rows'" in one_message(wrong)
