"""Several optimizers in one checkpoint: a training that one of them steps in part."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_masters import rounded_gradient
from tests.optim.training import draw_gradients, make_params, named, set_gradients
from tests.sharded.sharded import ROWS, bank, placed_like, whole
from tests.support.claims import assert_same_tensors, message_of
from tests.support.models import Bank
from tests.support.ranks import on_ranks, run_ranks, split_ranks
from tests.support.recipes import RECIPES
from zerocast import QuantizedTensor
from zerocast.checkpoint import load, save
from zerocast.checkpoint.manifest import read_manifest
from zerocast.comm import Communicator, run_in_process
from zerocast.errors import InputError, UnfinishedStepError
from zerocast.nn import convert
from zerocast.optim import ZeroOptimizer

PLACES = "c", "c.safetensors"


class MuonAndAdamW:
    """Muon for matrices in codes, AdamW for the rest, as docs/zero.md advises."""

    def __init__(self, comm: Communicator, seed: int = 0) -> None:
        self.params = make_params(RECIPES["delayed"], seed)
        given = named(self.params)
        matrices = [each for each in given if isinstance(each[1], QuantizedTensor)]
        others = [each for each in given if not isinstance(each[1], QuantizedTensor)]
        muon = ZeroOptimizer(matrices, torch.optim.Muon, comm, lr=0.02, shard="matrix")
        self.optimizers = [muon, ZeroOptimizer(others, torch.optim.AdamW, comm, lr=0.01)]

    def train(self, *steps: int) -> None:
        """AdamW makes every step, Muon every other."""
        for step in steps:
            set_gradients(self.params, draw_gradients(self.params, step))
            for optimizer in self.optimizers[step % 2 :]:
                optimizer.step()

    def held(self) -> dict[str, torch.Tensor]:
        """Masters and weights."""
        masters = {
            name: optimizer.gather_master(weight)
            for optimizer in self.optimizers
            for name, weight in optimizer.named_weights.items()
        }
        return masters | {f"weight {n}": p.detach().clone() for n, p in named(self.params)}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_of_two_optimizers_continues(tmp_path: Path, asynchronous: bool) -> None:
    """Bit for bit, on other ranks, whatever the order of the list; saved again and again."""

    def first(comm: Communicator) -> dict[str, torch.Tensor]:
        training = MuonAndAdamW(comm)
        for step in (0, 1, 2):
            training.train(step)
            for place in PLACES:
                options = {"asynchronous": asynchronous and place == "c"}
                save(tmp_path / place, training.optimizers[:: 1 - 2 * (step % 2)], **options)
        training.train(3, 4)  # while a thread may still write
        expected = training.held()
        training.optimizers[0].param_groups[0]["lr"] = 0.5
        save(tmp_path / "later", training.optimizers[0])  # waits for the one before
        return expected

    expected = run_in_process(2, first)[0]

    def second(comm: Communicator) -> None:
        for place, order in zip(PLACES, (1, -1), strict=True):
            training = MuonAndAdamW(comm, seed=1)
            loaded = load(tmp_path / place, training.optimizers[::order])
            assert loaded.steps == 3
            training.train(3, 4)
            assert_same_tensors(training.held(), expected, place)
            save(tmp_path / place, training.optimizers)  # it has become that run
            comm.barrier()

    run_in_process(3, second)


class Parts:
    """A model whose first weights SGD steps, and AdamW the others: masters under FSDP2, or codes
    under ZeroOptimizers.
    """

    def __init__(self, kind: str, comm: Communicator, seed: int = 0) -> None:
        if kind == "fsdp2":
            self.model: torch.nn.Module = bank(RECIPES["nvfp4"], seed=seed)
        else:
            torch.manual_seed(seed)
            self.model = Bank(ROWS).bfloat16()
            convert(self.model, RECIPES["nvfp4"], weights="quantized")
        weights = list(self.model.named_parameters())
        classes: Any = (torch.optim.SGD, weights[:2], {"lr": 0.1, "momentum": 0.9}), (
            torch.optim.AdamW, weights[2:], {"lr": 0.05, "foreach": True}
        )  # fmt: skip
        self.optimizers = [
            each([p for _, p in part], **options) if kind == "fsdp2"
            else ZeroOptimizer(part, each, comm, gradient_dtype=torch.float32, **options)
            for each, part, options in classes
        ]  # fmt: skip

    def train(self, *steps: int) -> None:
        for step in steps:
            for p in self.model.parameters():
                gradient = rounded_gradient(p.shape, step)
                p.grad = placed_like(gradient, p).to(p.dtype)
            for optimizer in self.optimizers:
                optimizer.step()

    def masters(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, p in self.model.named_parameters():
            owner = [o for o in self.optimizers if any(p is q for q in o.param_groups[0]["params"])]
            zero = isinstance(owner[0], ZeroOptimizer)
            found[name] = owner[0].gather_master(p) if zero else whole(p).clone()
        return found


@pytest.mark.parametrize(("saver", "loader"), [("fsdp2", "zero"), ("zero", "fsdp2")])
def test_masters_of_two_optimizers_continue_elsewhere(
    tmp_path: Path, saver: str, loader: str
) -> None:
    """FSDP2 saves and ZeroOptimizers load, and the other way round."""

    def first(comm: Communicator) -> dict[str, torch.Tensor]:
        training = Parts(saver, comm)
        training.train(0, 1)
        save(tmp_path / "c", training.optimizers, training.model)
        training.train(2)
        return training.masters()

    expected = run_ranks("forked", 2, first)[0]

    def second(comm: Communicator) -> None:
        training = Parts(loader, comm, seed=1)
        load(tmp_path / "c", training.optimizers[::-1], training.model)
        training.train(2)
        assert_same_tensors(training.masters(), expected, f"by {loader}")

    run_ranks("forked", 3, second)


@on_ranks("in_process", 2)
def test_what_cannot_be_saved_together_is_refused(comm: Communicator, tmp_path: Path) -> None:
    """On every rank: a weight of one name in two, other ranks, none, or not as many as saved."""

    def one(name: str, group: Communicator = comm) -> ZeroOptimizer:
        return ZeroOptimizer([(name, torch.nn.Parameter(torch.ones(8)))], group=group)

    alone, a, b = one("c", split_ranks(comm, comm.rank)), one("a"), one("b")
    cases: list[tuple[list[Any], str]] = [
        ([a, one("a")], "two optimizers have 'a'"),
        ([a, a], "two optimizers have 'a'"),
        ([a, alone], "must have the same ranks, got two groups"),
        ([], "needs at least one optimizer, got an empty list"),
        ([a, None], "or a torch optimizer and, as model"),
        ([[a]], "or a torch optimizer and, as model"),
    ]
    for given, match in cases:
        assert match in message_of(InputError, save, tmp_path / "c", given)
    assert not (tmp_path / "c").exists()
    save(tmp_path / "c", [a, b])
    for given in (a, [b, a, one("c")]):
        assert "saved optimizers must be loaded" in message_of(
            InputError, load, tmp_path / "c", given
        )
    comm.barrier()


def test_nothing_of_several_is_loaded_where_one_is_refused(tmp_path: Path) -> None:
    """The last may be the one that holds what no run has."""

    def pair(value: float) -> list[ZeroOptimizer]:
        params = {name: torch.nn.Parameter(torch.full((8,), value)) for name in "ab"}
        return [ZeroOptimizer([each], torch.optim.SGD, lr=0.1) for each in params.items()]

    save(tmp_path, pair(1.0))
    trained = pair(2.0)
    average = trained[1].ema(0.5)
    with average.in_weights(), pytest.raises((InputError, UnfinishedStepError)):
        load(tmp_path, trained)
    for optimizer, name in zip(trained, "ab", strict=True):
        master = optimizer.gather_master(optimizer.named_weights[name])
        assert torch.equal(master, torch.full((8,), 2.0))
    before = read_manifest(tmp_path)
    with pytest.raises(InputError, match="has neither made nor loaded it"):
        save(tmp_path, trained)
    assert read_manifest(tmp_path) == before
