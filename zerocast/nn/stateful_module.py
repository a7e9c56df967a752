"""StatefulModule: keeps a layer's state from forward to forward, moves it and saves it.

The recipe state is the module's extra state. A ``state_dict`` has an entry for it only if there is
some, so that dictionaries can be exchanged with torch's own layers.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from zerocast.errors import InputError
from zerocast.nn.layer_product import GemmQuantizers
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import COUNTER, ROLES, Mode, RecipeState
from zerocast.nn.recompute import Runs
from zerocast.nn.saved_state import WEIGHT_STATE, pack, unpack
from zerocast.nn.traced_layer import new_handle
from zerocast.recipes import Recipe, recipe_to_values
from zerocast.sharded.placement import replicated_like
from zerocast.tensors import QuantizedTensor

_EXTRA_STATE = "_extra_state"  # torch's name, which follows the module's prefix


class StatefulModule(torch.nn.Module):
    """A module whose quantizers have state; the attributes are those of
    :class:`zerocast.nn.quantized_module.QuantizedModule`.
    """

    gemms: ClassVar[int] = 1
    # On the class, so that a module that convert changes into this class has them, too.
    name: str = ""
    _states: tuple[RecipeState, RecipeState] | None = None
    _loaded: torch.Tensor | None = None  # a saved state, until a forward under its recipe
    _quantizers: list[GemmQuantizers]
    _kept: dict[Recipe, tuple[Any, list[GemmQuantizers]]] | None = None  # of each recipe so far
    _counters: dict[Mode, torch.Tensor] | None = None  # of random roundings, for all recipes
    _runs: Runs | None = None
    _handle: torch.Tensor | None = None  # by which compiled graphs refer to this layer

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Make the module with a handle, which compiled functions cannot make; also for copies and
        pickles.
        """
        made = super().__new__(cls)
        made._handle = new_handle(made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but those of this object alone, such as the handle."""
        own = ("_handle", "_runs")
        return {name: value for name, value in vars(self).items() if name not in own}

    # --- moving and converting ---

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Do what torch does for ``to``, ``cuda``, ``half`` and others, except for quantized
        parameters: torch would give them another object's attributes and hooks, and refuse those to
        which there is a weak reference.
        """
        own: dict[str, QuantizedTensor] = {}
        for name, parameter in self._parameters.items():
            if isinstance(parameter, QuantizedTensor):
                grad = parameter.grad
                with torch.no_grad():
                    applied = fn(parameter)
                    if not isinstance(applied, QuantizedTensor):
                        continue  # another dtype than a weight can have: torch makes it plain
                    if applied.quantized_storage is not parameter.quantized_storage:
                        parameter.grad = None
                        applied.take_place_of(parameter)
                    if grad is not None:
                        parameter.grad = fn(grad)
                own[name] = parameter
        self._parameters.update(dict.fromkeys(own))
        try:
            return super()._apply(fn, recurse)
        finally:
            self._parameters.update(own)  # type: ignore[arg-type]

    # --- the recipe's state ---

    def _take_states(self, recipe: Recipe, device: torch.device) -> tuple[RecipeState, RecipeState]:
        """Make the states and quantizers of ``recipe`` those of the layer; new ones at its first
        forward under this recipe. All draws of the layer are counted together.
        """
        self._kept = self._kept or {}
        counters = {}
        for state in self._states or ():
            if COUNTER in state.tensors:
                counters[state.mode] = state.tensors[COUNTER]
        self._counters = counters = (self._counters or {}) | counters
        if recipe not in self._kept:
            self._kept[recipe] = self._new_states(recipe, device)
        self._states, self._quantizers = self._kept[recipe]
        for state in self._states:
            state.to(device)
            if COUNTER in state.tensors:
                own = state.tensors[COUNTER]
                state.tensors[COUNTER] = counters.get(state.mode, own).to(device)
        return self._states

    def _new_states(
        self, recipe: Recipe, device: torch.device
    ) -> tuple[tuple[RecipeState, RecipeState], list[GemmQuantizers]]:
        forward, backward = states = [
            RecipeState.create(recipe, mode, len(ROLES[mode]) * self.gemms, device, name=self.name)
            for mode in ROLES
        ]
        three, two = iter(forward.make_quantizers()), iter(backward.make_quantizers())
        quantizers = [
            GemmQuantizers(next(three), next(three), next(three), next(two), next(two))
            for _ in range(self.gemms)
        ]
        self._resume(states)
        return (forward, backward), quantizers

    def gradient_quantizer(self, recipe: Recipe, gemm: int, device: torch.device) -> Quantizer:
        """Return the quantizer of the gradient of the output of product ``gemm``.

        It is for a backward that does not know which quantizers its forward had.
        """
        present = self._states[0].recipe if self._states is not None else recipe
        self._take_states(recipe, device)
        quantizer = self._quantizers[gemm].grad_output
        if present != recipe:
            self._take_states(present, device)
        return quantizer

    def _resume(self, states: Sequence[RecipeState]) -> None:
        """Load the saved state into these new ``states`` if it was saved under their recipe."""
        loaded = self._loaded
        if loaded is None:
            return
        owner, tensors = unpack(loaded, self.name)
        if owner["recipe"] == recipe_to_values(states[0].recipe):
            self._loaded = None
            for state in states:
                names = {f"{state.mode}.{name}": name for name in state.state_dict()}
                state.load_state_dict({names[n]: t for n, t in tensors.items() if n in names})

    def get_extra_state(self) -> torch.Tensor | None:
        """Return the state of the recipe of the latest forward, as one tensor
        (:mod:`zerocast.nn.saved_state`); None where that recipe has none.
        """
        packed = self._loaded
        if self._states is not None:
            tensors = {
                f"{state.mode}.{name}": tensor
                for state in self._states
                for name, tensor in state.state_dict().items()
            }
            owner = {"gemms": self.gemms, "recipe": recipe_to_values(self._states[0].recipe)}
            packed = pack(owner, tensors) if tensors else None
        return None if packed is None else replicated_like(self.parameters(), packed)

    def set_extra_state(self, state: object) -> None:
        """Continue from what :meth:`get_extra_state` returned, from the next forward under its
        recipe on.

        Anything but a tensor or dict stands for no state, such as the placeholder of torch's
        ``set_model_state_dict`` for an entry that a full state dict lacks.

        Raises:
            InputError: where it was made by another kind of layer, or is no state at all.
        """
        if isinstance(state, torch.Tensor | dict):
            self._loaded = self.checked_extra_state(state)
            self._states = self._kept = self._counters = None

    def forget_extra_state(self) -> None:
        """Drop the recipe state, as in a layer before its first forward."""
        self._states = self._kept = self._loaded = self._counters = None

    def checked_extra_state(self, state: object) -> torch.Tensor:
        """Return what :meth:`set_extra_state` takes over of ``state``; raises as that does."""
        owner, tensors = unpack(state, self.name)
        if owner.get("gemms") != self.gemms:
            raise InputError(
                f"the recipe state of {self.name} must be that of a {type(self).__name__}, "
                f"of {self.gemms} products, got one of {owner.get('gemms')}; take its "
                f"'_extra_state' out of the state dict to start without it."
            )
        return pack(owner, tensors)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if destination[prefix + _EXTRA_STATE] is None:
            del destination[prefix + _EXTRA_STATE]

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        if local_metadata.get("assign_to_params_buffers", False):
            self._fill_quantized(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *others
        )
        for name in (_EXTRA_STATE, WEIGHT_STATE):  # without an entry, the state starts from nothing
            if prefix + name in missing_keys:
                missing_keys.remove(prefix + name)

    def _fill_quantized(self, state_dict: Any, prefix: str) -> None:
        """Copy given values into quantized parameters. torch would assign new parameters instead,
        which would hold no codes, and which optimizers and plans would not know.
        """
        for name, parameter in self._parameters.items():
            given = state_dict.get(prefix + name)
            if not (isinstance(parameter, QuantizedTensor) and isinstance(given, torch.Tensor)):
                continue
            if given.shape == parameter.shape and given is not parameter:
                if parameter.is_meta and not given.is_meta:
                    torch.empty_like(parameter, device=given.device).take_place_of(parameter)
                with torch.no_grad():
                    parameter.copy_(given)
                state_dict[prefix + name] = parameter
