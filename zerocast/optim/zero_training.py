"""ZeroTraining: the training state of a ZeroOptimizer, and its state dicts.

A rank's state dict holds its elements of every weight. The state dicts of all ranks form the whole
state, on any number of ranks::

    state         this rank's part of each tensor, by the names of
                  :mod:`zerocast.optim.training_state`; flat if weights are stepped in pieces
    param_groups  the options, and the indices of the weights, as torch's optimizers save them
    zero          the description; shard, rank, world_size; pieces: for each tensor the whole shape
                  and the boxes of this rank's part (:mod:`zerocast.optim.boxes`); kinds: those of
                  the optimizer state; digest: of all except the kinds
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from zerocast.arguments import why_no_memory
from zerocast.comm import Attempt
from zerocast.comm.agreement import check_same
from zerocast.errors import InputError, UnsupportedError
from zerocast.optim.boxes import Box, Share
from zerocast.optim.param_groups import option_lines, options
from zerocast.optim.sharded_optimizer import ShardedOptimizer
from zerocast.optim.state_description import (
    check_described,
    check_equal,
    check_format,
)
from zerocast.optim.training_state import (
    MasterHolder,
    TrainedWeight,
    TrainingState,
    Wanted,
)

StateDict = dict[str, Any]

KEYS = {"state", "param_groups", "zero"}
"""The keys of every state dict."""


class EveryRank:
    """A marker in a state dict that makes ``torch.distributed.checkpoint`` raise.

    Ranks have different values under the same names. DCP would treat them as copies, and keep those
    of one rank. Copies of the state dict keep the marker; pickles have an empty dictionary instead.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, ()

    def __deepcopy__(self, memo: object) -> EveryRank:
        return self

    def __create_write_items__(self, fqn: str, value: object) -> NoReturn:
        raise UnsupportedError(
            "torch.distributed.checkpoint treats tensors of one name as copies, and would save "
            "only one rank's part of a ZeroOptimizer's state; call zerocast.checkpoint.save(path, "
            "optimizer), which saves every rank's."
        )


