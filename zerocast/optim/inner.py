"""The wrapped optimizer: an ordinary torch optimizer whose parameters are this rank's masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.optim.shards import ShardedWeights

_NOT_OPTIONS = ("params", "param_names")
"""Entries of a param group that are not options of an optimizer."""


class InnerOptimizer:
    """Steps one master for each weight that this rank owns a part of.

    One for each weight, and not one for all, so that a weight without a gradient is left out and
    keeps its state, as in torch.

    Args:
        optimizer_class: an element-wise torch optimizer.
        defaults: its options.
        param_groups: the options of every group; the weights' places in them are in ``shards``.
        shards: the weights and this rank's masters.

    Attributes:
        masters: by the weight's place in ``shards``: FP32, flat, never empty, in order.
        optimizer: the torch optimizer.
        mode: "train" or "eval": of an optimizer whose masters are others when it is not stepped.

    Raises:
        InputError: where ``optimizer_class`` refuses the groups.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        param_groups: Sequence[dict[str, Any]],
        shards: ShardedWeights,
    ) -> None:
        self.masters = {i: shards.master(i) for i, s in enumerate(shards.own) if s.extent}
        self._places = {i: shards.master(i) for i in self.masters}  # which nobody binds elsewhere
        groups: list[dict[str, Any]] = [options(group) | {"params": []} for group in param_groups]
        for i, master in self.masters.items():
            groups[shards.weights[i].group]["params"].append(master)
        try:
            self.optimizer = optimizer_class(groups, **defaults)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{optimizer_class.__name__} refused its param groups: {error}"
            ) from error
        self.mode = "train"
        self._set_mode()
        self._exchanged: list[dict[str, Any]] = [{} for _ in groups]

    def exchange_options(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Let ``param_groups`` and the optimizer's own groups have the same options.

        Who wrote one since the last time is heard: schedulers write ``param_groups``, or the
        optimizer's own if they were made around it, as some optimizers do in their steps. Where
        both were written, ``param_groups`` count.
        """
        for ours, theirs, known in zip(
            param_groups, self.optimizer.param_groups, self._exchanged, strict=True
        ):
            for name, value in options(theirs).items():
                if value is not known.get(name) and ours.get(name) is known.get(name):
                    ours[name] = value
        self._give_options(param_groups)

    def _give_options(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Let the optimizer have the options of ``param_groups``."""
        self._exchanged = [options(group) for group in param_groups]
        for ours, theirs in zip(self._exchanged, self.optimizer.param_groups, strict=True):
            theirs.update(ours)

    def step(
        self, param_groups: Sequence[dict[str, Any]], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Step with the options of ``param_groups`` and this rank's gradient of every weight."""
        for i, master in self.masters.items():
            master.grad = gradients[i]
        self.exchange_options(param_groups)
        self.optimizer.step()
        self._follow_masters()
        self.exchange_options(param_groups)

    def switch(self, mode: str, param_groups: Sequence[dict[str, Any]]) -> None:
        """Call the optimizer's ``train()`` or ``eval()``, which changes masters."""
        self.mode = mode
        self._set_mode()
        self._follow_masters()
        self.exchange_options(param_groups)

    @property
    def has_modes(self) -> bool:
        """Whether the optimizer has a ``train()`` and an ``eval()``, as schedule-free ones do."""
        return all(callable(getattr(self.optimizer, mode, None)) for mode in ("train", "eval"))

    def _set_mode(self) -> None:
        if self.has_modes:
            getattr(self.optimizer, self.mode)()

    def _follow_masters(self) -> None:
        """Bring masters back that the optimizer has bound to other memory (``p.data = ...``)."""
        for i, master in self.masters.items():
            place = self._places[i]
            if master.data_ptr() != place.data_ptr():
                place.copy_(master.detach())
                master.data = place

    def state(self, index: int) -> dict[str, Any]:
        """What the optimizer keeps of one weight; nothing before its first step."""
        return self.optimizer.state.get(self.masters[index], {})

    def load_state(
        self,
        states: dict[int, dict[str, Any]],
        mode: str,
        param_groups: Sequence[dict[str, Any]],
    ) -> None:
        """Let the optimizer continue from ``states``, by the weight's place, that were saved in
        ``mode``, with the options of ``param_groups``.
        """
        self.mode = mode
        # torch numbers parameters group by group, and so are the masters in order.
        numbered = {n: states[i] for n, i in enumerate(self.masters) if states[i]}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self._give_options(param_groups)  # the same objects, for a tensor is written in place


def options(group: dict[str, Any]) -> dict[str, Any]:
    """The options in a param group."""
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
