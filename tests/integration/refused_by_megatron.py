"""Asks Megatron-Core, on one rank, for ways of training that weights of zerocast have no part in.

Prints what each is refused with.
"""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

import zerocast
import zerocast.adapters.megatron
from tests.support.megatron_on_cpu import on_cpu, with_fused_adam

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def model(recipe: str = "block") -> torch.nn.Module:
    """One linear layer of Megatron-Core in codes."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, **BF16,
    )  # fmt: skip
    layer = ColumnParallelLinear(
        32, 48, config=config, init_method=torch.nn.init.normal_, bias=False
    ).bfloat16()
    layer.config = config
    holder = torch.nn.Sequential(layer)
    zerocast.adapters.megatron.quantize_linears(holder, recipe)
    return holder


def wrapped(holder: torch.nn.Module, **flags: bool) -> DistributedDataParallel:
    """The model under Megatron-Core's data parallelism."""
    config = DistributedDataParallelConfig(**flags)
    return DistributedDataParallel(holder[0].config, config, holder)


def two_planes() -> None:
    """A weight whose columnwise codes are quantized for themselves."""
    holder = model()
    weight = zerocast.quantize(torch.randn(48, 32).bfloat16(), "mxfp8")
    holder[0].weight = torch.nn.Parameter(weight)
    wrapped(holder, use_distributed_optimizer=True, fp8_param_gather=True)


def masters_in_bf16() -> None:
    """Those of a precision-aware optimizer, which keeps them to itself."""
    ddp = wrapped(model(), use_distributed_optimizer=True, fp8_param_gather=True)
    with with_fused_adam():
        config = OptimizerConfig(
            optimizer="adam", lr=1e-3, use_distributed_optimizer=True, fp8_recipe="blockwise",
            use_precision_aware_optimizer=True, main_params_dtype=torch.bfloat16, **BF16,
        )  # fmt: skip
        get_megatron_optimizer(config, [ddp])


def values_in_buffers() -> None:
    """MXFP8 gathered as BF16, as Megatron-Core recommends for weights of TransformerEngine."""
    wrapped(
        model("mxfp8"), use_distributed_optimizer=True, fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=True,
    )  # fmt: skip


def layer_wise() -> None:
    """Whole matrices as masters."""
    optimizer = torch.optim.SGD(model().parameters())
    LayerWiseDistributedOptimizer([optimizer], OptimizerConfig(**BF16), SimpleNamespace())


def undistributed() -> None:
    """What layer-wise optimizers ask of data parallelism."""
    wrapped(model(), use_distributed_optimizer=False)


def megatron_fsdp() -> None:
    """Megatron-FSDP."""
    MegatronFSDP(model(), None)


def report(way: Callable[[], None]) -> None:
    """Print the error of one of them."""
    try:
        way()
    except zerocast.ZerocastError as error:
        print(f"{way.__name__}: {type(error).__name__}: {error}", flush=True)


WAYS = (
    two_planes, masters_in_bf16, values_in_buffers, layer_wise, undistributed, megatron_fsdp
)  # fmt: skip


def main() -> None:
    """Ask for each."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    zerocast.adapters.megatron.install()
    for way in WAYS:
        report(way)
    zerocast.adapters.megatron.uninstall()
    dist.destroy_process_group()


if __name__ == "__main__":
    with on_cpu():
        main()
