"""Weights of several recipes in one model under ZeroOptimizer: each is cast by its own."""

import copy
from pathlib import Path

import pytest
import torch

import zerocast
from tests.support.claims import assert_same_tensors, assert_unsharded_cast
from tests.support.experts import MIXED, mixed_moe, own_casts
from tests.support.nightly import nightly
from zerocast.checkpoint import load, save
from zerocast.comm import Communicator, run_in_process
from zerocast.nn import ConversionReport
from zerocast.optim import ZeroOptimizer


def trained(
    comm: Communicator, model: torch.nn.Module, recipes: str
) -> tuple[ZeroOptimizer, ConversionReport]:
    """``model`` converted, and its optimizer."""
    report = zerocast.nn.convert(model, MIXED[recipes], strict=True)
    return ZeroOptimizer(
        model.named_parameters(), zerocast.optim.FusedAdamW, lr=1e-2, group=comm
    ), report


def step(model: torch.nn.Module, optimizer: ZeroOptimizer, number: int) -> None:
    """By a gradient of this rank alone."""
    generator = torch.Generator().manual_seed(1000 * number + optimizer.comm.rank)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def masters_of(model: torch.nn.Module, optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
    """All masters, whole. Collective."""
    return {name: optimizer.gather_master(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipes", MIXED)
@pytest.mark.parametrize("world_size", [1, 3, nightly(2), nightly(4)])
def test_every_weight_has_the_bytes_of_its_own_recipe(recipes: str, world_size: int) -> None:
    """After steps, of each converted weight: those of the unsharded cast of its master."""
    plain = mixed_moe()

    def train(comm: Communicator) -> None:
        model = copy.deepcopy(plain)
        optimizer, report = trained(comm, model, recipes)
        assert len(set(report.recipes.values())) == {"experts": 3, "groups": 4, "flat": 2}[recipes]
        for number in range(2):
            step(model, optimizer, number)
        whole = own_casts(masters_of(model, optimizer), report, torch.float32)
        assert len(whole) == len(report.recipes) == 13 + (recipes == "groups")
        for name, expected in whole.items():
            assert_unsharded_cast(model.get_parameter(name), expected, name)
        zerocast.verify(model, comm)

    run_in_process(world_size, train)


def test_a_run_continues_on_other_ranks(tmp_path: Path) -> None:
    """From the checkpoint that three ranks saved, two have the masters and the codes of the run
    that went on; a model with another recipe for some weights is refused by name.
    """
    plain, path = mixed_moe(), tmp_path / "saved"

    def state(model: torch.nn.Module, optimizer: ZeroOptimizer) -> dict[str, torch.Tensor]:
        codes = {f"{n} value": p.detach().dequantize() for n, p in model.named_parameters()
                 if isinstance(p, zerocast.QuantizedTensor)}  # fmt: skip
        return masters_of(model, optimizer) | codes

    def first(comm: Communicator) -> dict[str, torch.Tensor]:
        model = copy.deepcopy(plain)
        optimizer, _ = trained(comm, model, "experts")
        step(model, optimizer, 0)
        save(path, optimizer)
        return state(model, optimizer)

    expected = run_in_process(3, first)[0]

    def second(comm: Communicator) -> None:
        model = copy.deepcopy(plain)
        optimizer, _ = trained(comm, model, "experts")
        load(path, optimizer)
        assert_same_tensors(state(model, optimizer), expected, "resumed")
        other = copy.deepcopy(plain)
        optimizer, _ = trained(comm, other, "groups")
        with pytest.raises(zerocast.InputError, match="recipe of model.layers.0.self_attn.q_proj"):
            load(path, optimizer)

    run_in_process(2, second)
