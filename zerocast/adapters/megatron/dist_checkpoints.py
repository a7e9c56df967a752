"""Adds recipe state to Megatron-Core's checkpoints, to resume bit for bit with zerocast's weights.

A checkpoint holds masters and the values of weights, but not their codes: masters are cast after
loading. This module adds the recipe state: the amaxes of delayed scaling, the counters of
stochastic rounding. It is the same on all ranks of a data-parallel group of any size, and the first
rank of the group writes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerocast import InputError, QuantizedTensor
from zerocast.recipes import recipe_to_values
from zerocast.sharded.state import check_saved_state
from zerocast.tensors import QuantizedStorage

_KEY = "zerocast"


def save(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the optimizer's sharded state with the recipe state of its weights."""
    from megatron.core.dist_checkpointing import ShardedObject

    state = theirs(self, *args, **kwargs)
    storages = _storages(self)
    states = [_recipe_state(storage) for storage in storages]
    if any(states):
        copies = [
            {
                "recipe": recipe_to_values(storage.recipe),
                "state": {name: buffer.to("cpu", copy=True) for name, buffer in each.items()},
            }
            for storage, each in zip(storages, states, strict=True)
        ]
        key = f"optimizer.{_KEY}.dp_group_idx_{self.data_parallel_group_idx}"
        replica = self.data_parallel_group.rank()
        state[_KEY] = ShardedObject(key, copies, (1,), (0,), replica_id=replica)
    return state


def decode_first(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a load decode all weights before it begins, and fill the decoded copies. Otherwise it
    would write values into the codes of one weight after the other.
    """
    theirs(self, *args, **kwargs)
    self.stream_ckpt_dequant = False


def load(theirs: Callable[..., Any], self: Any, state_dict: dict[str, Any]) -> None:
    """Load masters, and cast them with the saved recipe state.

    Raises:
        InputError: if the saved recipe state is of other weights or another recipe. The optimizer
            has not been changed.
    """
    storages, saved = _storages(self), state_dict.get(_KEY)
    if saved is not None:
        _check(storages, saved)
    theirs(self, {key: value for key, value in state_dict.items() if key != _KEY})
    if not storages or "param_state" not in state_dict:  # without masters
        return
    for storage, each in () if saved is None else zip(storages, saved, strict=True):
        for name, buffer in _recipe_state(storage).items():
            buffer.copy_(each["state"][name])
        storage.recipe.rewind(storage.buffers)
    self._copy_main_params_to_model_params()
    for chunk in self.model_chunks:
        chunk.start_param_sync(force_sync=True)


def _check(storages: Sequence[QuantizedStorage], saved: Sequence[Any]) -> None:
    if len(saved) != len(storages):
        raise InputError(
            "a checkpoint must be loaded into the model that was saved: it has the recipe state of "
            f"{len(saved)} weights, and the optimizer has {len(storages)} on this rank; build that "
            "model."
        )
    remedy = "build the model with the recipe that it was saved under"
    for i, (storage, each) in enumerate(zip(storages, saved, strict=True)):
        name, recipe = f"weight {i} {tuple(storage.shape)}", storage.recipe
        own = _recipe_state(storage)
        check_saved_state(name, recipe, own, each["recipe"], each["state"], remedy)


def _storages(optimizer: Any) -> list[QuantizedStorage]:
    """Return the storages of its quantized weights in the order of its buffers, which depends only
    on the model.
    """
    buffers = getattr(optimizer, "buffers", ())  # none where all weights are frozen
    weights = (weight for buffer in buffers for weight in buffer.params)
    return [weight.quantized_storage for weight in weights if isinstance(weight, QuantizedTensor)]


def _recipe_state(storage: QuantizedStorage) -> dict[str, torch.Tensor]:
    return {name: storage.buffers[name] for name in storage.recipe.state}
