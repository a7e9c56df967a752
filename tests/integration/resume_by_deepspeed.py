"""Saves a training by DeepSpeed on gloo's ranks, and continues it in new engines.

    resume_by_deepspeed.py DIRECTORY STAGE RECIPE...

Prints for each recipe how many bytes of weights and masters of a continued training differ from one
that went on. Then how many are wrong where a training with codes starts from a checkpoint of BF16
weights, or goes back to a checkpoint's weights alone.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from train_by_deepspeed import (
    differing_bytes,
    make_engine,
    masters_of,
    one_step,
    weights_of,
    wrong_bytes,
)

import zerocast
import zerocast.adapters.deepspeed


def batches(steps: int) -> list[torch.Tensor]:
    """Return this rank's batches."""
    random = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(8, 96, generator=random) for _ in range(steps)]


def differing(engine, other) -> int:
    """Return how many bytes of weights, and values of masters and moments, are not equal."""
    wrong = torch.zeros((), dtype=torch.int64)
    for one, two in zip(engine.module.parameters(), other.module.parameters(), strict=True):
        is_quantized = isinstance(one, zerocast.QuantizedTensor)
        wrong += differing_bytes(one, two) if is_quantized else (one != two).sum()
    inner = engine.optimizer, other.optimizer
    for one, two in zip(*(each.single_partition_of_fp32_groups for each in inner), strict=True):
        wrong += (one != two).sum()
        states = inner[0].optimizer.state[one], inner[1].optimizer.state[two]
        assert states[0].keys() == states[1].keys()
        wrong += sum((value != states[1][name]).sum() for name, value in states[0].items())
    dist.all_reduce(wrong)
    return int(wrong)


def main() -> None:
    """Save and continue on one rank."""
    directory, stage, recipes = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    dist.init_process_group("gloo")
    zerocast.adapters.deepspeed.install()
    for recipe in recipes:
        engine = make_engine(recipe, stage, set())
        given = batches(6)
        for batch in given[:3]:
            one_step(engine, batch)
        engine.save_checkpoint(str(directory / recipe), tag="third")
        again = make_engine(recipe, stage, set())
        again.load_checkpoint(str(directory / recipe), tag="third")
        loaded = differing(engine, again)
        for batch in given[3:]:
            one_step(engine, batch)
            one_step(again, batch)
        continued = differing(engine, again)
        if recipe == "bf16":
            warm = make_engine("nvfp4", stage, set())
            warm.load_checkpoint(str(directory / recipe), tag="third")
            whole = {n: zerocast.empty(w.shape, "nvfp4") for n, w in weights_of(warm).items()}
            follows = wrong_bytes(warm, whole)
        else:
            engine.load_checkpoint(str(directory / recipe), tag="third", load_module_only=True)
            masters, weights = masters_of(engine), weights_of(engine)
            follows = sum(int((masters[n] != w.dequantize()).sum()) for n, w in weights.items())
        if dist.get_rank() == 0:
            print(f"{recipe}: loaded {loaded}, continued {continued}, others {follows}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
