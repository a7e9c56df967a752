"""Masters under FSDP2: saved and continued on other ranks, and by a ZeroOptimizer, and back."""

import itertools
from pathlib import Path

import pytest
import torch

import zerocast
from tests.sharded.sharded import ROWS, adamw, bank, batch, gradient, placed_like, whole
from tests.support.claims import assert_same_tensors
from tests.support.models import Bank
from tests.support.ranks import run_ranks, shared_folder
from tests.support.recipes import every_recipe, param
from zerocast.checkpoint import load, save
from zerocast.comm import Communicator
from zerocast.optim import ZeroOptimizer
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.placement import reshard


def rounded_gradient(shape: torch.Size, step: int) -> torch.Tensor:
    """FP32, of values that BF16 has, whose sum over three ranks is exact."""
    return gradient(shape, step).bfloat16().float()


def output(model: torch.nn.Module) -> torch.Tensor:
    """For the same input on every rank."""
    with torch.no_grad():
        return model(batch())


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

    def everything(self) -> dict[str, torch.Tensor]:
        """Masters, what optimizer and recipes keep, whole, and an output of the weights' codes."""
        params = dict(self.model.named_parameters())
        kept = {
            f"{name} {key}": whole(value)
            for name, p in params.items()
            for key, value in self.optimizer.state[p].items()
        }
        return {**self.masters(), **kept, **self.states(), "output": output(self.model)}


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

    def everything(self) -> dict[str, torch.Tensor]:
        """Masters, what optimizer and recipes keep, whole, and an output of the weights' codes."""
        kept = {}
        everyone = self.optimizer.comm.all_gather_object(self.optimizer.state_dict())
        for name, p in self.optimizer.named_weights.items():
            held = [each for each in everyone if f"master.{name}" in each["state"]]
            held.sort(key=lambda each: each["zero"]["pieces"][f"master.{name}"])
            for key in ("exp_avg", "exp_avg_sq"):
                pieces = [each["state"][f"state.{name}.{key}"] for each in held]
                kept[f"{name} {key}"] = torch.cat(pieces).view(p.shape)
            kept[f"{name} step"] = held[0]["state"][f"state.{name}.step"]
        return {**self.masters(), **kept, **self.states(), "output": output(self.model)}


KINDS = {"fsdp2": Fsdp2, "zero": Zero}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@every_recipe
def test_any_number_of_ranks_continues_elsewhere(recipe, tmp_path: Path):
    """1 to 4 ranks save, by both kinds of optimizers, in a directory and in a file; 1, 2, 3, 4 and
    7 load, by both kinds, and go on to every byte of the run that never stopped.
    """
    cells = 0

    def first(comm: Communicator):
        expected = {}
        for name, kind in KINDS.items():
            training = kind(recipe, comm, ahead=comm.size % 2 == 0)
            training.train(0, 1)
            for suffix in ("", ".safetensors"):
                save(tmp_path / f"{name}-{comm.size}{suffix}", *training.given)
            training.train(2)
            expected[f"{name}-{comm.size}"] = training.everything()
        return expected

    expected = {}
    for before in (1, 2, 3, 4):
        expected |= run_ranks("forked", before, first)[0]

    def second(comm: Communicator):
        count = 0
        for name, kind in KINDS.items():
            training = kind(recipe, comm, seed=1, ahead=comm.size % 2 == 1)
            for saved, suffix in itertools.product(expected, ("", ".safetensors")):
                load(tmp_path / f"{saved}{suffix}", *training.given)
                training.train(2)
                what = f"{saved}{suffix} by {name} on {comm.size}"
                assert_same_tensors(training.everything(), expected[saved], what)
                count += 1
        return count

    for after in (1, 2, 3, 4, 7):
        cells += run_ranks("forked", after, second)[0]
    assert cells == 2 * 4 * 2 * 2 * 5


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    ("recipe", "saver", "loader", "ahead"),
    [
        param("delayed", "fsdp2", "fsdp2", True),
        param("nvfp4-drawn", "fsdp2", "fsdp2", False),
        param("nvfp4-drawn", "fsdp2", "zero", True),
        param("delayed", "fsdp2", "zero", False),
        param("delayed", "zero", "fsdp2", True),
        param("nvfp4-drawn", "zero", "fsdp2", False),
    ],
)
def test_masters_continue_elsewhere(recipe, saver, loader, ahead):
    """2 ranks save, 3 load, and train on to the masters and recipe states of the saver's run, where
    casts are made ahead of the gathers, or due. Any pair with every recipe is nightly, above.
    """

    def first(comm: Communicator):
        folder = shared_folder(comm)
        training = KINDS[saver](recipe, comm, ahead=ahead)
        training.train(0, 1)
        save(folder, *training.given)
        at_save = training.states()
        training.train(2)
        return str(folder), at_save, training.masters(), training.states()

    folder, at_save, masters, states = run_ranks("torch_distributed", 2, first)[0]

    def second(comm: Communicator):
        training = KINDS[loader](recipe, comm, seed=1, ahead=ahead)
        load(folder, *training.given)
        assert_same_tensors(training.states(), at_save, "state")
        training.train(2)
        assert_same_tensors(training.masters(), masters, "masters")
        assert_same_tensors(training.states(), states, "states")

    run_ranks("torch_distributed", 3, second)
