"""TrainingState: the saved state of an optimizer, independent of how its masters are sharded.

A ZeroOptimizer and a torch optimizer of masters under FSDP2 hold the same data in different places.
Each is a :class:`MasterHolder`, which lists its weights. From that list it makes the state to save,
and requests and checks the part of a saved state that this rank needs. So each can load what the
other has saved. A state consists of tensors, of which every rank has a part::

    master.NAME             a weight's master, in the weight's shape
    state.NAME.KEY          its optimizer state, in the same shape or in another
    recipe.NAME.KEY         its recipe state

It also has a description (:mod:`zerocast.optim.state_description`), options, and values that are
not tensors. Averages are state under ``ema(DECAY)``. It is saved as a state dict of each rank
(:mod:`zerocast.optim.zero_training`), or by all ranks together (:mod:`zerocast.checkpoint`). Codes
are not saved: one cast derives them.
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
    """One rank's part of the state of an optimizer.

    Attributes:
        description: the description of the optimizer and its progress, the same on every rank.
        groups: the options of each param group.
        kinds: the kind of this rank's optimizer state, by weight and key: :data:`SHARD` for a
            tensor in the weight's shape, :data:`WHOLE` for another tensor, else
            ``{"value": ...}``.
        shares: this rank's part of each tensor, by name.
    """

    description: dict[str, Any]
    groups: list[dict[str, Any]]
    kinds: dict[str, dict[str, Any]]
    shares: dict[str, Share]

    def kept(self, name: str) -> dict[str, Any]:
        """Return the optimizer state of a weight on this rank, without averages."""
        found = {}
        for key, kind in self.kinds.get(name, {}).items():
            if isinstance(kind, dict):
                found[key] = kind["value"]
            elif not key.startswith(AVERAGE):
                found[key] = self.shares[f"state.{name}.{key}"].local
        return found


@dataclass
class Wanted:
    """The parts of saved tensors that this rank reads.

    Attributes:
        tensors: the saved tensors by name, each with its ``shape`` and ``dtype``.
        shares: the parts that this rank needs, by name, in CPU memory.
    """

    tensors: dict[str, Any]
    shares: dict[str, Share] = field(default_factory=dict)

    def ask(self, name: str, share: Share) -> None:
        """Request the elements of a tensor that ``share`` covers, in the saved dtype.

        Raises:
            InputError: if no tensor of this name and shape was saved.
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
        """Request a whole tensor. Raise as :meth:`ask` does."""
        saved = self.saved(name)
        self.ask(name, Share.of(torch.empty(saved.shape, dtype=saved.dtype, device="meta")))

    def saved(self, name: str) -> Any:
        """Return the saved tensor ``name``. Raise :class:`InputError` if it does not exist."""
        if name not in self.tensors:
            raise InputError(
                f"the saved state must have {name}, and has none; it is damaged. Load an earlier "
                "one."
            )
        return self.tensors[name]


@dataclass(frozen=True)
class TrainedWeight:
    """A trained weight, and the parts of it that this rank holds.

    Attributes:
        name: the name of the weight.
        group: the index of its param group.
        recipe: the recipe of a quantized weight, else None.
        dtype: the nominal dtype of a quantized weight, or the dtype of a plain one; None if it is
            not known yet.
        shares_amax: the names of the weights that share its tensor amax, including this one.
        master: this rank's part of its master.
        averages: the averages of that part, by key.
        stepped: the tensor that the optimizer steps on this rank; None if there is none.
        part: the part of the weight that ``stepped`` covers.
        state: the optimizer's state of ``stepped``.
        recipe_state: the state that its recipe keeps between casts.
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
        """Return the description of this weight in a state."""
        return {
            "name": self.name,
            "shape": list(self.master.shape),
            "group": self.group,
            "recipe": None if self.recipe is None else recipe_to_values(self.recipe),
            "dtype": None if self.dtype is None else str(self.dtype),
            "shares_amax": sorted(self.shares_amax),
        }


class MasterHolder(ABC):
    """An optimizer and access to the masters that it steps.

    Attributes:
        comm: the ranks.
        optimizer: the given optimizer.
        inner: the optimizer that steps the masters: the same one, or wrapped by it.
        groups: the param groups whose options apply.
        parameters: the stepped weights, by name.
        device: the device of its masters.
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
        """Return the values of the keys in :data:`PROGRESS`. Collective."""

    @abstractmethod
    def prepare_save(self, call: str) -> None:
        """Raise on every rank if ``call``, a save, is not allowed on any. Collective."""

    @abstractmethod
    def check_load(self, description: Mapping[str, Any], call: str) -> None:
        """Raise if ``call``, a load of a state with this ``description``, is not allowed."""

    @abstractmethod
    def restore(self, state: TrainingState) -> None:
        """Continue from a state that has been checked. Collective."""

    def described(self) -> Description:
        """Return the description of this optimizer in a state."""
        kind = type(self.inner)
        return {
            "format": FORMAT,
            "numerics": NUMERICS_VERSION,
            "optimizer": f"{kind.__module__}.{kind.__qualname__}",
            "groups": len(self.groups),
            "weights": [weight.described() for weight in self.weights()],
        }

    def state(self) -> TrainingState:
        """Return the state that this rank saves, with the live tensors. Collective."""
        description = {**self.described(), **self.progress()}
        state = TrainingState(description, [options(group) for group in self.groups], {}, {})
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
        """Request the tensors that this rank needs of a saved state.

        Raises:
            InputError: if the state is another optimizer's, or tensors are missing or wrong.
        """
        check_described(saved.description, self.described())
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
        """Raise unless a state that was read is valid under the saved options.

        Raises:
            InputError, NonFiniteError: naming the invalid value.
        """
        check_equal("number of param groups", len(state.groups), len(self.groups))
        expected: dict[tuple[int, int, torch.dtype], dict[str, Any]] = {}
        averages = {average_key(decay) for decay in state.description["averages"]}
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
    """Return whether the optimizer state ``value`` is divided over ranks like ``stepped``."""
    return (
        isinstance(value, torch.Tensor)
        and stepped is not None
        and value.shape == stepped.shape
        and is_sharded(value) == is_sharded(stepped)
        and key != "step"  # a weight without dimensions has the same shape
    )


def _share_of(weight: TrainedWeight, key: str, value: torch.Tensor) -> tuple[str, Share]:
    """Return the kind of a tensor of the optimizer's state, and this rank's part of it."""
    if not is_part(weight.stepped, key, value):
        return WHOLE, Share.of(as_plain(value))
    return SHARD, Share.of(as_plain(value)) if is_sharded(value) else weight.part.holding(value)
