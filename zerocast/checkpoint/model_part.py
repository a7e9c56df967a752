"""The tensors of a model in a checkpoint other than the weights that its optimizer steps.

    model.NAME             a buffer, or a parameter that is not trained
    model.NAME.BUFFER      a stored tensor of a quantized one
    model.NAME._extra_state   the extra state of a module, such as a layer's recipe state

A tensor that is the same on all ranks is saved once. One that differs (statistics of each rank's
batches) is saved for each rank, with ``@RANK`` after its name. It can only be loaded by the same
number of ranks.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from zerocast.checkpoint.files import bytes_of
from zerocast.comm import Communicator, raising_together
from zerocast.errors import InputError
from zerocast.nn.saved_state import WEIGHT_STATE
from zerocast.nn.stateful_module import StatefulModule
from zerocast.optim.boxes import Share
from zerocast.optim.training_state import Wanted
from zerocast.sharded.master_weight import as_plain
from zerocast.sharded.placement import is_sharded, to_local
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_modules, named_parameters

_EXTRA = "._extra_state"


class ModelPart:
    """The buffers, frozen parameters and extra state of a model.

    Args:
        model: the model; None saves and loads none of these.
        trained: the parameters that each optimizer steps, by name.
        comm: the ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module | None,
        trained: Sequence[Mapping[str, torch.Tensor]],
        comm: Communicator,
    ) -> None:
        self.model, self.comm = model, comm
        self._trained = {id(param) for each in trained for param in each.values()}

    def put(self, description: dict[str, Any], shares: dict[str, Share]) -> None:
        """Add tensors to ``shares``, names of differing ones to ``description``. Collective."""
        with raising_together(self.comm):
            tensors = self._tensors()
            for module, name in self._stateful():
                if isinstance(state := module.get_extra_state(), torch.Tensor):
                    tensors[f"model.{name}{_EXTRA}"] = to_local(state)
            digests = {name: digest_of(t) for name, t in tensors.items() if not is_sharded(t)}
        everyone = self.comm.all_gather_object(digests)
        differing = sorted(
            {name for theirs in everyone for name in theirs.keys() | digests.keys()
             if theirs.get(name) != everyone[0].get(name)}
        )  # fmt: skip
        description["by_rank"] = differing
        for name, tensor in tensors.items():
            place = f"{name}@{self.comm.rank}" if name in differing else name
            shares[place] = Share.of(tensor)

    def ask(self, description: Mapping[str, Any], wanted: Wanted, ranks: int) -> None:
        """Add to ``wanted`` the tensors that ``ranks`` ranks have saved.

        Raises:
            InputError: if the model has other tensors, or this number of ranks cannot load them.
        """
        tensors = self._tensors()
        extra = {f"model.{name}{_EXTRA}" for _, name in self._stateful()}
        by_rank = set(description["by_rank"])
        names = {
            name: name.rpartition("@")[0] for name in wanted.tensors if name.startswith("model.")
        }
        given = {base if base in by_rank else name for name, base in names.items()}
        if missing := sorted((tensors.keys() - given) | (given - tensors.keys() - extra)):
            raise InputError(
                f"a checkpoint must be loaded into the model that it was saved with, and "
                f"{missing[0].removeprefix('model.')!r} is in one of them only; save and load "
                f"with the same model, or both without one."
            )
        differing = by_rank & given
        if differing and ranks != self.comm.size:
            raise InputError(
                f"{min(differing).removeprefix('model.')} was saved by {ranks} ranks with "
                f"different values, so {self.comm.size} ranks cannot continue. Load on as many "
                "ranks, or make them equal before saving (a broadcast of buffers; amaxes by "
                "autocast(amax_reduction_group=...)), or save and load without the model."
            )
        for name in sorted(given):
            place = f"{name}@{self.comm.rank}" if name in differing else name
            if name in tensors:
                _check_kind(name, tensors[name], wanted.saved(place))
                wanted.ask(place, Share.of(tensors[name]))
            elif place in wanted.tensors:
                wanted.ask_whole(place)

    def check(self, description: Mapping[str, Any], shares: Mapping[str, Share]) -> None:
        """Raise :class:`InputError` if a layer cannot load its recipe state."""
        for module, name in self._stateful():
            value = self._found(description, shares, f"model.{name}{_EXTRA}")
            if value is not None and isinstance(module, StatefulModule):
                module.checked_extra_state(value)

    @torch.no_grad()
    def restore(self, description: Mapping[str, Any], shares: Mapping[str, Share]) -> None:
        """Copy loaded tensors into the model. Exceptions of ``set_extra_state`` pass through."""
        for name, tensor in self._tensors().items():
            local, value = to_local(tensor), self._found(description, shares, name)
            if value is not None and local.numel():
                local.copy_(value)
        for module, name in self._stateful():
            if (value := self._found(description, shares, f"model.{name}{_EXTRA}")) is not None:
                module.set_extra_state(value)
            elif isinstance(module, StatefulModule):
                module.forget_extra_state()

    def _found(
        self, description: Mapping[str, Any], shares: Mapping[str, Share], name: str
    ) -> torch.Tensor | None:
        """Return the loaded value of a tensor; None if the checkpoint does not have it."""
        place = f"{name}@{self.comm.rank}" if name in description["by_rank"] else name
        return shares[place].local if place in shares else None

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return buffers and untrained parameters by name, quantized ones as stored tensors."""
        found: dict[str, torch.Tensor] = {}
        if self.model is None:
            return found
        for name, module in named_modules(self.model):
            prefix = f"model.{name}." if name else "model."
            for key, buffer in module._buffers.items():
                is_kept = key not in module._non_persistent_buffers_set and key != WEIGHT_STATE
                if buffer is not None and is_kept:
                    found[prefix + key] = buffer
        for name, param in named_parameters(self.model):
            if id(param) in self._trained:
                continue
            if isinstance(param, QuantizedTensor):
                stored = param.quantized_storage.buffers
                found |= {f"model.{name}.{key}": buffer for key, buffer in stored.items()}
            else:
                found[f"model.{name}"] = as_plain(param)
        return found

    def _stateful(self) -> list[tuple[Any, str]]:
        """Return the modules that can have extra state, with their names."""
        modules = named_modules(self.model) if self.model is not None else ()
        none = torch.nn.Module.get_extra_state
        return [(m, name) for name, m in modules if type(m).get_extra_state is not none]


def _check_kind(name: str, tensor: torch.Tensor, kept: Any) -> None:
    given, needed = (kept.dtype, kept.shape), (tensor.dtype, tuple(tensor.shape))
    if given != needed:
        raise InputError(
            f"{name.removeprefix('model.')} of the model must be {given[0]} {list(given[1])}, as "
            f"it was saved, and is {needed[0]} {list(needed[1])}; load into the same model."
        )


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 digest of a tensor's dtype, shape and values."""
    held = tensor.detach().cpu().contiguous()
    kind = f"{held.dtype} {tuple(held.shape)}"
    return hashlib.sha256(kind.encode() + bytes_of(held)).hexdigest()
