"""MasterTraining: a torch optimizer of masters in a model, under FSDP2 or whole on every rank."""

from collections.abc import Mapping
from typing import Any

import torch

from zerocast.checkpoint.model_part import digest_of
from zerocast.comm import Communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim.boxes import Share
from zerocast.optim.training_state import (
    SHARD,
    MasterHolder,
    TrainedWeight,
    TrainingState,
    is_part,
)
from zerocast.sharded.all_gather import LowBitAllGather, gather_of
from zerocast.sharded.master_weight import as_plain
from zerocast.sharded.placement import is_sharded, sharded_like, to_local
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_parameters

_GATHERED = (
    " FSDP2 leaves parameters of its root gathered after a forward, and an optimizer that is made "
    "then never trains them: call model.reshard() before it is made."
)


class MasterTraining(MasterHolder):
    """A model and the torch optimizer of its parameters.

    Raises:
        InputError: if the optimizer steps a tensor that is not a parameter of the model.
        UnsupportedError: if it steps a parameter that holds codes.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator
    ) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.inner, self.groups = optimizer, optimizer.param_groups
        names = {id(param): name for name, param in named_parameters(model)}
        is_fsdp = any(map(is_sharded, model.parameters()))
        self._places: dict[str, int] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        for g, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise InputError(
                        "the optimizer must step parameters of the given model, and steps one "
                        f"{list(param.shape)} in param_groups[{g}] that is not in it; give the "
                        "model that it was made for." + _GATHERED * is_fsdp
                    )
                if isinstance(to_local(param), QuantizedTensor):
                    raise UnsupportedError(
                        f"{name} holds codes and no master, so its training cannot be continued; "
                        "train it with zerocast.optim.ZeroOptimizer, or convert with "
                        "weights='master'."
                    )
                self.parameters[name], self._places[name] = param, g

        self.device = next(iter(self.parameters.values())).device

    @property
    def _together(self) -> dict[str, list[str]]:
        """For each weight in an amax group, by name, the weights of that group, itself included."""
        together: dict[str, list[str]] = {}
        for module in self.model.modules():
            group = getattr(module, "amax_group", None)
            if group is not None:
                held = {id(layer.weight) for layer in group.layers}
                names = [name for name, p in self.parameters.items() if id(p) in held]
                together |= dict.fromkeys(names, names)
        return together

    @property
    def _gathers(self) -> dict[str, LowBitAllGather]:
        """The masters that FSDP2 gathers in codes, by name."""
        found = {name: gather_of(param) for name, param in self.parameters.items()}
        return {name: gather for name, gather in found.items() if gather is not None}

    def weights(self) -> list[TrainedWeight]:
        """List the weights, in order."""
        together, gathers, found = self._together, self._gathers, []
        for name, param in self.parameters.items():
            gather, plain = gathers.get(name), as_plain(param)
            part = Share.of(plain)
            found.append(
                TrainedWeight(
                    name=name,
                    group=self._places[name],
                    recipe=gather.recipe if gather else None,
                    dtype=None,
                    shares_amax=together.get(name, []),
                    master=part,
                    averages={},
                    stepped=plain,
                    part=part,
                    state={
                        key: as_plain(value) if isinstance(value, torch.Tensor) else value
                        for key, value in self.optimizer.state.get(param, {}).items()
                    },
                    recipe_state=gather.state if gather else {},
                )
            )
        return found

    def progress(self) -> dict[str, Any]:
        """Return the progress, with the weights whose cast is due. Collective.

        A cast is due if any rank has written the weight, or one of its amax group, since the last.
        """
        gathers = {name: gather for name, gather in self._gathers.items() if gather.state}
        found = []
        for name, gather in gathers.items():
            local: Any = to_local(self.parameters[name])
            found.append(gather.is_due(local.value))
        flags = torch.tensor([*found, False], dtype=torch.int32, device=self.device)
        self.comm.all_reduce_max_(flags)
        written = {name for name, flag in zip(gathers, flags.tolist(), strict=False) if flag}
        together = self._together  # a cast of one is a cast of all
        due = [name for name in gathers if not written.isdisjoint(together.get(name, [name]))]
        return {"steps": 0, "mode": "train", "averages": [], "due": due}

    def prepare_save(self, call: str) -> None:
        """Raise :class:`InputError` on every rank if unsharded optimizer state differs between
        ranks, since only one rank's is saved. Collective.
        """
        once: dict[str, str] = {}
        for name, param in self.parameters.items():
            for key, value in self.optimizer.state.get(param, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                if not is_part(param, key, value) and not is_sharded(value):
                    once[f"{key!r} of {name}"] = digest_of(value) if is_tensor else repr(value)
        everyone = self.comm.all_gather_object(once)
        for key in sorted(set().union(*everyone)):
            if len({each[key] for each in everyone if key in each}) > 1:
                raise InputError(
                    "what an optimizer keeps of a weight must be sharded as the weight is, or the "
                    f"same on every rank, and {key} is neither; use torch.zeros_like(param)."
                )

    def check_load(self, description: Mapping[str, Any], call: str) -> None:
        """Raise :class:`InputError` for a state with averages, or of another mode than train."""
        if description["averages"]:
            raise InputError(
                f"the checkpoint has averages of the masters, of decay {description['averages']}, "
                "which a torch optimizer cannot hold; load it into a ZeroOptimizer."
            )
        if description["mode"] != "train":
            raise InputError(
                "the checkpoint was saved in the mode of eval(), whose masters are averages; save "
                "it after optimizer.train()."
            )

    def restore(self, state: TrainingState) -> None:
        """Set masters, recipe state, optimizer options and optimizer state."""
        with torch.no_grad():
            for name, param in self.parameters.items():
                local = to_local(param)
                if local.numel():
                    local.copy_(state.shares[f"master.{name}"].local)
        for name, gather in self._gathers.items():
            master: Any = to_local(self.parameters[name])
            given = {key: state.shares[f"recipe.{name}.{key}"].local for key in gather.state}
            gather.load_state(given, master.value, is_due=name in state.description["due"])
        kept = [self._kept(state, name) for name in self.parameters]
        places = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        groups = zip(state.groups, places, strict=True)
        self.optimizer.load_state_dict(
            {
                "state": {n: each for n, each in enumerate(kept) if each},
                "param_groups": [{**options, "params": params} for options, params in groups],
            }
        )

    def _kept(self, state: TrainingState, name: str) -> dict[str, Any]:
        """Return the optimizer state of a parameter, sharded as the parameter is."""
        kept, param = state.kept(name), self.parameters[name]
        for key, kind in state.kinds.get(name, {}).items():
            if kind == SHARD:
                kept[key] = sharded_like(as_plain(param), kept[key].to(to_local(param).device))
        return kept
