"""The training of a :class:`zerocast.optim.ZeroOptimizer`: its state dict, by names."""

from typing import Any

import torch

from zerocast.checkpoint.boxes import Share
from zerocast.checkpoint.python_values import decode
from zerocast.checkpoint.training import SHARD, Contents, Saved
from zerocast.layout import Extent
from zerocast.optim import ZeroOptimizer
from zerocast.optim.average import AVERAGE
from zerocast.optim.checkpoint import PROGRESS, description, digest_of, read, shard_kind
from zerocast.optim.state_description import Description


class ZeroTraining:
    """A ZeroOptimizer, saved and loaded by its own state dict."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self.optimizer, self.comm = optimizer, optimizer.comm
        self._shards, self._inner = optimizer._shards, optimizer._inner

    @property
    def described(self) -> Description:
        return description(self._shards, self._inner)

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        return self.optimizer.named_weights

    @property
    def device(self) -> torch.device:
        return self._shards.masters.device

    def put(self, contents: Contents) -> None:
        self.optimizer._progress.prepare("zerocast.checkpoint.save")
        given = self.optimizer.state_dict()
        zero, weights = given["zero"], self._shards.weights
        said = {key: zero[key] for key in (*self.described, *PROGRESS)}
        contents.put_optimizer(said, given["param_groups"])
        for i, entry in given["state"].items():
            name, shape, master = weights[i].name, weights[i].param.shape, entry["master"]
            extent = Extent(entry["start"], entry["start"] + master.numel())
            contents.shares[f"master.{name}"] = Share.of_range(shape, extent, master)
            for key, value in entry.items():
                if key in ("master", "start"):
                    continue
                is_shard = isinstance(value, torch.Tensor) and value.shape == master.shape
                share = Share.of_range(shape, extent, value) if is_shard else None
                contents.put_state(name, key, value, share)
        for i, state in given["whole_state"].items():
            name, shape = weights[i].name, weights[i].param.shape
            for key, value in state.items():
                is_shard = isinstance(value, torch.Tensor) and value.shape == shape
                contents.put_state(name, key, value, Share.of(value) if is_shard else None)
        for i, state in given["recipe_state"].items():
            for key, value in state.items():
                contents.shares[f"recipe.{weights[i].name}.{key}"] = Share.of(value)

    def ask(self, saved: Saved) -> None:
        whole = self._shards.whole
        for i, weight in enumerate(self._shards.weights):
            own, name = self._own(i), weight.name
            if i in self._shards.held:
                saved.want(f"master.{name}", own)
            for key, kind in saved.state_of(name).items():
                place = f"state.{name}.{key}"
                is_whole = whole is not None and not key.startswith(AVERAGE)
                if isinstance(kind, dict) or i not in (
                    whole or () if is_whole else self._shards.held
                ):
                    continue
                if kind == SHARD and not is_whole:
                    saved.want(place, own)
                else:
                    saved.want_whole(place)
            if weight.storage is not None:
                for key in weight.storage.recipe.state:
                    if f"recipe.{name}.{key}" in saved.tensors:
                        saved.want_whole(f"recipe.{name}.{key}")

    def prepare(self, saved: Saved) -> None:
        self._prepared = self._state_dict(saved)
        error = self.optimizer._progress.averages_error("zerocast.checkpoint.load")
        if error := error or self._shards.moved_weight():
            raise error
        read(self._prepared, self._shards, self._inner)  # before any of several has changed

    def restore(self) -> None:
        self.optimizer.load_state_dict(self._prepared)

    def _own(self, index: int) -> Share:
        """Return what this rank owns of a weight, of elements that mean nothing."""
        extent = self._shards.own[index].extent
        values = torch.empty(extent.size, dtype=torch.float32, device="meta")
        return Share.of_range(self._shards.weights[index].param.shape, extent, values)

    def _state_dict(self, saved: Saved) -> dict[str, Any]:
        """Return the state dict that this rank would have saved."""
        shards, said = self._shards, saved.said
        state: dict[int, dict[str, Any]] = {}
        whole_state: dict[int, dict[str, Any]] = {}
        recipe_state: dict[int, dict[str, torch.Tensor]] = {}
        groups = [{**group, "params": list[int]()} for group in saved.value("options")]
        for i, weight in enumerate(shards.weights):
            name = weight.name
            groups[weight.group]["params"].append(i)
            if i in shards.held:
                master = saved.shares[f"master.{name}"].flat
                state[i] = {"master": master, "start": shards.own[i].extent.start}
            if i in (shards.whole or ()):
                whole_state[i] = {}
            for key, kind in saved.state_of(name).items():
                is_whole = shards.whole is not None and not key.startswith(AVERAGE)
                target = (whole_state if is_whole else state).get(i)
                if target is None:
                    continue
                if isinstance(kind, dict):
                    target[key] = decode(kind["value"], {})
                else:
                    held = saved.shares[f"state.{name}.{key}"]
                    target[key] = held.flat if kind == SHARD and not is_whole else held.only
            recipe = weight.storage and weight.storage.recipe
            for key in recipe.state if recipe else ():
                if (share := saved.shares.get(f"recipe.{name}.{key}")) is not None:
                    recipe_state.setdefault(i, {})[key] = share.only
        due = [i for i, weight in enumerate(shards.weights) if weight.name in said["due"]]
        progress = {**{key: said[key] for key in PROGRESS}, "due": due}
        zero = {
            **progress, **self.described, "shard": shard_kind(shards), "rank": self.comm.rank,
            "world_size": self.comm.size, "digest": digest_of(progress),
        }  # fmt: skip
        return {
            "state": state, "whole_state": whole_state, "recipe_state": recipe_state,
            "param_groups": groups, "zero": zero,
        }  # fmt: skip
