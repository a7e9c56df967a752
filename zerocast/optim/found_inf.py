"""FoundInf: makes torch's GradScaler skip a step on all ranks together.

``torch.amp.GradScaler`` checks this rank's gradients in ``optimizer.param_groups`` for infinities,
and skips this rank's step if it finds any. Since ``step`` reduces gradients, an overflow on one
rank only would leave the others waiting. So the optimizer lists one more parameter, without
elements, which is also its gradient. The scaler inspects it last and passes it ``found_inf``, which
it reduces over the ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.optim.gradients import GradientReducer


class FoundInf(torch.Tensor):
    """A parameter without elements, with which a GradScaler inspects the gradients of all ranks.

    Its dtype is FP64, which no weight of the optimizer has. The scaler inspects gradients by dtype,
    in order of first occurrence, so this last parameter is inspected last.
    """

    gradients: GradientReducer
    comm: Communicator

    @staticmethod
    def __new__(
        cls, gradients: GradientReducer, comm: Communicator, device: torch.device
    ) -> FoundInf:
        tensor = torch.Tensor._make_subclass(
            cls, torch.zeros(0, dtype=torch.float64, device=device)
        )
        tensor.gradients, tensor.comm = gradients, comm
        return tensor

    @property
    def grad(self) -> torch.Tensor:
        """The parameter itself, because a scaler skips parameters that have no gradient."""
        return self

    @grad.setter
    def grad(self, value: object) -> None:
        """Ignore assignments, such as those of ``zero_grad``."""

    def agree(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """Set ``found_inf``, FP32 [], to 1 on all ranks if any rank has an overflow.

        Gradients that the scaler cannot see are also checked, and multiplied by ``inv_scale``,
        FP32 [].
        """
        if self.gradients.kept:
            raise InputError(
                "a GradScaler must unscale gradients before they are clipped; call "
                "scaler.unscale_(optimizer) before optimizer.clip_grad_norm_, and "
                "optimizer.zero_grad() where no step followed it."
            )
        self.gradients.unscale_(inv_scale, found_inf)
        self.comm.all_reduce_max_(found_inf.view(torch.int32))  # bits of 0.0 and 1.0 keep the order

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch._amp_foreach_non_finite_check_and_unscale_:
                gradients, found_inf, inv_scale = args
                return gradients[0].agree(found_inf, inv_scale)
            if func is torch.linalg.vector_norm:  # torch has none of order inf
                return args[0].sum().as_subclass(torch.Tensor)
            if func is torch._foreach_norm:
                return [each.sum().as_subclass(torch.Tensor) for each in args[0]]
            return func(*args, **(kwargs or {}))
