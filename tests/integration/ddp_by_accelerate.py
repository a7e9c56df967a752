"""Trains a model that accelerate has put into torch's DDP, on ranks of torchrun.

``overlap_grad_reduce`` is refused by the first backward, and goes with DDP's gradients as views of
its buckets; without it the masters move by the mean gradient, once.
"""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

import zerocast
from zerocast.errors import InputError
from zerocast.optim import ZeroOptimizer


def moved(accelerator: Accelerator, overlap: bool) -> float:
    """By how much a step of gradients 4 and 12 at a rate of 0.1 moves every master."""
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 48)
    zerocast.nn.convert(model, "mxfp8", weights="quantized")
    prepared = accelerator.prepare(model)  # moves it: the optimizer is made afterwards
    assert isinstance(prepared, torch.nn.parallel.DistributedDataParallel)
    named = list(model.named_parameters())
    optimizer = ZeroOptimizer(named, torch.optim.SGD, lr=0.1, overlap_grad_reduce=overlap)
    before = optimizer.gather_master(model.weight)
    x = torch.full((4, 32), 1.0 + 2 * accelerator.process_index)
    accelerator.backward(prepared(x).sum())
    optimizer.step()
    return (optimizer.gather_master(model.weight) - before).mean().item()


def main() -> None:
    """Three trainings."""
    plain = Accelerator(cpu=True)
    try:
        moved(plain, overlap=True)
    except InputError as error:
        print(f"refused: {error}")
    views = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    by = moved(plain, overlap=False), moved(views, overlap=True)
    assert all(abs(each + 0.8) < 1e-6 for each in by), by
    print(f"moved by {by[0]:.3f} and {by[1]:.3f}")


if __name__ == "__main__":
    main()