class ZeroTraining(MasterHolder):
    """A ZeroOptimizer and its shards of the masters."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self.optimizer: ShardedOptimizer = optimizer
        self.comm, self.inner, self.groups = optimizer.comm, optimizer.inner, optimizer.param_groups
        self.parameters, self._shards = optimizer.named_weights, optimizer._shards
        self.device = self._shards.masters.device

    # --- the held state ---

    def weights(self) -> list[TrainedWeight]:
        """List the weights, in order."""
        shards, inner = self._shards, self.optimizer._inner
        together: dict[str, list[str]] = {}
        for weight in shards.weights:
            if weight.storage is not None and weight.storage.amax_group is not None:
                together.setdefault(weight.storage.amax_group, []).append(weight.name)
        recipe_states, found = shards.recipe_states(), []
        for i, weight in enumerate(shards.weights):
            storage, stepped = weight.storage, inner.masters.get(i)
            master = Share.of_range(weight.param.shape, shards.own[i].extent, shards.master(i))
            found.append(
                TrainedWeight(
                    name=weight.name,
                    group=weight.group,
                    recipe=storage.recipe if storage else None,
                    dtype=storage.dtype if storage else weight.param.dtype,
                    shares_amax=together.get(storage.amax_group or "", []) if storage else [],
                    master=master,
                    averages={a.key: a.shard(i) for a in self.optimizer._averages.values()}
                    if master.pieces
                    else {},
                    stepped=stepped,
                    part=Share.of(stepped)
                    if stepped is not None and shards.whole is not None
                    else master,
                    state={} if stepped is None else inner.state(i),
                    recipe_state=recipe_states.get(i, {}),
                )
            )
        return found

    def progress(self) -> dict[str, Any]:
        """Return steps, mode and averages; no cast is due."""
        return {
            "steps": self.optimizer._progress.steps,
            "mode": self.optimizer._inner.mode,
            "averages": list(self.optimizer._averages),
            "due": list[str](),
        }

    def prepare_save(self, call: str) -> None:
        """Raise on every rank if ``call`` is not allowed on any. Collective."""
        self.optimizer._progress.prepare(call)
        self.optimizer._inner.exchange_options(self.groups)

    def check_load(self, description: Mapping[str, Any], call: str) -> None:
        """Raise if averages are in the weights, or a weight has been moved."""
        error = self.optimizer._progress.averages_error(call)
        if error := error or self._shards.moved_weight():
            raise error

    @torch.no_grad()
    def restore(self, state: TrainingState) -> None:
        """Set masters, averages, options, inner state and the state of recipes, and cast."""
        optimizer, shards = self.optimizer, self._shards
        with optimizer._progress.changing():
            for decay in state.description["averages"]:
                optimizer._average(decay)
            for weight in self.weights():
                name, shares = weight.name, state.shares
                if weight.master.pieces:
                    master = shares[f"master.{name}"]
                    weight.master.local.copy_(master.local)
                    for key, average in weight.averages.items():
                        average.copy_(shares.get(f"state.{name}.{key}", master).local)
                for key, tensor in weight.recipe_state.items():
                    tensor.copy_(shares[f"recipe.{name}.{key}"].local)
            for group, theirs in zip(self.groups, state.groups, strict=True):
                group.update(theirs)
            inner = optimizer._inner
            kept = {i: state.kept(shards.weights[i].name) for i in inner.masters}
            inner.load_state(kept, state.description["mode"], self.groups)
            if optimizer._owners:
                optimizer._owners.fetch_masters()
            due = state.description["due"]
            optimizer._publication.run(
                due=[i for i, weight in enumerate(shards.weights) if weight.name in due]
            )
            optimizer._progress.steps = state.description["steps"]
        optimizer._gradients.drop()

    # --- state dicts ---

    def state_dict(self) -> StateDict:
        """Return this rank's state dict, with the live tensors."""
        state, shards = self.state(), self._shards
        groups: list[dict[str, Any]] = [group | {"params": []} for group in state.groups]
        for i, weight in enumerate(shards.weights):
            groups[weight.group]["params"].append(i)
        zero = {
            **state.description,
            **self._origin,
            "pieces": {n: (s.shape, list(map(tuple, s.pieces))) for n, s in state.shares.items()},
            "kinds": state.kinds,
            "every_rank": EveryRank(),
        }
        tensors = {name: share.local for name, share in state.shares.items()}
        zero["digest"] = digest_of(zero)
        return {"state": tensors, "param_groups": groups, "zero": zero}

    @property
    def _origin(self) -> dict[str, Any]:
        """The ``shard`` argument of the ZeroOptimizer, and this rank and the number of ranks."""
        shard = "element" if self._shards.whole is None else "matrix"
        return {"shard": shard, "rank": self.comm.rank, "world_size": self.comm.size}

    def read(self, given: object) -> TrainingState:
        """Return this rank's state, read from one state dict or a sequence of them.

        Raises:
            InputError: if they are not state dicts, or are those of another optimizer or of other
                weights; if they do not cover this rank's elements, or a single one is another
                rank's; if they are damaged.
        """
        saved: list[Any] = list(given) if isinstance(given, Sequence) else [given]
        if not saved:
            raise InputError("load_state_dict needs one state dict at least, got an empty list.")
        kinds: dict[str, dict[str, Any]] = {}
        wanted, described = Wanted({}), self.described()
        for each in saved:
            if not isinstance(each, Mapping) or each.keys() != KEYS:
                raise InputError(
                    "load_state_dict needs what ZeroOptimizer.state_dict() returned, or a sequence "
                    f"of that from all ranks, got a {type(each).__name__} that is not one."
                )
            zero = each["zero"]
            check_format(zero)
            if zero["digest"] != digest_of(zero):
                raise InputError(
                    "the entry zero of a state dict must be as it was saved, and has another "
                    "digest; the state is damaged."
                )
            check_described(zero, described)
            check_equal("shard", zero["shard"], self._origin["shard"])
            for name, found in zero["kinds"].items():
                kinds.setdefault(name, {}).update(copy.deepcopy(found))
            for name, tensor in each["state"].items():
                share = _share_in(name, tensor, *zero["pieces"][name])
                wanted.tensors.setdefault(name, share).pieces.update(share.pieces)
        self._check_origin([each["zero"] for each in saved])
        groups = [copy.deepcopy(options(group)) for group in saved[0]["param_groups"]]
        state = TrainingState(saved[0]["zero"], groups, kinds, wanted.shares)
        self.ask(state, wanted)
        for name, share in wanted.shares.items():
            if not share.fill(wanted.tensors[name].pieces):
                raise InputError(
                    f"this rank needs elements of {name} which the given state lacks, or has more "
                    "than once; load on as many ranks as saved, each its own state dict, or give "
                    "every rank the sequence of all ranks' state dicts."
                )
        self.check(state)
        return state

    def _check_origin(self, zeros: Sequence[Mapping[str, Any]]) -> None:
        """Raise :class:`InputError` unless ``zeros``, the entries of state dicts, are this rank's,
        or those of all ranks after the same step.
        """
        steps = [zero["steps"] for zero in zeros]
        if len(set(steps)) > 1:
            raise InputError(
                f"the state dicts of all ranks must be of the same step, got states of steps "
                f"{steps}; load what all ranks saved after the same step."
            )
        origins = [(zero["rank"], zero["world_size"]) for zero in zeros]
        own, size = (self.comm.rank, self.comm.size), origins[0][1]
        if origins != [own] and sorted(origins) != [(rank, size) for rank in range(size)]:
            raise InputError(
                f"rank {own[0]} of {own[1]} must load the state dict that it saved itself on as "
                f"many ranks, or the sequence of all ranks' state dicts, each once, got that of "
                f"rank {', '.join(f'{rank} of {size}' for rank, size in origins)}; "
                "zerocast.checkpoint.save and load find the right elements by themselves."
            )


