"""Masters under FSDP2: saved and continued on other ranks, and by a ZeroOptimizer, and back."""

import pytest
import torch

import zerocast
from tests.sharded.sharded import ROWS, adamw, bank, batch, gradient, placed_like, whole
from tests.support.claims import assert_same_tensors
from tests.support.models import Bank
from tests.support.ranks import run_ranks, shared_folder
from tests.support.recipes import each
from zerocast.checkpoint import load, save
from zerocast.comm import Communicator
from zerocast.optim import ZeroOptimizer
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import reshard


def rounded_gradient(shape: torch.Size, step: int) -> torch.Tensor:
    """FP32, of values that BF16 has, whose sum over three ranks is exact."""
    return gradient(shape, step).bfloat16().float()


class Fsdp2:
    """A bank of masters under FSDP2 and torch's AdamW; ``ahead`` casts after every step."""

    def __init__(self, recipe, comm: Communicator, *, seed=0, ahead=True) -> None:
        self.model, self.ahead, self.comm = bank(recipe, seed=seed), ahead, comm
        self.optimizer = adamw(self.model.parameters())
        self.given = self.optimizer, self.model

    def train(self, *steps: int) -> None:
        for step in steps:
            with torch.no_grad():
                self.model(batch(self.comm))
            reshard(self.model)
            for p in self.model.parameters():
                p.grad = placed_like(rounded_gradient(p.shape, step), p)
            self.optimizer.step()
            if self.ahead:
                zerocast.sharded.precompute_scales_for_fsdp(self.model)

    def masters(self) -> dict[str, torch.Tensor]:
        state, weights = self.model.state_dict(), dict(self.model.named_parameters())
        return {name: whole(state[name]) for name in weights}

    def states(self) -> dict[str, torch.Tensor]:
        """What recipes remember after the cast of the masters as they are."""
        with torch.no_grad():
            self.model(batch(self.comm))
        reshard(self.model)
        return {
            f"{name} {key}": value.clone()
            for name, p in self.model.named_parameters()
            for key, value in gather_of(p).state.items()
        }


class Zero:
    """The same weights under a ZeroOptimizer."""

    def __init__(self, recipe, comm: Communicator, *, seed=0, ahead=True) -> None:
        torch.manual_seed(seed)
        self.model = Bank(ROWS).bfloat16()
        zerocast.nn.convert(self.model, recipe, weights="quantized")
        self.optimizer = ZeroOptimizer(
            self.model.named_parameters(), torch.optim.AdamW, comm, gradient_dtype=torch.float32,
            lr=0.05, foreach=True,
        )  # fmt: skip
        self.given = self.optimizer, self.model

    def train(self, *steps: int) -> None:
        for step in steps:
            for p in self.model.parameters():
                p.grad = rounded_gradient(p.shape, step).to(p.dtype)
            self.optimizer.step()

    def masters(self) -> dict[str, torch.Tensor]:
        weights = self.optimizer.named_weights
        return {name: self.optimizer.gather_master(p) for name, p in weights.items()}

    def states(self) -> dict[str, torch.Tensor]:
        return {
            f"{name} {key}": p.quantized_storage.buffers[key].clone()
            for name, p in self.optimizer.named_weights.items()
            if isinstance(p, zerocast.QuantizedTensor)
            for key in p.recipe.state
        }


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("ahead", [True, False], ids=["cast", "due"])
@pytest.mark.parametrize(("saver", "loader"), [(Fsdp2, Fsdp2), (Fsdp2, Zero), (Zero, Fsdp2)])
@each("delayed", "nvfp4-drawn")
def test_masters_continue_elsewhere(recipe, saver, loader, ahead):
    """2 ranks save, 3 load, and train on to the masters and recipe states of the saver's run."""

    def first(comm: Communicator):
        folder = shared_folder(comm)
        training = saver(recipe, comm, ahead=ahead)
        training.train(0, 1)
        save(folder, *training.given)
        at_save = training.states()
        training.train(2)
        return str(folder), at_save, training.masters(), training.states()

    folder, at_save, masters, states = run_ranks("torch_distributed", 2, first)[0]

    def second(comm: Communicator):
        training = loader(recipe, comm, seed=1, ahead=ahead)
        load(folder, *training.given)
        assert_same_tensors(training.states(), at_save, "state")
        training.train(2)
        assert_same_tensors(training.masters(), masters, "masters")
        assert_same_tensors(training.states(), states, "states")

    run_ranks("torch_distributed", 3, second)
