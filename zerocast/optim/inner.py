"""The wrapped optimizer: an ordinary torch optimizer whose parameters are this rank's masters."""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.optim.param_groups import ParamGroups, options
from zerocast.optim.stepped_weights import Weight


class InnerOptimizer:
    """Steps a master for each weight of which this rank owns elements.

    Each weight has its own, so that a weight without a gradient is left out and keeps its state, as
    in torch.

    Args:
        optimizer_class: a torch optimizer.
        defaults: the options of the class.
        param_groups: the options of every group.
        weights: in order, each with its place in ``param_groups``.
        masters: the masters by the weight's place: FP32, in order.

    Attributes:
        masters: the masters by the weight's place.
        optimizer: the torch optimizer.
        mode: "train" or "eval", for an optimizer that has modes, whose masters differ in them.

    Raises:
        InputError: where ``optimizer_class`` refuses the groups.
    """

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        defaults: dict[str, Any],
        param_groups: ParamGroups,
        weights: Sequence[Weight],
        masters: dict[int, torch.Tensor],
    ) -> None:
        self.masters = masters
        # Other views of the same memory.
        self._places = {i: master.view(master.shape) for i, master in masters.items()}
        groups: list[dict[str, Any]] = [options(group) | {"params": []} for group in param_groups]
        for i, master in self.masters.items():
            groups[weights[i].group]["params"].append(master)
        try:
            self.optimizer = optimizer_class(groups, **defaults)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{optimizer_class.__name__} refused its param groups: {error}"
            ) from error
        self._set_mode("train")
        self._exchanged: list[dict[str, Any]] = [{} for _ in groups]

    def exchange_options(self, param_groups: ParamGroups) -> None:
        """Give ``param_groups`` and the optimizer's own groups the same options.

        The group that was written since the last time counts: schedulers write ``param_groups``, or
        the optimizer's own if they were made around it, as some optimizers do in their steps. Where
        both were written, ``param_groups`` count.
        """
        for ours, theirs, known in zip(
            param_groups, self.optimizer.param_groups, self._exchanged, strict=True
        ):
            for name, value in options(theirs).items():
                if value is not known.get(name) and ours.get(name) is known.get(name):
                    ours[name] = value
        self._give_options(param_groups)

    def _give_options(self, param_groups: ParamGroups) -> None:
        """Give the optimizer the options of ``param_groups``."""
        self._exchanged = [options(group) for group in param_groups]
        for ours, theirs in zip(self._exchanged, self.optimizer.param_groups, strict=True):
            theirs.update(ours)

    def step(self, param_groups: ParamGroups, gradients: Sequence[torch.Tensor | None]) -> None:
        """Step with the options of ``param_groups`` and this rank's gradient of every weight."""
        for i, master in self.masters.items():
            master.grad = gradients[i]
        self.exchange_options(param_groups)
        self.optimizer.step()
        self._follow_masters()
        self.exchange_options(param_groups)

    def switch(self, mode: str, param_groups: ParamGroups) -> None:
        """Call the optimizer's ``train()`` or ``eval()``, which changes masters."""
        self._set_mode(mode)
        self._follow_masters()
        self.exchange_options(param_groups)

    def _set_mode(self, mode: str) -> None:
        self.mode = mode
        if has_modes(self.optimizer):
            getattr(self.optimizer, mode)()

    def _follow_masters(self) -> None:
        """Bring masters back that the optimizer has bound to other memory (``p.data = ...``)."""
        for i, master in self.masters.items():
            place = self._places[i]
            if master.data_ptr() != place.data_ptr():
                place.copy_(master.detach())
                master.data = place

    def state(self, index: int) -> dict[str, Any]:
        """Return what the optimizer keeps of one weight; nothing before its first step."""
        return self.optimizer.state.get(self.masters[index], {})

    def load_state(
        self, states: dict[int, dict[str, Any]], mode: str, param_groups: ParamGroups
    ) -> None:
        """Let the optimizer continue from ``states``, by the weights' places, that were saved in
        ``mode``, with the options of ``param_groups``.
        """
        self.mode = mode
        # torch numbers parameters group by group, and so are the masters in order.
        numbered = {n: states[i] for n, i in enumerate(self.masters) if states[i]}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self._give_options(param_groups)  # the same objects, for a tensor is written in place


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a ``train()`` and an ``eval()``, as schedule-free ones do."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
