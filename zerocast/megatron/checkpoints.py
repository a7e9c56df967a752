"""Adds to a checkpoint of Megatron-Core what continuing with weights of zerocast bit for bit needs.

It holds masters, and the values of weights, but not their codes: masters are cast once they are
loaded. The recipe state goes into the checkpoint, too: the amaxes of delayed scaling, the counters
of stochastic rounding. It is the same on all ranks of a data-parallel group, however many there
are, and the first of them writes it.
"""

from collections.abc import Callable
from typing import Any

import torch

from zerocast.tensors import QuantizedStorage, QuantizedTensor

_KEY = "zerocast"


def save(theirs: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Add the recipe state of the optimizer's weights to its sharded state."""
    from megatron.core.dist_checkpointing import ShardedObject

    state = theirs(self, *args, **kwargs)
    states = [_recipe_state(storage) for storage in _storages(self)]
    if any(states):
        copies = [
            {name: buffer.to("cpu", copy=True) for name, buffer in each.items()} for each in states
        ]
        key = f"optimizer.{_KEY}.dp_group_idx_{self.data_parallel_group_idx}"
        replica = self.data_parallel_group.rank()
        state[_KEY] = ShardedObject(key, copies, (1,), (0,), replica_id=replica)
    return state


def load(theirs: Callable[..., Any], self: Any, state_dict: dict[str, Any]) -> None:
    """Cast the masters that were loaded, from the recipe state with which their codes were made."""
    theirs(self, {key: value for key, value in state_dict.items() if key != _KEY})
    storages = _storages(self)
    if not storages or "param_state" not in state_dict:  # without masters
        return
    for storage, saved in zip(storages, state_dict.get(_KEY, ()), strict=False):
        for name, buffer in _recipe_state(storage).items():
            buffer.copy_(saved[name])
        storage.recipe.rewind(storage.buffers)
    self._copy_main_params_to_model_params()
    for chunk in self.model_chunks:
        chunk.start_param_sync(force_sync=True)


def _storages(optimizer: Any) -> list[QuantizedStorage]:
    """Return those of its weights, in the order of its buffers, which the model alone decides."""
    buffers = getattr(optimizer, "buffers", ())  # none where all weights are frozen
    weights = (weight for buffer in buffers for weight in buffer.params)
    return [weight.quantized_storage for weight in weights if isinstance(weight, QuantizedTensor)]


def _recipe_state(storage: QuantizedStorage) -> dict[str, torch.Tensor]:
    return {name: storage.buffers[name] for name in storage.recipe.state}
