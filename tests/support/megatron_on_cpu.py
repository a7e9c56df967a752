"""What Megatron-Core asks of CUDA, for CPU ranks over gloo, from outside."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Megatron-Core names CUDA where it means the device of the weights: here that is the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.", 1) if asks_type else result


def set_states(self: DistributedOptimizer, param: object, tensors: dict[str, object]) -> None:
    """torch's AdamW counts steps with each parameter, of which checkpoints know nothing, and
    Megatron-Core has given all of them one tensor to count in.
    """
    group, order = self.model_param_group_index_map[param]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
    state["step"] = state["step"].clone()
    with_step = {**tensors, "step": state["step"]}
    SET_STATES(self, param, with_step)


SET_STATES = DistributedOptimizer._set_main_param_and_optimizer_states


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core run without a device."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with (
        mock.patch("torch.cuda.current_device", return_value="cpu"),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
        mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states),
        OnCpu(),
    ):
        yield
