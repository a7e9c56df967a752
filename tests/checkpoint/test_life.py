"""Whatever is done to a training, in whatever order: its masters and weights are those of a plain
optimizer over whole masters, or a load is refused on every rank and nothing has been changed.

A machine steps, saves at once or beside further steps, damages files, loads into the optimizer that
trains or into a new one on other ranks, and hands state dicts over.
"""

import copy
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.optim.training import Training, Whole, assert_same_lists
from tests.support.claims import one_message
from tests.support.living_ranks import LivingRanks
from tests.support.nightly import nightly
from tests.support.recipes import RECIPES
from zerocast.checkpoint import load, save
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.optim import FusedAdamW
from zerocast.optim.training_state import TrainingState

CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "fused": (FusedAdamW, {"lr": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}
SEEDS, SIZES = st.integers(0, 2**16), st.integers(1, 3)


class TrainingLife(RuleBasedStateMachine):
    """A training on ranks, and the same one whole."""

    @initialize(recipe=st.sampled_from(list(RECIPES)), kind=st.sampled_from(list(CLASSES)),
                size=SIZES)  # fmt: skip
    def begin(self, recipe: str, kind: str, size: int) -> None:
        self.recipe, (self.kind, self.options) = RECIPES[recipe], CLASSES[kind]
        self.folder = Path(tempfile.mkdtemp())
        self.saved: list[tuple[Path, Whole, int]] = []
        self.pending: list[Any] = []
        self.whole, self.steps = Whole(self.recipe, self.kind, **self.options), 0
        self.ranks = LivingRanks(size)
        self.trainings = self.ranks.all(lambda comm: self._new(comm, seed=0))
        self.step()

    def _new(self, comm: Communicator, seed: int) -> Training:
        return Training(comm, self.recipe, self.kind, seed=seed, **self.options)

    def move(self, size: int) -> None:
        """Go on with new optimizers over other values, on ``size`` ranks."""
        self.wait()
        self.ranks.end()
        self.ranks = LivingRanks(size)
        self.trainings = self.ranks.all(lambda comm: self._new(comm, seed=7))

    @rule()
    def step(self) -> None:
        self.ranks.all(lambda comm: self.trainings[comm.rank].train(self.steps, alike=True))
        self.whole.train_weights(self.steps)
        self.steps += 1
        self.compare("stepped")

    def compare(self, when: str) -> None:
        """Every rank has every byte."""
        for training in self.trainings:
            assert_same_lists(training.params, self.whole.params, f"{when}, {self.recipe}")
        for masters in self.ranks.all(lambda comm: self.trainings[comm.rank].masters()):
            assert_same_lists(masters, self.whole.masters, f"masters, {when}, {self.recipe}")

    # --- checkpoints ---

    @rule(asynchronous=st.booleans(), suffix=st.sampled_from(("", ".safetensors")))
    def save(self, asynchronous: bool, suffix: str) -> None:
        self.wait()
        path = self.folder / f"{len(self.saved)}{suffix}"
        asked = {"asynchronous": asynchronous and not suffix}
        self.pending = self.ranks.all(
            lambda comm: save(path, self.trainings[comm.rank].optimizer, **asked)
        )
        self.saved.append((path, copy.deepcopy(self.whole), self.steps))

    def wait(self) -> None:
        """For a save that goes on."""
        if any(self.pending):
            self.ranks.all(lambda comm: self.pending[comm.rank].wait())
        self.pending = []

    @precondition(lambda self: self.saved)
    @rule(seed=SEEDS, size=st.none() | SIZES)
    def load(self, seed: int, size: int | None) -> None:
        """Into the optimizers that train, or into new ones on other ranks."""
        self.wait()
        path, whole, steps = random.Random(seed).choice(self.saved)
        if size is not None:
            self.move(size)
        self.ranks.all(lambda comm: load(path, self.trainings[comm.rank].optimizer))
        self.whole, self.steps = copy.deepcopy(whole), steps
        self.compare("loaded")

    @rule(size=SIZES)
    def hand_over(self, size: int) -> None:
        """State dicts of all ranks, to new ranks."""
        states = self.ranks.all(lambda comm: self.trainings[comm.rank].saved())
        self.move(size)
        self.ranks.all(lambda comm: self.trainings[comm.rank].optimizer.load_state_dict(states))
        self.compare("handed over")

    @precondition(lambda self: self.saved)
    @rule(seed=SEEDS)
    def load_damaged(self, seed: int) -> None:
        """One bit of one file."""
        self.wait()
        draw = random.Random(seed)
        path, damaged = draw.choice(self.saved)[0], Path(tempfile.mkdtemp(dir=self.folder)) / "copy"
        if path.is_dir():
            shutil.copytree(path, damaged)
            file = draw.choice(sorted(damaged.iterdir()))
        else:
            file = damaged = damaged.with_suffix(path.suffix)
            shutil.copy(path, file)
        data = bytearray(file.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        errors = self.ranks.errors(lambda comm: load(damaged, self.trainings[comm.rank].optimizer))
        assert all(isinstance(error, InputError) for error in errors), (file, errors)
        one_message([str(error) for error in errors])
        self.compare("refused")

    def teardown(self) -> None:
        self.wait()
        self.ranks.end()
        shutil.rmtree(self.folder)


@pytest.mark.parametrize(("lives", "steps"), [(6, 8), nightly(300, 30)])
def test_any_life_of_a_training(lives: int, steps: int) -> None:
    """What is drawn, and what must hold after each step, :class:`TrainingLife` says."""
    drawn = settings(max_examples=lives, stateful_step_count=steps)
    run_state_machine_as_test(TrainingLife, settings=drawn)


def test_a_wrong_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a load forgets what the optimizer keeps of each element."""
    kept = TrainingState.kept

    def forgetful(self: TrainingState, name: str) -> dict[str, Any]:
        made = kept(self, name)
        for key in made.keys() - {"step"}:
            if isinstance(made[key], torch.Tensor):
                made[key] = torch.zeros_like(made[key])
        return made

    monkeypatch.setattr(TrainingState, "kept", forgetful)
    drawn = settings(max_examples=12, stateful_step_count=15, phases=[Phase.generate])
    with pytest.raises(AssertionError, match="expected"):
        run_state_machine_as_test(TrainingLife, settings=drawn)
