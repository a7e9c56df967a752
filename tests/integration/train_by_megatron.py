"""Trains a small GPT of Megatron-Core, unmodified, by its distributed optimizer on gloo's ranks.

    train_by_megatron.py RECIPE [--tp N] [--hidden N] [--steps N] [--overlap]

After every step each byte of each weight, on every rank, must be that of quantizing the masters as
the ranks hold them together. RECIPE is a name of zerocast's, ``mxfp8-2d``, or ``bf16`` for none.
"""

import argparse
import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig
from torch.overrides import TorchFunctionMode

import zerocast
import zerocast.megatron

VOCABULARY, SEQUENCE = 128, 32


class OnCpu(TorchFunctionMode):
    """Megatron-Core names CUDA where it means the device of the weights: here that is the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        asks_type = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return result.replace("torch.", "torch.cuda.", 1) if asks_type else result


def pretend_accelerator() -> None:
    """What else Megatron-Core asks of CUDA, and CPUs can do without."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.current_stream = lambda *_: SimpleNamespace(wait_stream=lambda other: None)
    CudaRNGStatesTracker.fork = lambda self, *_: contextlib.nullcontext()


def wrong_bytes(optimizer) -> tuple[int, int]:
    """How many weights were looked at, and how many of their bytes are not those of the cast."""
    weights = wrong = 0
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        packs = hasattr(each, "_get_nvfp4_params_and_shard_fp32_from_nvfp4")
        lists = each._get_fp8_params_and_shard_fp32_from_fp8()
        if packs and each.ddp_config.fp4_param_gather:
            lists = each._get_nvfp4_params_and_shard_fp32_from_nvfp4()
        for weight, master, start in zip(*lists, strict=True):
            whole = torch.zeros(weight.numel())
            if master is not None:
                whole[start : start + master.numel()] = master
            dist.all_reduce(whole, group=each.data_parallel_group)
            whole = whole.view(weight.shape).to(weight.dtype)
            expected = zerocast.quantize(whole, weight.recipe).quantized_storage.buffers
            for name, held in weight.quantized_storage.buffers.items():
                wrong += int((held.view(torch.uint8) != expected[name].view(torch.uint8)).sum())
            weights += 1
    return weights, wrong


def main() -> None:
    """Train on one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tp)
    torch.manual_seed(0)
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    config = TransformerConfig(
        num_layers=2, hidden_size=args.hidden, num_attention_heads=4, use_cpu_initialization=True,
        tensor_model_parallel_size=args.tp, gradient_accumulation_fusion=False, hidden_dropout=0,
        attention_dropout=0, **bf16,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).bfloat16()
    flags = {"use_distributed_optimizer": True}
    if args.overlap:
        flags |= {"overlap_grad_reduce": True, "overlap_param_gather": True}
    if args.recipe != "bf16":
        two_d = zerocast.MXFP8BlockScaling(enable_2d_quantization=True)
        recipe = two_d if args.recipe == "mxfp8-2d" else args.recipe
        zerocast.megatron.install()
        print(zerocast.megatron.quantize_linears(model, recipe, skip=["output_layer"]))
        flags[f"fp{4 if args.recipe == 'nvfp4' else 8}_param_gather"] = True
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**flags), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-3, use_distributed_optimizer=True,
            overlap_param_gather=args.overlap, **bf16,
        ),
        [ddp],
    )  # fmt: skip
    random = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    places = torch.arange(SEQUENCE).expand(2, SEQUENCE)
    for step in range(args.steps):
        batch = torch.randint(VOCABULARY, (2, SEQUENCE), generator=random)
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = ddp(batch, places, None, labels=batch).float().mean()
        loss.backward()
        ddp.finish_grad_sync()
        optimizer.step()
        if args.overlap:  # what the next forward would wait for
            ddp.start_param_sync(force_sync=True)
        counts = torch.tensor(wrong_bytes(optimizer) if args.recipe != "bf16" else (0, 0))
        total = counts[1:].clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}, {counts[0]} weights, {total[0]} bytes")
    assert total == 0, "bytes differ from the cast of the gathered masters"
    dist.destroy_process_group()


pretend_accelerator()
with OnCpu():
    main()
