"""TakenGradient: the placeholder in ``.grad`` for a gradient that an optimizer took in backward.

Code that divides, clips, reads or reduces gradients after a backward pass skips those that are
None. With None in ``.grad`` it would silently do nothing.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from zerocast.errors import InputError


def _refuse(*args: object, **kwargs: object) -> NoReturn:
    raise InputError(
        "this gradient was taken during backward by a ZeroOptimizer with overlap_grad_reduce=True, "
        "and cannot be used any more. Clip with optimizer.clip_grad_norm_, drop gradients with "
        "optimizer.zero_grad(), scale the loss, and read or change gradients in hooks of their "
        "weights. Or leave out overlap_grad_reduce, or torch's DDP, which reduces gradients itself."
    )


class TakenGradient(torch.Tensor):
    """A tensor without memory. It has a shape, a dtype and a device; other uses raise
    :class:`InputError`.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    @functools.cache  # weights share it, so that none is made in a step
    def like(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> TakenGradient:
        """Return the placeholder of this shape, dtype and device."""
        taken = torch.Tensor._make_wrapper_subclass(
            TakenGradient, shape, dtype=dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(taken)
        return taken

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            _refuse()
        # A GradScaler unscales the sums by the optimizer's last parameter: see FoundInf.
        if others := [each for each in args[0] if not isinstance(each, TakenGradient)]:
            func(others, *args[1:])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TakenGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None, because a model's gradients stay with its optimizer."""

    data = property(_refuse, _refuse)
    numpy = tolist = data_ptr = _refuse
