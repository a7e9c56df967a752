"""Wrappers of a model are in no name that zerocast saves, compares, converts or draws by."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import zerocast
from tests.support.recipes import RECIPES
from tests.support.same_bytes import assert_same_bytes
from zerocast.tensors.wrapped_names import INNER

Model = torch.nn.Module


def plain(model: Model) -> Model:
    """As it is."""
    return model


def compiled(model: Model) -> Model:
    """Whole, by torch.compile, and each layer as well."""
    for i in range(len(model)):
        model[i] = torch.compile(model[i], backend="eager")
    return torch.compile(model, backend="eager")


def checkpointed(model: Model) -> Model:
    """Its linear layers, in place."""
    wrap = partial(checkpoint_wrapper, context_fn=zerocast.checkpoint_contexts)
    linears = (torch.nn.Linear,)
    apply_activation_checkpointing(model, wrap, lambda each: isinstance(each, linears))
    return model


def both(model: Model) -> Model:
    """Checkpointed layers, compiled, in a compiled model."""
    return compiled(checkpointed(model))


WRAPS = (compiled, checkpointed, both)


def made(seed: int) -> torch.nn.Sequential:
    """A frozen layer, statistics in buffers, two linear layers."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 32)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 32))
    model[0].requires_grad_(False)
    return model


class Run:
    """A model, wrapped before or after it is converted, and its optimizer."""

    def __init__(
        self, wrap: Callable[[Model], Model], recipe: str, weights: str, seed: int, first: bool
    ) -> None:
        self.inside = made(seed)
        self.model = wrap(self.inside) if first else self.inside
        zerocast.nn.convert(self.model, RECIPES[recipe], weights=weights, filter_fqns=["0."])
        self.model = self.model if first else wrap(self.model)
        self.recipe, self.optimizer = RECIPES[recipe], self._optimizer(weights)

    def _optimizer(self, weights: str) -> Any:
        if weights == "quantized":
            return zerocast.optim.ZeroOptimizer(self.model.named_parameters(), lr=0.01)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)

    def step(self) -> torch.Tensor:
        """The loss of a step."""
        x = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
        with zerocast.autocast(recipe=self.recipe):
            loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.filterwarnings("ignore:.*torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("weights", ["quantized", "high_precision"])
@pytest.mark.parametrize("recipe", ["delayed", "nvfp4-drawn"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_a_checkpoint_of_a_wrapped_model_is_that_of_the_model(
    wrap: Callable[[Model], Model], recipe: str, weights: str, tmp_path: Path
) -> None:
    """Saved of a wrapped model and loaded into a plain one, and the other way round, with frozen
    parameters, buffers and recipe state: both continue with the same losses and weights.
    """
    for here, there in ((wrap, plain), (plain, wrap)):
        ran = Run(here, recipe, weights, 0, first=False)
        ran.step()
        place = tmp_path / here.__name__
        zerocast.checkpoint.save(place, ran.optimizer, ran.model)
        text = (place / "checkpoint.json").read_text()
        assert not any(part in text for part in INNER)
        again = Run(there, recipe, weights, 1, first=False)
        zerocast.checkpoint.load(place, again.optimizer, again.model)
        for _ in range(2):
            assert_same_bytes(again.step(), ran.step(), "loss")
        pairs = zip(ran.inside.parameters(), again.inside.parameters(), strict=True)
        for i, (one, other) in enumerate(pairs):
            assert torch.equal(one.detach(), other.detach()), i


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_wrapped_model_is_converted_as_the_model_inside(wrap: Callable[[Model], Model]) -> None:
    """Filters, patterns and reports have its names, and stochastic rounding draws by them."""
    reports, values = [], []
    for each in (plain, wrap):
        model = made(0)
        wrapped = each(model)
        reports.append(
            zerocast.nn.convert(
                wrapped,
                RECIPES["nvfp4-drawn"],
                filter_fqns=["0.", "1."],
                amax_groups=[["2", "3"]],
                include=["2.weight"],
            )
        )
        values.append([p.detach().clone() for p in model.parameters()])
        reports[-1] = (reports[-1], zerocast.nn.coverage(wrapped), zerocast.nn.explain(wrapped))
    assert reports[0] == reports[1]
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("wrap", WRAPS)
def test_an_optimizer_and_a_plan_know_weights_by_the_names_of_the_model(
    wrap: Callable[[Model], Model],
) -> None:
    """Also where they were given those of a wrapper, so that an export has the model's names."""
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    zerocast.nn.convert(model, "mxfp8")
    names, params = zip(*wrap(model).named_parameters(), strict=True)
    optimizer = zerocast.optim.ZeroOptimizer(zip(names, params, strict=True))
    masters = [torch.zeros(32 * 32)]
    plan = zerocast.CastPlan(params, masters, [0], zerocast.comm.SingleRank(), names=names)
    for source in (optimizer, plan):
        export = zerocast.export.Export(source, "compressed-tensors/mxfp8")
        assert [each.stored for each in export.entries] == ["0.weight"]
