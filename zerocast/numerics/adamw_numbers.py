"""AdamWUpdate: one step of AdamW on one tensor, as backends take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AdamWNumbers:
    """The numbers of a step of AdamW, in the order of ``AdamWUpdate`` in ``tables.h``. Each is
    rounded to FP32 before it is used.

    Attributes:
        decay: ``1 - lr * weight_decay``, what an element is multiplied by first.
        sign: the factor of the gradient, 1 or -1.
        average_weight, from_gradient: the average of the gradient moves by ``1 - beta1`` of its
            distance from the gradient; or, where that is not below one half, stays ``beta1`` of
            the distance from the gradient.
        square_decay, square_weight: ``beta2`` and ``1 - beta2``.
        correction: ``sqrt(1 - beta2 ** steps)``.
        eps: added to the denominator.
        step: ``-lr / (1 - beta1 ** steps)``.
    """

    decay: float
    sign: float
    average_weight: float
    from_gradient: bool
    square_decay: float
    square_weight: float
    correction: float
    eps: float
    step: float

    @classmethod
    def of(
        cls,
        steps: float,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
    ) -> AdamWNumbers:
        """Return the numbers of step ``steps``, from 1 on, in FP64 as torch computes them."""
        beta1, beta2 = betas
        weight = float(torch.tensor(1 - beta1, dtype=torch.float32, device="cpu"))
        from_gradient = weight >= 0.5
        return cls(
            decay=1 - lr * weight_decay,
            sign=-1.0 if maximize else 1.0,
            average_weight=weight - 1 if from_gradient else weight,
            from_gradient=from_gradient,
            square_decay=beta2,
            square_weight=1 - beta2,
            correction=(1 - beta2**steps) ** 0.5,
            eps=eps,
            step=-(lr / (1 - beta1**steps)),
        )


@dataclass(frozen=True, slots=True)
class AdamWUpdate:
    """One step of AdamW on one tensor. All tensors are FP32 [n], contiguous, on one device.

    Attributes:
        master: the master, which is updated in place.
        gradient: read.
        exp_avg, exp_avg_sq: the averages of the gradient and of its square, in place.
        max_exp_avg_sq: the largest that ``exp_avg_sq`` has been, in place; None without amsgrad.
        numbers: the numbers of the step.
    """

    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    max_exp_avg_sq: torch.Tensor | None
    numbers: AdamWNumbers

    def of(self, start: int, end: int) -> AdamWUpdate:
        """Return the update of elements ``start`` to ``end`` alone; tensors are flat."""
        cut = slice(start, end)
        largest = self.max_exp_avg_sq
        return AdamWUpdate(
            self.master[cut],
            self.gradient[cut],
            self.exp_avg[cut],
            self.exp_avg_sq[cut],
            None if largest is None else largest[cut],
            self.numbers,
        )
