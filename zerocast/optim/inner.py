"""The wrapped optimizer: an ordinary torch optimizer whose parameters are this rank's masters."""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.errors import InputError
from zerocast.optim.param_groups import ParamGroups, options
from zerocast.optim.stepped_weights import Weight


class InnerOptimizer:
    """A torch optimizer of this rank's masters.

    Each weight has a separate master, so that a weight without a gradient is left out and keeps its
    state, as in torch.

    Args:
        optimizer_class: the class of the torch optimizer.
        defaults: the options of the class.
        param_groups: the options of every group.
        weights: the weights in order, each with its index in ``param_groups``.
        masters: the FP32 masters by weight index, in order.

    Attributes:
        masters: the masters by weight index.
        optimizer: the torch optimizer.
        mode: "train" or "eval"; an optimizer with modes has different masters in them.

    Raises:
        InputError: if ``optimizer_class`` refuses the groups.
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
        """Synchronize the options of ``param_groups`` and of the optimizer's groups.

        The side that was written since the last call takes precedence. Schedulers write
        ``param_groups``, or the optimizer's groups if they wrap the inner optimizer. Some
        optimizers write their groups in a step. If both sides were written, ``param_groups`` take
        precedence.
        """
        for ours, theirs, known in zip(
            param_groups, self.optimizer.param_groups, self._exchanged, strict=True
        ):
            for name, value in options(theirs).items():
                if value is not known.get(name) and ours.get(name) is known.get(name):
                    ours[name] = value
        self._give_options(param_groups)

    def _give_options(self, param_groups: ParamGroups) -> None:
        """Copy the options of ``param_groups`` to the optimizer."""
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
        """Copy masters that the optimizer has moved (``p.data = ...``) back to their memory."""
        for i, master in self.masters.items():
            place = self._places[i]
            if master.data_ptr() != place.data_ptr():
                place.copy_(master.detach())
                master.data = place

    def state(self, index: int) -> dict[str, Any]:
        """Return the optimizer's state of one weight; empty before its first step."""
        return self.optimizer.state.get(self.masters[index], {})

    def load_state(
        self, states: dict[int, dict[str, Any]], mode: str, param_groups: ParamGroups
    ) -> None:
        """Load ``states``, by weight index, that were saved in ``mode``, with the options of
        ``param_groups``.
        """
        self.mode = mode
        # torch numbers parameters group by group, which is the order of the masters.
        numbered = {n: states[i] for n, i in enumerate(self.masters) if states[i]}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": numbered, "param_groups": groups})
        self._give_options(param_groups)  # the same objects, since tensors are written in place


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has ``train()`` and ``eval()``, as schedule-free ones do."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
