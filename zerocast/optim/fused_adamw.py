"""FusedAdamW: AdamW in one pass over memory, which also measures the masters for the next cast.

The arithmetic is bitwise that of ``torch.optim.AdamW(fused=True)`` on a CPU, except that torch
rounds the last elements of a tensor differently. Here an element has the same bits wherever a
tensor is split, on every device ("AdamW" in the numerics' documentation). torch's other
implementations use a different square root on a CPU.

Note: one pass for the update and the cast
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
As ``optimizer_class`` of :class:`zerocast.optim.ZeroOptimizer`, it computes the amaxes of a
master's blocks in the update pass. It also writes the codes of blocks whose scales do not depend on
other ranks. The cast that follows reads the rest
(:class:`zerocast.cast.prepared_cast.PreparedCast`). For masters that FSDP2 gathers, the update
computes amaxes if no code can be written before ranks have reduced them
(:mod:`zerocast.sharded.updates`). The bytes are the same. On CUDA, update and measurement are two
passes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim.optimizer import _global_optimizer_post_hooks

from zerocast.backends import backend_for
from zerocast.cast import CastPlan
from zerocast.errors import InputError, UnsupportedError
from zerocast.numerics import AdamWNumbers, AdamWUpdate
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import is_sharded, to_local
from zerocast.sharded.updates import update_masters
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.untraced import untraced

_FULFILLED: dict[str, tuple[object, ...]] = {
    "foreach": (None, False), "capturable": (False,), "differentiable": (False,),
    "fused": (None, True),
}  # fmt: skip
"""The accepted values of torch's other options, which match this implementation."""

_AS_TORCH = {
    "foreach": None, "capturable": False, "differentiable": False, "fused": True,
    "decoupled_weight_decay": True,
}  # fmt: skip
"""The options stored in groups, so that torch's AdamW continues from a state with the same
arithmetic."""


