"""A model whose weights are gathered while its forward runs, and what training leaves of it."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import zerocast
from tests.support.claims import assert_same_tensors, stored
from tests.support.recipes import RECIPES
from zerocast.comm import Communicator, run_in_process
from zerocast.optim import ZeroOptimizer
from zerocast.optim.taken_gradient import TakenGradient

EACH_ITS_OWN, SOME_TOGETHER, ALL_TOGETHER = 1, 6000, None
"""Sizes of buckets, in elements, for :class:`Model`."""


class Model(torch.nn.Module):
    """Three layers with codes and BF16 weights, two of which share one; and weights around them.

    With buckets of one weight each, the buckets of codes are: 0 first, 1 layers 0 and 2, 2 layer 1,
    3 last; of 6000 elements: 0 first and layers 0 and 2, 1 the others.
    """

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(32, 64, bias=False)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)) for _ in range(3)
        )
        self.layers[2][1].weight = self.layers[0][1].weight
        self.last = torch.nn.Linear(64, 1)
        generator = torch.Generator().manual_seed(3)  # ranks are threads, torch's own is shared
        for weight in self.parameters():
            torch.nn.init.normal_(weight, std=0.2, generator=generator)
        zerocast.nn.convert(self, RECIPES[recipe])
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 32] -> [batch, 1]."""
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def optimizer_of(model: torch.nn.Module, comm: Communicator, **options: Any) -> ZeroOptimizer:
    """AdamW; overlapping unless ``options`` say otherwise."""
    options = {"overlap_all_gather": True, "bucket_size": EACH_ITS_OWN} | options
    return ZeroOptimizer(model.named_parameters(), group=comm, lr=0.01, **options)


def whole_gradients(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those in ``.grad`` that have memory."""
    found = [p.grad for p in params if p.grad is not None]
    return [grad for grad in found if not isinstance(grad, TakenGradient)]


def pending(optimizer: ZeroOptimizer) -> str:
    """A letter for each bucket of codes: ``x`` where nobody has waited for it, else ``.``."""
    arrivals = [bucket.pending for bucket in optimizer._shards.buckets if bucket.pending]
    return "".join("x" if arrival.under_way else "." for arrival in arrivals)


def backward(model: Callable[[torch.Tensor], torch.Tensor], seed: int) -> None:
    """Gradients of the same data on every rank, so that their sums are exact."""
    inputs = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
    model(inputs).float().square().mean().backward()


def train(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: ZeroOptimizer, steps: range
) -> None:
    """Steps of two backward passes each."""
    for step in steps:
        backward(model, 2 * step)
        backward(model, 2 * step + 1)
        optimizer.step()
        optimizer.zero_grad()


def trained(comm: Communicator, recipe: str, **options: Any) -> dict[str, torch.Tensor]:
    """What three steps leave; nothing but its being read waits for the last one."""
    model = Model(recipe)
    train(model, optimizer_of(model, comm, **options), range(3))
    return stored(model)


@functools.cache
def trained_alone(recipe: str) -> dict[str, torch.Tensor]:
    """By one rank without overlap: in a thread, too, because ranks multiply on one core each, and
    more would round otherwise.
    """
    return run_in_process(1, lambda comm: trained(comm, recipe, overlap_all_gather=False))[0]


def assert_same_as_alone(
    by_rank: Sequence[dict[str, torch.Tensor]], body: Callable[..., dict[str, torch.Tensor]]
) -> None:
    """What ``body(comm, overlap)`` left on ranks that overlap is what it leaves on one that does
    not.
    """
    (expected,) = run_in_process(1, lambda comm: body(comm, overlap=False))
    for found in by_rank:
        assert_same_tensors(found, expected, "with overlap")
