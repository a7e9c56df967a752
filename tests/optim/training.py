"""The same small training twice: sharded by ZeroOptimizer, and whole by a plain torch optimizer."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

import zerocast
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.comm import Communicator
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe

NVFP4 = zerocast.NVFP4BlockScaling()
FP8 = zerocast.Float8CurrentScaling()

# Quantized: ragged blocks, one row, a K that fills no tile of scales. Plain: odd sizes, a scalar.
QUANTIZED_SHAPES = ((33, 48), (1, 16), (20, 80))
PLAIN = (((37,), torch.bfloat16), ((3, 5), torch.float32), ((), torch.bfloat16))


def quantized_shapes(recipe: Recipe) -> list[tuple[int, ...]]:
    """:data:`QUANTIZED_SHAPES`, twice as wide where a block is; and for blocks of 128x128 a weight
    that has several.
    """
    if isinstance(recipe, zerocast.MXFP8BlockScaling):
        return [(rows, 2 * cols) for rows, cols in QUANTIZED_SHAPES]
    several = [(130, 150)] if isinstance(recipe, zerocast.Float8BlockScaling) else []
    return [*QUANTIZED_SHAPES, *several]


def make_params(recipe: Recipe, seed: int = 0) -> list[torch.nn.Parameter]:
    """Quantized and plain weights of every storage kind, the same for equal seeds."""
    g = torch.Generator().manual_seed(seed)
    params = [
        torch.nn.Parameter(
            zerocast.quantize(torch.randn(shape, generator=g), recipe, dtype=torch.bfloat16)
        )
        for shape in quantized_shapes(recipe)
    ]
    params += [
        torch.nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape, dtype in PLAIN
    ]
    return params


def start_values(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """FP32 copies of what the masters of ``params`` start from."""
    return [
        p.dequantize(torch.float32)
        if isinstance(p, zerocast.QuantizedTensor)
        else p.detach().float().clone()
        for p in params
    ]


def draw_gradients(shapes: Sequence[torch.Size], step: int, rank: int) -> list[torch.Tensor]:
    """FP32 gradients that BF16 holds, multiples of 1/64: any order of their sum is exact."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-127, 128, shape, generator=g).float() / 64 for shape in shapes]


def mean_gradients(shapes: Sequence[torch.Size], step: int, ranks: int) -> list[torch.Tensor]:
    """The mean over ranks of :func:`draw_gradients`."""
    by_rank = [draw_gradients(shapes, step, rank) for rank in range(ranks)]
    return [torch.stack(column).sum(0) / ranks for column in zip(*by_rank, strict=True)]


def train_sharded(
    comm: Communicator, recipe: Recipe, steps: int, *args: Any, **options: Any
) -> list[torch.nn.Parameter]:
    """The weights after ``steps``, every rank with gradients of its own."""
    params = make_params(recipe)
    optimizer = ZeroOptimizer(params, *args, group=comm, **options)
    for step in range(steps):
        set_gradients(params, draw_gradients([p.shape for p in params], step, comm.rank))
        optimizer.step()
    return params


def set_gradients(params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Give each parameter its gradient, in its dtype."""
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.to(param.dtype)


def through_a_file(state: Any) -> Any:
    """Saved and loaded by safe types only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train_whole(
    recipe: Recipe,
    steps: int,
    ranks: int,
    make_optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
) -> list[torch.Tensor]:
    """The whole FP32 masters after the same training, with the mean gradients of ``ranks``."""
    masters = start_values(make_params(recipe))
    optimizer = make_optimizer(masters)
    for step in range(steps):
        gradients = mean_gradients([m.shape for m in masters], step, ranks)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.step()
    return masters


def assert_cast_of(params: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
    """Every weight holds, byte for byte, the unsharded cast of its whole master."""
    for i, (param, master) in enumerate(zip(params, masters, strict=True)):
        if isinstance(param, zerocast.QuantizedTensor):
            whole = zerocast.quantize(master, param.recipe, dtype=param.dtype)
            assert_same_storage(param, whole, f"weight {i}")
        else:
            assert_same_bytes(param.detach(), master.to(param.dtype), f"weight {i}")