def _share_in(name: str, tensor: Any, shape: Sequence[int], boxes: Sequence[Any]) -> Share:
    """Return the part of a tensor in a state dict that consists of ``boxes``."""
    pieces = {Box(*map(tuple, box)): tensor for box in boxes}
    count = sum(math.prod(box.sizes) for box in pieces)
    problem: str | None = f"a {type(tensor).__name__}"
    if isinstance(tensor, torch.Tensor):
        problem = why_no_memory(tensor)
        if problem is None and tensor.numel() != count:
            problem = f"{tensor.numel()} elements"
    if problem is not None:
        raise InputError(
            f"{name} in a state dict must be a plain tensor of {count} elements, got {problem}; "
            "the state is damaged."
        )
    return Share(tuple(shape), pieces, tensor).holding(tensor)


def digest_of(zero: Mapping[str, Any]) -> str:
    """Return a digest of a state dict's ``zero`` entry, except digest, kinds and the marker."""
    left_out = "digest", "kinds", "every_rank"
    text = json.dumps({key: value for key, value in zero.items() if key not in left_out})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class SavedOptimizer(ShardedOptimizer):
    """A sharded optimizer that saves and loads its state."""

    def state_dict(self) -> StateDict:
        """Return this rank's share of the state: masters, inner state, averages, options.

        :func:`zerocast.checkpoint.save` saves the shares of all ranks together. ``torch.save``
        saves one rank's share, in one file for each rank.

        The tensors are the live ones and change with the next step, as in torch. Other ranks have
        other values under the same names. ``torch.distributed.checkpoint`` would treat them as
        copies, so saving a state dict with it raises.

        Raises:
            UnfinishedStepError: if a step was left unfinished.
            UnsupportedError: if torch.distributed.checkpoint calls this, because it would keep one
                rank's share only.
        """
        if sys._getframe(1).f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise UnsupportedError(
                "get_optimizer_state_dict expects whole tensors or DTensors, and every rank of a "
                "ZeroOptimizer holds different elements; call zerocast.checkpoint.save, or let "
                "every rank save what its optimizer.state_dict() returns in a separate file."
            )
        if (error := self._progress.unfinished_error("state_dict")) is not None:
            raise error
        if self._progress.writes.look():
            self._progress.writes.take()
        self._inner.exchange_options(self.param_groups)
        return ZeroTraining(self).state_dict()

    def load_state_dict(self, state_dict: StateDict | Sequence[StateDict]) -> None:
        """Load a saved state, to continue bit for bit, and cast the weights from it. Collective.

        It overwrites the weights. Averages (:meth:`ema`) are loaded from the state; an average that
        the state does not have restarts from the loaded masters.

        Args:
            state_dict: the result of :meth:`state_dict` on this rank, on the same number of ranks;
                or, on any number of ranks, the sequence of the results of all ranks.

        Raises:
            InputError: on every rank, if it does not fit on any; nothing has been changed.
            RankMismatchError: on every rank, if ranks give states of different steps or options.
        """
        training, attempt, lines = ZeroTraining(self), Attempt(), list[str]()
        state = TrainingState({}, [], {}, {})
        with attempt:
            training.check_load({}, "load_state_dict")
            state = training.read(state_dict)
            lines = [f"{name} {state.description[name]}" for name in ("steps", "mode", "averages")]
            lines += option_lines(state.groups)
        required = "every rank must load a state of the same step"
        check_same(self.comm, lines, required, attempt.error)
        training.restore(state)
