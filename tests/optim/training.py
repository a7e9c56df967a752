"""The same small training twice: sharded by ZeroOptimizer, and whole by a plain torch optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import zerocast
from tests.support.claims import assert_same_tensors, assert_unsharded_cast, stored
from tests.support.recipes import RECIPES
from tests.support.weights import through_a_file
from zerocast.comm import Communicator
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe
from zerocast.tensors import quantize_into

NVFP4, FP8 = RECIPES["nvfp4"], RECIPES["current"]

Given = Callable[[Sequence[torch.Tensor]], Any]
"""What an optimizer is given of some tensors."""

# Quantized: ragged blocks, one row, a K that fills no tile of scales. Plain: odd sizes, a scalar.
QUANTIZED_SHAPES = ((33, 48), (1, 16), (20, 80))
PLAIN = (((37,), torch.bfloat16), ((3, 5), torch.float32), ((), torch.bfloat16))


def quantized_shapes(recipe: Recipe) -> list[tuple[int, ...]]:
    """:data:`QUANTIZED_SHAPES`, twice as wide where a block is; and for blocks of 128x128 a weight
    that has several.
    """
    if recipe.block[1] == 32:
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


def draw_gradients(params: Sequence[torch.Tensor], step: int, rank: int = 0) -> list[torch.Tensor]:
    """FP32 gradients of ``params`` that BF16 holds, multiples of 1/64: any order of their sum is
    exact.
    """
    g = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randint(-127, 128, p.shape, generator=g).float() / 64 for p in params]


def set_gradients(params: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Give each parameter its gradient, in its dtype."""
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.to(param.dtype)


def named(params: Sequence[torch.nn.Parameter]) -> list[tuple[str, torch.nn.Parameter]]:
    """Pairs as ``model.named_parameters()`` gives them."""
    return [(f"layer.{i}", param) for i, param in enumerate(params)]


class Training:
    """The weights of :func:`make_params` under a sharded optimizer.

    Args:
        comm: the ranks, of which each has gradients of its own; one rank by default.
        seed: of the weights' values.
        given: what the optimizer is given of the weights; names and weights.
        options: those of the optimizer.

    Attributes:
        params: the weights.
        optimizer: who steps them.
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        recipe: Recipe = NVFP4,
        optimizer_class: Any = torch.optim.AdamW,
        *,
        seed: int = 0,
        given: Given = named,
        **options: Any,
    ) -> None:
        self.params = make_params(recipe, seed)
        self.rank = comm.rank if comm else 0
        self.optimizer = ZeroOptimizer(given(self.params), optimizer_class, comm, **options)

    def feed(self, step: int, *, alike: bool = False) -> None:
        """The gradients of this step; with ``alike`` the same ones on every rank."""
        set_gradients(self.params, draw_gradients(self.params, step, 0 if alike else self.rank))

    def train(self, *steps: int, alike: bool = False) -> list[torch.nn.Parameter]:
        """The weights after these steps."""
        for step in steps:
            self.feed(step, alike=alike)
            self.optimizer.step()
        return self.params

    def scaled_backward(self, scaler: torch.amp.GradScaler, step: int, *, overflows: bool) -> None:
        """Backward of a scaled loss that has the gradients of this step, or an infinite one."""
        self.optimizer.zero_grad()
        gradients = draw_gradients(self.params, step, self.rank)
        if overflows:
            gradients[0][0, 0] = torch.inf
        for param, gradient in zip(self.params, gradients, strict=True):
            scaler.scale((param * gradient.to(param.dtype)).sum()).backward()

    def masters(self) -> list[torch.Tensor]:
        """All of them, gathered. Collective."""
        return [self.optimizer.gather_master(p) for p in self.params]

    def saved(self) -> Any:
        """The optimizer's state dict, as it is loaded from a file."""
        return through_a_file(self.optimizer.state_dict())


class Whole:
    """The same training on one rank: a plain torch optimizer steps whole FP32 masters.

    Args:
        ranks: of whose gradients the mean is taken; 1 for those that are alike on all.
        given: what the optimizer is given of the masters; a list of them.
        options: those of the optimizer.
    """

    def __init__(
        self,
        recipe: Recipe = NVFP4,
        optimizer_class: Any = torch.optim.AdamW,
        *,
        ranks: int = 1,
        given: Given = list,
        **options: Any,
    ) -> None:
        self.params, self.ranks = make_params(recipe), ranks
        self.masters = start_values(self.params)
        self.optimizer = optimizer_class(given(self.masters), **options)

    def feed(self, step: int) -> None:
        """The mean over ranks of the gradients of this step."""
        by_rank = [draw_gradients(self.masters, step, rank) for rank in range(self.ranks)]
        means = [torch.stack(each).sum(0) / self.ranks for each in zip(*by_rank, strict=True)]
        set_gradients(self.masters, means)

    def train(self, *steps: int) -> list[torch.Tensor]:
        """The masters after these steps."""
        for step in steps:
            self.feed(step)
            self.optimizer.step()
        return self.masters

    def train_weights(self, *steps: int) -> list[torch.nn.Parameter]:
        """Whole weights, cast from the masters after every step."""
        for step in steps:
            for (name, param), master in zip(named(self.params), self.train(step), strict=True):
                if isinstance(param, zerocast.QuantizedTensor):
                    param.quantized_storage.name_weight(name)
                    with zerocast.use_backend("reference"):
                        quantize_into(param.quantized_storage, master)
                else:
                    param.data.copy_(master)
        return self.params


def assert_cast_of(params: Sequence[torch.Tensor], masters: Sequence[torch.Tensor]) -> None:
    """Every weight holds, byte for byte, the unsharded cast of its whole master."""
    for i, (param, master) in enumerate(zip(params, masters, strict=True)):
        assert_unsharded_cast(param, master, f"weight {i}")


def held_by(optimizer: ZeroOptimizer) -> list[torch.Tensor]:
    """Copies of its weights and of every tensor of its state dict. Collective."""
    values = [*optimizer.named_weights.values(), *tree_leaves(optimizer.state_dict())]
    return [each.detach().clone() for each in values if isinstance(each, torch.Tensor)]


def assert_same_lists(
    actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str
) -> None:
    """Tensors in one order, byte for byte: of a quantized one all that it holds."""
    both = ({str(i): tensor for i, tensor in enumerate(given)} for given in (actual, expected))
    assert_same_tensors(*map(stored, both), what)