class FusedAdamW(torch.optim.Optimizer):
    """``torch.optim.AdamW`` of FP32 parameters, on CPU and CUDA.

    Parameters may be DTensors, and masters under FSDP2. State has torch's names, shapes and dtypes
    (``step``, ``exp_avg``, ``exp_avg_sq``, ``max_exp_avg_sq``), so this class and
    ``torch.optim.AdamW`` can load each other's state dicts.

    Args:
        params: parameters, named ones, or param groups, as in torch.
        lr: the learning rate: a number, or a tensor of one element, which is read at every step.
        betas: the decay rates of the averages of the gradient and of its square.
        eps: the term added to the denominator.
        weight_decay: the decoupled weight decay; each step subtracts ``lr * weight_decay`` times
            the weight.
        amsgrad: whether to divide by the largest average so far.
        maximize: whether to maximize the objective.
        **others: torch's ``foreach``, ``fused``, ``capturable`` and ``differentiable``, only with
            values that match this implementation: ``fused=True``, and False for the others. None
            is accepted for ``foreach`` and ``fused``.

    Attributes:
        plan: the plan that casts the updated masters, or None.

    Raises:
        InputError: if an option is out of range or unknown, or a weight has been gathered by FSDP2.
        UnsupportedError: if an option of torch is not supported.
    """

    plan: CastPlan | None = None

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        **others: object,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize,
        }  # fmt: skip
        _check_others(others)
        super().__init__(params, defaults | _AS_TORCH)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does.

        Raises:
            InputError, UnsupportedError: as the constructor, for the options of the group.
            InputError: if a weight has been gathered by FSDP2.
        """
        _check_others({name: param_group[name] for name in _FULFILLED if name in param_group})
        _check_options({**self.defaults, **param_group})
        param_group.update(_AS_TORCH)
        super().add_param_group(param_group)
        for param in param_group["params"]:
            if isinstance(param, QuantizedTensor) and param.quantized_storage.gathered_from:
                raise InputError(
                    f"FusedAdamW must step masters, got {param.quantized_storage.gathered_from} as "
                    f"FSDP2 has gathered it for a forward; call model.reshard() before the "
                    f"optimizer is made."
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.update(_AS_TORCH)
            group.setdefault("amsgrad", False)
            group.setdefault("maximize", False)
            _check_options(group)
        for kept in self.state.values():
            if "step" in kept:
                kept["step"] = torch.as_tensor(kept["step"], dtype=torch.float32, device="cpu")

    @untraced  # it reads addresses
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have a gradient. Call ``closure``, which recomputes the loss,
        first and return its result.

        Raises:
            UnsupportedError: if a parameter or gradient is not dense FP32. Nothing has been
                written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        stepped = [(p, group, _memory(p, p)) for p, group in pairs if p.grad is not None]
        gradients = [_memory(_placed_like(p, p.grad), p) for p, _, _ in stepped]
        written: list[torch.Tensor] = []
        updates: list[AdamWUpdate] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for (param, group, master), gradient in zip(stepped, gradients, strict=True):
            state = self._state(param, group)
            state["step"] += 1
            own = [master, *(_memory(state[name], param) for name in _averages(group))]
            written += [param, *own]
            flat = [each.contiguous() for each in own]
            copies += [pair for pair in zip(own, flat, strict=True) if pair[0] is not pair[1]]
            numbers = _numbers(float(state["step"]), group)
            updates.append(_update(gradient.contiguous(), flat, numbers))
        # Count the writes in torch before a plan checks whether masters were written.
        increment_version([each for each in written if not each.is_inference()])
        self._run([param for param, _, _ in stepped], updates)
        for memory, copy in copies:
            memory.copy_(copy)
        return loss

    def _run(self, params: Sequence[torch.Tensor], updates: Sequence[AdamWUpdate]) -> None:
        """Run the updates of a plan's masters with its measurement, and the others without."""
        # A hook may write masters in ways that are not counted.
        hooks = self._optimizer_step_post_hooks, _global_optimizer_post_hooks
        if not any(hooks):
            updates = update_masters(params, updates)
        updates = [update for update in updates if update.master.numel()]
        if self.plan is not None and not any(hooks):
            updates = self.plan.update_masters(updates)
        for device in dict.fromkeys(update.master.device for update in updates):
            backend_for(device).adamw([each for each in updates if each.master.device == device])()

    def _state(self, param: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Return the state of a parameter, and create what is missing."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        for name in _averages(group):
            if name not in state:
                state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _averages(group: dict[str, Any]) -> list[str]:
    """Return the names of the state tensors of the parameters of a group."""
    return ["exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * bool(group["amsgrad"])]


def _numbers(steps: float, group: dict[str, Any]) -> AdamWNumbers:
    beta1, beta2 = group["betas"]
    return AdamWNumbers.of(
        steps,
        lr=float(group["lr"]),
        betas=(float(beta1), float(beta2)),
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        maximize=group["maximize"],
    )


def _update(
    gradient: torch.Tensor, own: Sequence[torch.Tensor], numbers: AdamWNumbers
) -> AdamWUpdate:
    master, average, square, *largest = (each.view(-1) for each in own)
    largest_square = largest[0] if largest else None
    return AdamWUpdate(master, gradient.view(-1), average, square, largest_square, numbers)


def _memory(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return the local part of a parameter, its gradient or its state, as a plain tensor."""
    local = to_local(tensor)
    if isinstance(local, MasterWeight):
        local = local.value
    local = local.detach()
    if type(local) is not torch.Tensor or local.dtype != torch.float32 or local.is_sparse:
        kind = f"{type(local).__name__} of {local.dtype}, {local.layout}"
        raise UnsupportedError(
            f"FusedAdamW updates dense FP32 parameters by FP32 gradients, got a {kind} for a "
            f"parameter of shape {tuple(param.shape)}; give ZeroOptimizer weights that are "
            "quantized or of 16 bits, or use torch.optim.AdamW."
        )
    return local


def _placed_like(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the placements of its parameter."""
    if not (is_sharded(param) and is_sharded(gradient)) or gradient.placements == param.placements:
        return gradient
    return gradient.redistribute(param.device_mesh, param.placements)


def _check_others(given: dict[str, object]) -> None:
    """Raise if one of torch's other options is unknown or has an unsupported value."""
    for name, value in given.items():
        if name not in _FULFILLED:
            raise InputError(f"FusedAdamW has no option {name!r}; leave it out.")
        if value not in _FULFILLED[name]:
            raise UnsupportedError(
                f"FusedAdamW has no {name}={value!r}; leave it out, or use torch.optim.AdamW."
            )


def _check_options(group: dict[str, Any]) -> None:
    """Raise :class:`InputError` if an option of a group is out of range."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise InputError(f"lr must be a number or a tensor of one element, got {lr}.")
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0.0:
            raise InputError(f"{name} must be 0 or more, got {group[name]}.")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise InputError(f"betas must be two numbers from 0 up to, not including, 1, got {betas}.")
