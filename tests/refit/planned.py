"""Weights of a CastPlan over drawn partitions, whose masters are changed a little at a time."""

import random
from collections.abc import Mapping

import torch

import zerocast
from tests.support.partitions import draw_partition
from zerocast.comm import Communicator
from zerocast.export.dialects import Dialect, stored_name
from zerocast.layout import Extent

Shapes = Mapping[str, tuple[int, ...]]
SHAPES = {"a.weight": (48, 160), "b.weight": (130, 288), "c.weight": (1, 32), "d.weight": (16, 64)}


def masters(seed: int = 0, shapes: Shapes = SHAPES) -> dict[str, torch.Tensor]:
    """FP32, rows from 1e-6 to 1e2, one of zeros; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        rows = shape[-2]
        found[name] = torch.randn(shape, generator=generator)
        found[name] *= torch.logspace(-6, 2, rows)[:, None]
        found[name][..., rows // 2 : rows // 2 + (rows > 1), :] = 0
    return found


def change(values: dict[str, torch.Tensor], seed: int, share: float = 0.01) -> None:
    """Multiply a share of all values by about 1.05, the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    for value in values.values():
        chosen = torch.rand(value.shape, generator=generator) < share
        value[chosen] *= 1.05


def codes_each(dialect: Dialect) -> int:
    """The multiple at which shards of a refit may be cut: the codes in a stored number, or 2."""
    return max(dialect.code_dtype.itemsize * 8 // dialect.recipe.numerics.fmt.bits, 2)


def cuts(world_size: int, seed: int, step: int = 2) -> dict[str, list[Extent]]:
    """By weight a drawn partition, at multiples of ``step`` elements."""
    rng, found = random.Random(seed), {}
    for name, (rows, columns) in SHAPES.items():
        drawn = draw_partition(rows * columns // step, world_size, rng)
        found[name] = [Extent(each.start * step, each.end * step) for each in drawn]
    return found


def plan(
    comm: Communicator, values: dict[str, torch.Tensor], partition: dict[str, list[Extent]]
) -> zerocast.CastPlan:
    """Whose masters are views of ``values``."""
    own = {name: partition[name][comm.rank] for name in values}
    return zerocast.CastPlan(
        [zerocast.empty(shape, "block", dtype=torch.bfloat16) for shape in SHAPES.values()],
        [values[name].view(-1)[each.start : each.end] for name, each in own.items()],
        [each.start for each in own.values()],
        comm,
        names=list(SHAPES),
    )


def expected(dialect: Dialect, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of the checkpoint, from ``quantize`` of the whole masters."""
    found = {}
    for name, value in values.items():
        weight = zerocast.quantize(value, dialect.recipe, dtype=torch.bfloat16)
        for part, tensor in dialect.encode(weight.quantized_storage).items():
            found[stored_name(name, part)] = tensor
    return found
