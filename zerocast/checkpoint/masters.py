"""The training of a torch optimizer whose parameters are masters in the model: under FSDP2, or
whole on every rank.
"""

from typing import Any

import torch

from zerocast.checkpoint.boxes import Share
from zerocast.checkpoint.model_part import digest_of
from zerocast.checkpoint.python_values import decode
from zerocast.checkpoint.training import SHARD, WHOLE, Contents, Saved
from zerocast.comm import Communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim.state_description import (
    Description,
    check_numbers,
    check_values,
    describe,
    describe_weight,
    state_kinds,
)
from zerocast.sharded.all_gather import LowBitAllGather, gather_of
from zerocast.sharded.master_weight import as_plain
from zerocast.sharded.placement import is_sharded, sharded_like, to_local
from zerocast.sharded.state import check_state
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_parameters

_GATHERED = (
    " FSDP2 leaves parameters of its root gathered after a forward, and an optimizer that is made "
    "then never trains them: call model.reshard() before it is made."
)


class MasterTraining:
    """A model and the torch optimizer of its parameters.

    Raises:
        InputError, UnsupportedError: where the optimizer steps a tensor that is not a parameter of
            the model, or not a master.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator
    ) -> None:
        self.model, self.optimizer, self.comm = model, optimizer, comm
        names = {id(param): name for name, param in named_parameters(model)}
        is_fsdp = any(map(is_sharded, model.parameters()))
        self._groups: dict[str, int] = {}
        self._params: dict[str, torch.Tensor] = {}
        for g, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise InputError(
                        f"the optimizer must step parameters of the given model, and steps one "
                        f"{list(param.shape)} in param_groups[{g}] that is none of it; give the "
                        f"model that it was made for." + _GATHERED * is_fsdp
                    )
                if isinstance(to_local(param), QuantizedTensor):
                    raise UnsupportedError(
                        f"{name} holds codes and no master, so its training cannot be continued; "
                        f"train it by zerocast.optim.ZeroOptimizer, or convert with "
                        f"weights='master'."
                    )
                self._params[name], self._groups[name] = param, g

    @property
    def _together(self) -> dict[str, list[str]]:
        """By name the weights of the same amax group, itself included."""
        together: dict[str, list[str]] = {}
        for module in self.model.modules():
            group = getattr(module, "amax_group", None)
            if group is not None:
                held = {id(layer.weight) for layer in group.layers}
                names = [name for name, p in self._params.items() if id(p) in held]
                together |= dict.fromkeys(names, names)
        return together

    @property
    def described(self) -> Description:
        together, weights = self._together, []
        for name, param in self._params.items():
            gather = gather_of(param)
            recipe, group = gather.recipe if gather else None, self._groups[name]
            weights.append(
                describe_weight(name, param.shape, group, recipe, None, together.get(name, ()))
            )
        return describe(self.optimizer, len(self.optimizer.param_groups), weights)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return self._params

    @property
    def device(self) -> torch.device:
        return next(iter(self._params.values())).device

    @property
    def _gathers(self) -> dict[str, LowBitAllGather]:
        """The masters that FSDP2 gathers in codes, by name."""
        found = {name: gather_of(param) for name, param in self._params.items()}
        return {name: gather for name, gather in found.items() if gather is not None}

    def put(self, contents: Contents) -> None:
        said = {**self.described, "steps": 0, "mode": "train", "averages": [], "due": self._due()}
        contents.put_optimizer(said, self.optimizer.param_groups)
        once: dict[str, str] = {}  # what is saved of one of the ranks that have it
        for name, param in self._params.items():
            contents.shares[f"master.{name}"] = Share.of(as_plain(param))
            for key, value in self.optimizer.state.get(param, {}).items():
                is_tensor = isinstance(value, torch.Tensor)
                is_shard = is_tensor and value.shape == param.shape and key != "step"
                share = Share.of(as_plain(value)) if is_shard else None
                contents.put_state(name, key, value, share)
                if not is_shard and not is_sharded(value):
                    once[f"{key!r} of {name}"] = digest_of(value) if is_tensor else repr(value)
        for name, gather in self._gathers.items():
            for key, value in gather.state.items():
                contents.shares[f"recipe.{name}.{key}"] = Share.of(value)

        everyone = self.comm.all_gather_object(once)
        for key in sorted(set().union(*everyone)):
            if len({each[key] for each in everyone if key in each}) > 1:
                raise InputError(
                    f"what an optimizer keeps of a weight must be sharded as the weight is, or the "
                    f"same on every rank, and {key} is neither; make it by torch.zeros_like(param)."
                )

    def _due(self) -> list[str]:
        """Return the weights whose cast is due, as any rank has written them, or one of their amax
        group, since. Collective.
        """
        gathers = {name: gather for name, gather in self._gathers.items() if gather.state}
        found = []
        for name, gather in gathers.items():
            local: Any = to_local(self._params[name])
            found.append(gather.is_due(local.value))
        flags = torch.tensor([*found, False], dtype=torch.int32, device=self.device)
        self.comm.all_reduce_max_(flags)
        written = {name for name, flag in zip(gathers, flags.tolist(), strict=False) if flag}
        together = self._together  # a cast of one is a cast of all
        return [name for name in gathers if not written.isdisjoint(together.get(name, [name]))]

    def ask(self, saved: Saved) -> None:
        gathers = self._gathers
        if saved.said["averages"]:
            raise InputError(
                f"the checkpoint has averages of the masters, of decay {saved.said['averages']}, "
                "which a torch optimizer cannot hold; load it into a ZeroOptimizer."
            )
        if saved.said["mode"] != "train":
            raise InputError(
                "the checkpoint was saved in the mode of eval(), whose masters are averages; save "
                "it after optimizer.train()."
            )
        for name, param in self._params.items():
            own = Share.of(as_plain(param))
            if (dtype := saved.kept(f"master.{name}").dtype) != param.dtype:
                raise InputError(
                    f"the master of {name} must be loaded in the dtype in which it was saved, "
                    f"{dtype}, and the parameter is {param.dtype}; make the model in that dtype."
                )
            saved.want(f"master.{name}", own)
            for key, kind in saved.state_of(name).items():
                if kind == SHARD:
                    saved.want(f"state.{name}.{key}", own)
                elif kind == WHOLE:
                    saved.want_whole(f"state.{name}.{key}")
            for key in gathers[name].recipe.state if name in gathers else ():
                saved.want_whole(f"recipe.{name}.{key}")

    def prepare(self, saved: Saved) -> None:
        self._check_values(saved)
        shares = saved.shares
        self._masters = {name: shares[f"master.{name}"].only for name in self._params}
        self._are_due = set(saved.said["due"])
        self._recipe_states = {
            name: {key: shares[f"recipe.{name}.{key}"].only for key in gather.recipe.state}
            for name, gather in self._gathers.items()
        }
        states = [self._state(saved, name) for name in self._params]
        places = [group["params"] for group in self.optimizer.state_dict()["param_groups"]]
        groups = zip(saved.value("options"), places, strict=True)
        self._state_dict = {
            "state": {n: each for n, each in enumerate(states) if each},
            "param_groups": [{**options, "params": params} for options, params in groups],
        }

    def restore(self) -> None:
        with torch.no_grad():
            for name, param in self._params.items():
                local = to_local(param)
                if local.numel():
                    local.copy_(self._masters[name])
        for name, gather in self._gathers.items():
            master: Any = to_local(self._params[name])
            state = self._recipe_states[name]
            gather.load_state(state, master.value, is_due=name in self._are_due)
        self.optimizer.load_state_dict(self._state_dict)

    def _state(self, saved: Saved, name: str) -> dict[str, Any]:
        """Return what the optimizer keeps of a parameter."""
        state, param = {}, self._params[name]
        for key, kind in saved.state_of(name).items():
            if isinstance(kind, dict):
                state[key] = decode(kind["value"], {})
            elif kind == WHOLE:
                state[key] = saved.shares[f"state.{name}.{key}"].only
            else:
                given, local = saved.shares[f"state.{name}.{key}"].only, to_local(param)
                given = given.reshape(local.shape).to(local.device)
                state[key] = sharded_like(as_plain(param), given)
        return state

    def _check_values(self, saved: Saved) -> None:
        """Raise unless masters and states are such as a run has, under the saved options."""
        gathers, groups = self._gathers, saved.value("options")
        kinds: dict[tuple[int, int, torch.dtype], dict[str, Any]] = {}
        for name, param in self._params.items():
            plain, group = as_plain(param), self._groups[name]
            check_numbers(f"the master of {name}", saved.shares[f"master.{name}"].only, finite=True)
            case = group, param.dim(), param.dtype
            if case not in kinds:
                kinds[case] = state_kinds(self.optimizer, groups[group], to_local(plain))
            state = {
                key: to_local(v) if isinstance(v, torch.Tensor) else v
                for key, v in self._state(saved, name).items()
            }
            check_values(name, to_local(plain).shape, state, kinds[case])
            if name in gathers:
                own, shares = gathers[name].state, saved.shares
                given = {key: shares[f"recipe.{name}.{key}"].only for key in own}
                check_state(name, gathers[name].recipe, own, given, "load a checkpoint of it")
