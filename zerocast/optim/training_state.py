"""What is saved of a training, whoever holds its masters and wherever its state is saved.

A ZeroOptimizer and a torch optimizer of masters under FSDP2 hold the same things in different
places. Each is a :class:`MasterHolder`, which lists its weights; one walk over that list makes the
state that is saved, and another asks for what this rank needs of a saved one, and checks it. So
each loads what the other has saved. A state consists of tensors, of which every rank has a part::

    master.NAME             a weight's master, in the weight's shape
    state.NAME.KEY          what the optimizer keeps of it, in the same shape or as it is
    recipe.NAME.KEY         its recipe state

and of what it says of itself (:mod:`zerocast.optim.state_description`), of options, and of values
that are no tensors. Averages are state under ``ema(DECAY)``. It is saved as a state dict of each
rank (:mod:`zerocast.optim.zero_training`), or by all ranks together (:mod:`zerocast.checkpoint`).
Codes are not saved: one cast derives them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.numerics import NUMERICS_VERSION
from zerocast.optim.average import AVERAGE, average_key
from zerocast.optim.boxes import Share
from zerocast.optim.param_groups import ParamGroups, options
from zerocast.optim.state_description import (
    FORMAT,
    Description,
    check_described,
    check_equal,
    check_numbers,
    check_values,
    state_kinds,
)
from zerocast.recipes import Recipe, recipe_to_values
from zerocast.sharded.master_weight import as_plain
from zerocast.sharded.placement import is_sharded, to_local
from zerocast.sharded.state import check_state

SHARD, WHOLE = "shard", "whole"


@dataclass
class TrainingState:
    """The state of one optimizer, as one rank has it.

    Attributes:
        said: the description of the optimizer and its progress, the same on every rank.
        groups: the options of each param group.
        kinds: by weight and key, of what this rank's optimizer keeps: :data:`SHARD` of a tensor in
            the weight's shape, :data:`WHOLE` of another tensor, and else ``{"value": ...}``.
        shares: the part that this rank has of each tensor, by name.
    """

    said: dict[str, Any]
    groups: list[dict[str, Any]]
    kinds: dict[str, dict[str, Any]]
    shares: dict[str, Share]

    def kept(self, name: str) -> dict[str, Any]:
        """Return what the optimizer keeps of a weight on this rank, averages left out."""
        found = {}
        for key, kind in self.kinds.get(name, {}).items():
            if isinstance(kind, dict):
                found[key] = kind["value"]
            elif not key.startswith(AVERAGE):
                found[key] = self.shares[f"state.{name}.{key}"].local
        return found


@dataclass
class Wanted:
    """What this rank reads of the tensors that were saved.

    Attributes:
        tensors: those that were saved, by name, each with its ``shape`` and ``dtype``.
        shares: the parts that this rank needs, by name, in memory on the CPU.
    """

    tensors: dict[str, Any]
    shares: dict[str, Share] = field(default_factory=dict)

    def ask(self, name: str, share: Share) -> None:
        """Ask for the elements of a tensor that ``share`` has, in the dtype in which it was saved.

        Raises:
            InputError: where no such tensor of this shape was saved.
        """
        saved = self.saved(name)
        if tuple(saved.shape) != share.shape:
            raise InputError(
                f"{name} must be {list(share.shape)} in the saved state, and is "
                f"{list(saved.shape)}; it is damaged. Load an earlier one."
            )
        values = torch.empty(share.local.shape, dtype=saved.dtype, device="cpu")
        self.shares[name] = share.holding(values)

    def ask_whole(self, name: str) -> None:
        """Ask for all of a tensor; raises as :meth:`ask` does."""
        saved = self.saved(name)
        self.ask(name, Share.of(torch.empty(saved.shape, dtype=saved.dtype, device="meta")))

    def saved(self, name: str) -> Any:
        """Return a tensor that was saved; :class:`InputError` where there is none."""
        if name not in self.tensors:
            raise InputError(
                f"the saved state must have {name}, and has none; it is damaged. Load an earlier "
                "one."
            )
        return self.tensors[name]


@dataclass(frozen=True)
class TrainedWeight:
    """A weight of a training, and what this rank holds of it.

    Attributes:
        name: the weight's.
        group: the place of its param group.
        recipe: of a quantized one.
        dtype: in which it is stored; None where that is not known yet.
        shares_amax: the names of the weights that share its tensor amax, its own included.
        master: the part of its master.
        averages: the averages of that part, by key.
        stepped: the tensor that the optimizer steps on this rank; None where it steps none.
        part: the part of the weight that ``stepped`` is.
        state: what the optimizer keeps of it.
        recipe_state: what its recipe keeps between casts.
    """

    name: str
    group: int
    recipe: Recipe | None
    dtype: torch.dtype | None
    shares_amax: Sequence[str]
    master: Share
    averages: Mapping[str, torch.Tensor]
    stepped: torch.Tensor | None
    part: Share
    state: Mapping[str, Any]
    recipe_state: Mapping[str, torch.Tensor]

    def described(self) -> Description:
        """Return what a state says of it."""
        return {
            "name": self.name,
            "shape": list(self.master.shape),
            "group": self.group,
            "recipe": None if self.recipe is None else recipe_to_values(self.recipe),
            "dtype": None if self.dtype is None else str(self.dtype),
            "shares_amax": sorted(self.shares_amax),
        }


class MasterHolder(ABC):
    """An optimizer, and where the masters are that it steps.

    Attributes:
        comm: the ranks.
        optimizer: the optimizer that was given.
        inner: the optimizer that steps the masters; the same one, or wrapped by it.
        groups: the param groups whose options count.
        parameters: the weights that it steps, by name.
        device: where its masters are.
    """

    comm: Communicator
    optimizer: torch.optim.Optimizer
    inner: torch.optim.Optimizer
    groups: ParamGroups
    parameters: Mapping[str, torch.Tensor]
    device: torch.device

    @abstractmethod
    def weights(self) -> list[TrainedWeight]:
        """List the weights, in order."""

    @abstractmethod
    def progress(self) -> dict[str, Any]:
        """Return what :data:`PROGRESS` names. Collective."""

    @abstractmethod
    def prepare_save(self, call: str) -> None:
        """Raise on every rank what forbids ``call``, a save, on any. Collective."""

    @abstractmethod
    def check_load(self, said: Mapping[str, Any], call: str) -> None:
        """Raise what forbids ``call``, a load of a state that says ``said``."""

    @abstractmethod
    def restore(self, state: TrainingState) -> None:
        """Continue from a state that has been checked. Collective."""

    def described(self) -> Description:
        """Return what a state says of this optimizer."""
        kind = type(self.inner)
        return {
            "format": FORMAT,
            "numerics": NUMERICS_VERSION,
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "groups": len(self.groups),
            "weights": [weight.described() for weight in self.weights()],
        }

    def state(self) -> TrainingState:
        """Return what this rank saves. Collective; its tensors are the live ones."""
        said = {**self.described(), **self.progress()}
        state = TrainingState(said, [options(group) for group in self.groups], {}, {})
        for weight in self.weights():
            kinds = state.kinds.setdefault(weight.name, {})
            if weight.master.pieces:
                state.shares[f"master.{weight.name}"] = weight.master
            for key, value in weight.averages.items():
                kinds[key] = SHARD
                state.shares[f"state.{weight.name}.{key}"] = weight.master.holding(value)
            for key, value in weight.state.items():
                if isinstance(value, torch.Tensor):
                    kinds[key], share = _share_of(weight, key, value)
                    state.shares[f"state.{weight.name}.{key}"] = share
                else:
                    kinds[key] = {"value": value}
            for key, value in weight.recipe_state.items():
                state.shares[f"recipe.{weight.name}.{key}"] = Share.of(value)
        return state

    def ask(self, saved: TrainingState, wanted: Wanted) -> None:
        """Ask for what this rank needs of a state.

        Raises:
            InputError: where it is of another optimizer, or has not what it should have.
        """
        check_described(saved.said, self.described())
        for weight in self.weights():
            name, held = weight.name, weight.master
            if held.pieces:
                if (dtype := wanted.saved(f"master.{name}").dtype) != held.dtype:
                    raise InputError(
                        f"the master of {name} must be {held.dtype}, as it is here, and was saved "
                        f"as {dtype}; make the model in that dtype, or load an earlier state."
                    )
                wanted.ask(f"master.{name}", held)
            for key, kind in saved.kinds.get(name, {}).items():
                is_average = key.startswith(AVERAGE)
                if isinstance(kind, dict) or not (
                    held.pieces if is_average else weight.stepped is not None
                ):
                    continue
                if kind == SHARD:
                    wanted.ask(f"state.{name}.{key}", held if is_average else weight.part)
                else:
                    wanted.ask_whole(f"state.{name}.{key}")
            for key in weight.recipe_state:
                wanted.ask_whole(f"recipe.{name}.{key}")

    def check(self, state: TrainingState) -> None:
        """Raise unless a state that was read is such as a run has, under the saved options.

        Raises:
            InputError, NonFiniteError: with the name of what is none.
        """
        check_equal("number of param groups", len(state.groups), len(self.groups))
        expected: dict[tuple[int, int, torch.dtype], dict[str, Any]] = {}
        averages = {average_key(decay) for decay in state.said["averages"]}
        remedy = "load it into the optimizer of a model with the recipes that it had"
        for weight in self.weights():
            name, stepped = weight.name, weight.stepped
            if weight.master.pieces:
                master = state.shares[f"master.{name}"].local
                check_numbers(f"the master of {name}", master, finite=True)
                given = {key for key in state.kinds.get(name, {}) if key.startswith(AVERAGE)}
                if given != averages:
                    raise InputError(
                        f"the state of {name} must have the averages {sorted(averages)}, got "
                        f"{sorted(given)}; the state is damaged."
                    )
                for key in given:
                    value = state.shares[f"state.{name}.{key}"].local
                    check_values(name, master.shape, {key: value}, {key: master})
                    check_numbers(f"{key} of {name}", value, finite=True)
            if stepped is not None:
                like = to_local(as_plain(stepped))
                case = weight.group, like.dim(), like.dtype
                if case not in expected:
                    expected[case] = state_kinds(self.inner, state.groups[weight.group], like)
                check_values(name, like.shape, state.kept(name), expected[case])
            if weight.recipe is not None and weight.recipe_state:
                given_state = {
                    key: state.shares[f"recipe.{name}.{key}"].local for key in weight.recipe_state
                }
                check_state(name, weight.recipe, dict(weight.recipe_state), given_state, remedy)


def is_part(stepped: torch.Tensor | None, key: str, value: object) -> bool:
    """Say whether what an optimizer keeps of a tensor is divided over ranks as that is."""
    return (
        isinstance(value, torch.Tensor)
        and stepped is not None
        and value.shape == stepped.shape
        and is_sharded(value) == is_sharded(stepped)
        and key != "step"  # which has the shape of a weight without dimensions
    )


def _share_of(weight: TrainedWeight, key: str, value: torch.Tensor) -> tuple[str, Share]:
    """Return the kind of a tensor that the optimizer keeps, and this rank's part of it."""
    if not is_part(weight.stepped, key, value):
        return WHOLE, Share.of(as_plain(value))
    return SHARD, Share.of(as_plain(value)) if is_sharded(value) else weight.part.holding(value)
