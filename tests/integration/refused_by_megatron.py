"""Asks Megatron-Core, on one rank, for ways of training that weights of zerocast have no part in.

Prints what each is refused with, or that it is served.
"""

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig

import zerocast
import zerocast.adapters.megatron
from tests.support.megatron_on_cpu import on_cpu, with_fused_adam

BF16 = {"bf16": True, "params_dtype": torch.bfloat16}


def model(recipe: str | None = "block", more: str | None = None) -> torch.nn.Module:
    """One linear layer of Megatron-Core in codes, or two."""
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True,
        gradient_accumulation_fusion=False, **BF16,
    )  # fmt: skip
    layers = []
    for name in (recipe, more):
        layer = ColumnParallelLinear(
            32, 48, config=config, init_method=torch.nn.init.normal_, bias=False
        ).bfloat16()
        layer.config = config
        layers.append(torch.nn.Sequential(layer))
        if name is not None:
            zerocast.adapters.megatron.quantize_linears(layers[-1], name)
    return torch.nn.Sequential(*(layers[0] if more is None else (*layers[0], *layers[1])))


def wrapped(holder: torch.nn.Module, **flags: bool) -> DistributedDataParallel:
    """The model under Megatron-Core's data parallelism, by the flags that this release has."""
    has = {
        name: flag for name, flag in flags.items() if hasattr(DistributedDataParallelConfig, name)
    }
    config = DistributedDataParallelConfig(**has)
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


def ungathered() -> None:
    """Without the flag by which Megatron-Core casts masters of 8-bit weights."""
    wrapped(model(), use_distributed_optimizer=True)


def ungathered_4_bits() -> None:
    """Without that of 4-bit weights."""
    wrapped(model("nvfp4"), use_distributed_optimizer=True, fp8_param_gather=True)


def four_bits() -> None:
    """Two codes a byte."""
    wrapped(model("nvfp4"), use_distributed_optimizer=True, fp4_param_gather=True)


def two_sizes() -> None:
    """Codes of 4 and of 8 bits."""
    flags = {"fp4_param_gather": True, "fp8_param_gather": True}
    wrapped(model("nvfp4", "block"), use_distributed_optimizer=True, **flags)


def plain_values_in_buffers() -> None:
    """Without weights of zerocast the same configuration is no matter of zerocast."""
    wrapped(
        model(None), use_distributed_optimizer=True, fp8_param_gather=True,
        reuse_grad_buf_for_mxfp8_param_ag=True,
    )  # fmt: skip


def values_in_the_optimizer() -> None:
    """Where the optimizer's configuration alone says so."""
    optimize(model(), reuse_grad_buf_for_mxfp8_param_ag=True, fp8_recipe="mxfp8")


def frozen() -> None:
    """All weights, so that there is no inner optimizer."""
    optimize(model().requires_grad_(False))


def optimize(holder: torch.nn.Module, **options: object) -> None:
    """Wrap the model, and make its optimizer."""
    ddp = wrapped(holder, use_distributed_optimizer=True, fp8_param_gather=True)
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=True, **BF16, **options
    )
    get_megatron_optimizer(config, [ddp])


FSDP = "megatron.core.distributed.fsdp.src.megatron_fsdp", "megatron_fsdp"


def megatron_fsdp(package: str = FSDP[0]) -> None:
    """Megatron-FSDP, of Megatron-Core."""
    import_module(f"{package}.megatron_fsdp").MegatronFSDP(model(), None)


def megatron_fsdp_2(package: str = FSDP[0]) -> None:
    """Its second version."""
    fully_shard = import_module(f"{package}.experimental").fully_shard
    mesh = dist.init_device_mesh("cpu", (1,))
    fully_shard(model(), mesh, None)


def fsdp_package() -> None:
    """Megatron-FSDP, of the package megatron-fsdp."""
    megatron_fsdp(FSDP[1])


def fsdp_package_2() -> None:
    """Its second version."""
    megatron_fsdp_2(FSDP[1])


def report(way: Callable[[], None]) -> None:
    """Print the error of one of them."""
    try:
        way()
        print(f"{way.__name__}: served", flush=True)
    except (zerocast.ZerocastError, ModuleNotFoundError) as error:
        print(f"{way.__name__}: {type(error).__name__}: {error}", flush=True)


WAYS = (
    two_planes, masters_in_bf16, values_in_buffers, plain_values_in_buffers,
    values_in_the_optimizer, frozen, layer_wise, undistributed, ungathered, ungathered_4_bits,
    four_bits, two_sizes, megatron_fsdp, megatron_fsdp_2, fsdp_package, fsdp_package_2,
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
