"""What Megatron-Core asks of CUDA, for CPU ranks over gloo, from outside."""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from packaging.version import Version
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Megatron-Core names CUDA where it means the device of the weights: here that is the CPU. To
    its optimizer with masters on the CPU, what it has copied there is.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.endswith("hybrid_optimizer"):
            if func == torch.Tensor.is_cuda.__get__:
                return not hasattr(args[0], "is_offloaded")
            if func is torch.Tensor.pin_memory:
                args[0].is_offloaded = True
                return args[0]
            if func is torch.Tensor.cpu:
                return args[0].clone()
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


class FusedAdam(torch.optim.AdamW):
    """What a precision-aware optimizer asks of TransformerEngine's: rounded moments."""

    def __init__(
        self, params, *, exp_avg_dtype, exp_avg_sq_dtype, adam_w_mode, master_weights=False,
        master_weight_dtype=None, use_decoupled_grad=False, **options,
    ):  # fmt: skip
        self.moments = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}
        super().__init__(params, **options)

    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            for name, dtype in self.moments.items():
                state[name].copy_(state[name].to(dtype))


@contextlib.contextmanager
def with_fused_adam() -> Iterator[None]:
    """Let configurations and optimizers that are made within find TransformerEngine's."""
    name = "transformer_engine.pytorch.optimizers"
    with (
        mock.patch.dict(sys.modules, {name: SimpleNamespace(FusedAdam=FusedAdam)}),
        mock.patch("megatron.core.utils.get_te_version", return_value=Version("2.0")),
        mock.patch("megatron.core.optimizer.Adam", FusedAdam),
        mock.patch("megatron.core.optimizer.USING_PYTORCH_OPTIMIZER", False),
    ):
        yield


SET_STATES = DistributedOptimizer._set_main_param_and_optimizer_states


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-Core run without a device."""
    event = SimpleNamespace(synchronize=lambda: None, wait=lambda stream: None)
    stream = SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: event)
    with (
        mock.patch("torch.cuda.current_device", return_value="cpu"),
        mock.patch("torch.cuda.set_device"),
        mock.patch("torch.cuda.synchronize"),
        mock.patch("torch.cuda.current_stream", return_value=stream),
        mock.patch("torch.cuda.Stream", return_value=stream),
        mock.patch("torch.cuda.stream", return_value=contextlib.nullcontext()),
        mock.patch("megatron.core.tensor_parallel.model_parallel_cuda_manual_seed"),
        mock.patch.object(CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
        mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states),
        OnCpu(),
    ):
        yield
