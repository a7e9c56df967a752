"""Trains a small model by DeepSpeed, unmodified, on gloo's ranks, once for each case.

    train_by_deepspeed.py CASE... [--steps N]

A case is RECIPE:STAGE, and any of :fp16, :fp32, :accumulate, :clip, :scattered, :round-robin,
:overlap, :aligned, :groups, :frozen, :bf16-masters, :autocast and :fp32-gradients. RECIPE is a name
of zerocast's, ``mxfp8-2d``, or ``bf16`` for weights without codes. Masters must start from the
first rank's values. After every step each byte of each weight, on every rank, must be that of an
unsharded cast of the masters as the ranks hold them together.
"""

import argparse

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import zerocast
import zerocast.adapters.deepspeed
from zerocast.comm import SingleRank

deepspeed.ops.__compatible_ops__.clear()  # or its CPU backend compiles collectives of its own
get_accelerator().is_fp16_supported = lambda: True  # torch computes it on any CPU


def make_model(recipe: str, seed: int) -> torch.nn.Module:
    """Make a model: sizes of no power of two, and ranks' ranges that end inside of rows."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(96, 160), torch.nn.LayerNorm(160), torch.nn.GELU(),
        torch.nn.Linear(160, 96, bias=False), torch.nn.Linear(96, 33),
    )  # fmt: skip
    if recipe != "bf16":
        two_d = zerocast.MXFP8BlockScaling(enable_2d_quantization=True)
        zerocast.nn.convert(model, two_d if recipe == "mxfp8-2d" else recipe, filter_fqns=["4"])
    return model


def config_of(stage: int, options: set[str]) -> dict:
    """Return DeepSpeed's configuration."""
    zero = {
        "stage": stage,
        "overlap_comm": "overlap" in options,
        "contiguous_gradients": "scattered" not in options,
        "round_robin_gradients": "round-robin" in options,
        "parameter_alignment": "aligned" in options,
    }
    made = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2 if "accumulate" in options else 1,
        "gradient_clipping": 0.1 if "clip" in options else 0.0,
        "zero_optimization": zero,
    }
    if "fp16" in options:
        made["fp16"] = {"enabled": True, "initial_scale_power": 14}
    elif "autocast" in options:
        made["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    elif "fp32" not in options:
        made["bf16"] = {"enabled": True}
    if "bf16-masters" in options:
        made["bf16"] |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    if "fp32-gradients" in options:
        made["data_types"] = {"grad_accum_dtype": "fp32"}
    return made


def make_engine(recipe: str, stage: int, options: set[str], **more: object):
    """Make an engine on a model of this recipe."""
    model = make_model(recipe, seed=dist.get_rank())
    model[3].weight.requires_grad_("frozen" not in options)
    groups = [{"params": list(model.parameters())}]
    if "groups" in options:
        matrices = [param for param in model.parameters() if param.dim() == 2]
        vectors = [param for param in model.parameters() if param.dim() < 2]
        groups = [{"params": matrices[:1]}, {"params": vectors}, {"params": matrices[1:]}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    config = config_of(stage, options) | more
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def weights_of(engine) -> dict[str, torch.Tensor]:
    """Return the weights that hold codes."""
    named = engine.module.named_parameters()
    return {name: p for name, p in named if isinstance(p, zerocast.QuantizedTensor)}


def differing_bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return how many bytes two weights of one recipe do not have in common."""
    given = other.quantized_storage.buffers
    return sum(
        int((held.view(torch.uint8) != given[name].view(torch.uint8)).sum())
        for name, held in one.quantized_storage.buffers.items()
    )


def wrong_starts(engine, recipe: str) -> int:
    """Return how many masters, and bytes of frozen weights, are not the first rank's values."""
    wrong, masters = 0, masters_of(engine)
    weights = weights_of(engine)
    dtype = next(engine.module.parameters()).dtype
    for name, value in make_model("bf16", seed=0).named_parameters():
        if name in masters:
            wrong += int((masters[name] != value.detach().to(dtype).float()).sum())
    for name, value in make_model(recipe, seed=0).named_parameters():
        if name in weights and name not in masters:
            wrong += differing_bytes(weights[name], value)
    return wrong


def masters_of(engine) -> dict[str, torch.Tensor]:
    """Return the masters, gathered, of the weights by name."""
    optimizer, masters = engine.optimizer, {}
    for group, params in enumerate(optimizer.round_robin_bit16_groups):
        own = optimizer.single_partition_of_fp32_groups[group].detach().float()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        flat, offsets = torch.cat(parts), optimizer.round_robin_bit16_offsets[group]
        for param, start in zip(params, offsets, strict=True):
            part = flat[start : start + param.numel()]
            masters[optimizer.param_names[param]] = part.view(param.shape)
    return masters


def wrong_bytes(engine, whole: dict[str, torch.Tensor]) -> int:
    """Cast ``whole`` from the gathered masters; return how many bytes differ from the weights."""
    wrong, params = 0, dict(engine.module.named_parameters())
    for name, master in masters_of(engine).items():
        param = params[name]
        if name not in whole:
            wrong += int((master.to(param.dtype) != param).sum())
            continue
        zerocast.quantize_master_weights([whole[name]], [master], [0], SingleRank())
        zerocast.post_all_gather_processing(whole[name])
        wrong += differing_bytes(param, whole[name])
    return wrong


def one_step(engine, batch: torch.Tensor) -> float:
    """Make one step, of as many backward passes as the engine accumulates."""
    for part in batch.split(8):
        dtype = next(engine.module.parameters()).dtype
        loss = (engine(part.to(dtype)).float() - part[:, :33].sin()).square().mean()
        engine.backward(loss)
        engine.step()
    return loss.item()


def train(case: str, steps: int) -> None:
    """Train one case, and print a row for each step."""
    recipe, stage, *options = case.split(":")
    engine = make_engine(recipe, int(stage), set(options))
    whole = {name: weight.detach().clone() for name, weight in weights_of(engine).items()}
    wrong = torch.tensor(wrong_starts(engine, recipe))
    random = torch.Generator().manual_seed(100 + dist.get_rank())
    for step in range(steps):
        rows = 8 * engine.gradient_accumulation_steps()
        loss = one_step(engine, torch.randn(rows, 96, generator=random))
        wrong += wrong_bytes(engine, whole)
        dist.all_reduce(wrong)
        if dist.get_rank() == 0:
            print(f"{case} step {step}: loss {loss:.4f}, {len(whole)} weights, {wrong} bytes")
    engine.destroy()


def main() -> None:
    """Train on one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    zerocast.adapters.deepspeed.install()
    for case in args.cases:
        train(case, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
