"""The wrapped optimizer: an ordinary torch optimizer whose parameters are this rank's masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        groups: list[dict[str, Any]] = [options(group) | {"params": []} for group in param_groups]
        for i, master in self.masters.items():
            groups[shards.weights[i].group]["params"].append(master)
        try:
            self.optimizer = optimizer_class(groups, **defaults)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{optimizer_class.__name__} refused its param groups: {error}"
            ) from error

    def step(
        self, param_groups: Sequence[dict[str, Any]], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Step with the options of ``param_groups`` and this rank's gradient of every weight."""
        for i, master in self.masters.items():
            master.grad = gradients[i]
        # Both ways: schedulers write the wrapper's options, some optimizers write their own.
        copy_options(param_groups, self.optimizer.param_groups)
        self.optimizer.step()
        copy_options(self.optimizer.param_groups, param_groups)

    def state(self, index: int) -> dict[str, Any]:
        """What the optimizer keeps of one weight; nothing before its first step."""
        return self.optimizer.state.get(self.masters[index], {})

    def load_state(self, states: dict[int, dict[str, Any]]) -> None:
        """Let the optimizer continue from ``states``, by the weight's place."""
        # torch numbers parameters group by group, and so are the masters in order.
        numbered = {n: states[i] for n, i in enumerate(self.masters) if states[i]}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})


def options(group: dict[str, Any]) -> dict[str, Any]:
    """The options in a param group."""
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


def copy_options(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Give the groups of ``target`` the options of those of ``source``."""
    for ours, theirs in zip(source, target, strict=True):
        theirs.update(options(ours))
