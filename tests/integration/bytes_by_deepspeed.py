"""Counts what a step of DeepSpeed's ZeRO sends, by collective and dtype.

    bytes_by_deepspeed.py RECIPE:STAGE...

Prints a row for each: the bytes of the tensors that the first rank gives to collectives in one step
of a model of eight layers of 256 x 256, a norm and their biases.
"""

import collections
import sys

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from train_by_deepspeed import config_of

import zerocast
import zerocast.adapters.deepspeed

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce",
    "all_to_all_single", "broadcast", "reduce", "reduce_scatter_single", "reduce_scatter_tensor",
)  # fmt: skip
counted: collections.Counter[str] = collections.Counter()
running: list[str] = []
"""Collectives that have begun: what one of them calls to do its work is not counted."""


def count_collectives() -> None:
    """Let every collective of torch.distributed be counted."""
    for name in COLLECTIVES:
        collective = getattr(dist, name, None)
        if collective is None:
            continue

        def spy(*args, _collective=collective, _name=name, **kwargs):
            first = [*args, *kwargs.values()][0]
            tensors = first if isinstance(first, list) else [first]
            if not running:
                counted[f"{_name} {tensors[0].dtype}"] += sum(t.nbytes for t in tensors)
            running.append(_name)
            try:
                return _collective(*args, **kwargs)
            finally:
                running.pop()

        setattr(dist, name, spy)
        setattr(distributed_c10d, name, spy)


def main() -> None:
    """Count on one rank."""
    dist.init_process_group("gloo")
    zerocast.adapters.deepspeed.install()
    count_collectives()
    for case in sys.argv[1:]:
        recipe, stage = case.split(":")
        layers = [torch.nn.Linear(256, 256) for _ in range(8)]
        model = torch.nn.Sequential(*layers, torch.nn.LayerNorm(256))
        if recipe != "bf16":
            two_d = zerocast.MXFP8BlockScaling(enable_2d_quantization=True)
            zerocast.nn.convert(model, two_d if recipe == "mxfp8-2d" else recipe)
        optimizer = torch.optim.AdamW(model.parameters())
        config = config_of(int(stage), set())
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        for _ in range(2):
            counted.clear()
            loss = engine(torch.ones(8, 256).bfloat16()).float().square().mean()
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"{case}: " + ", ".join(f"{k} {v}" for k, v in sorted(counted.items())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
