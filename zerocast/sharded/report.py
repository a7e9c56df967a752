"""What FSDP2's all-gather sends for each parameter of a model, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from zerocast.arguments import check_module
from zerocast.recipes import Recipe
from zerocast.sharded.dtensor import (
    gather_dtypes,
    gathered_shape,
    is_sharded,
    ranks_that_shard,
    reshard,
    to_local,
)
from zerocast.sharded.grouped_names import grouped
from zerocast.sharded.low_bit_all_gather import LowBitAllGather
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.reasons import why_high_precision
from zerocast.sharded.row_shards import RowShards


@dataclass(frozen=True)
class ParameterGather:
    """How one parameter is gathered.

    Attributes:
        name: fully qualified.
        shape: of what a gather gives a rank: the whole parameter, or under tensor parallelism its
            part, of ranks with unequal ones the largest.
        recipe: of its codes; None where it travels in high precision.
        bytes_per_element: of ``shape``, that each all-gather moves, what fills up uneven shards
            included; 0 where there is no gather.
        all_reduced_bytes_per_element: of amaxes, once for each value of the master, over the ranks
            that shard it.
        why: what travels, or why not codes.
    """

    name: str
    shape: torch.Size
    recipe: Recipe | None
    bytes_per_element: float
    all_reduced_bytes_per_element: float
    why: str

    def __str__(self) -> str:
        return f"{self.name}{self._said}"

    @property
    def _said(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f" [{shape}]: {self.bytes_per_element:.3f} bytes an element, {self.why}"


@dataclass(frozen=True)
class GatherReport:
    """What :func:`report` found.

    Attributes:
        parameters: in the model's order.
    """

    parameters: tuple[ParameterGather, ...]

    @property
    def gathered_bytes(self) -> float:
        """That gathering every parameter once moves, among the ranks that share this rank's part
        of the model.
        """
        return sum(p.bytes_per_element * p.shape.numel() for p in self.parameters)

    def __str__(self) -> str:
        low = [p.shape.numel() for p in self.parameters if p.recipe is not None]
        total = sum(p.shape.numel() for p in self.parameters)
        head = (
            f"{len(low)} of {len(self.parameters)} parameters are all-gathered in codes, "
            f"{100 * sum(low) / max(total, 1):.1f} % of {total:,} elements; a gather of all moves "
            f"{self.gathered_bytes:,.0f} bytes"
        )
        lines = grouped((p.name, p._said) for p in self.parameters)
        return "\n".join([head, *(f"  {names}{said}" for names, _, said in lines)])


def report(model: torch.nn.Module) -> GatherReport:
    """What FSDP2 all-gathers for every parameter of ``model``, and why.

    Args:
        model: on which ``torch.distributed.fsdp.fully_shard`` was called; a parameter that it has
            not sharded is reported as that.
    """
    check_module("model", model)
    reshard(model)  # for only a sharded parameter says how it is gathered
    return GatherReport(tuple(_gathers(model)))


def _gathers(model: torch.nn.Module) -> Iterator[ParameterGather]:
    dtypes = gather_dtypes(model)
    seen: set[torch.Tensor] = set()  # one that layers share is gathered once
    for fqn, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            name = f"{fqn}.{own_name}".lstrip(".")
            owner, rows = _owner(fqn, dtypes), to_local(parameter)
            is_left = isinstance(rows, MasterWeight) and not rows.low_bit_all_gather.is_gathered
            if owner is None or is_left or not is_sharded(parameter):
                why = "not sharded: fully_shard was not called on its module, or ignores it"
                yield ParameterGather(name, rows.shape, None, 0, 0, why)
                continue
            shape = gathered_shape(parameter)
            if isinstance(rows, MasterWeight):
                shared = _shares_amax_with(module, parameter)
                world_size = ranks_that_shard(parameter)
                yield _low_bit(name, rows.low_bit_all_gather, shape, world_size, shared)
                continue
            dtype = dtypes[owner] or parameter.dtype
            why = f"{dtype}: {why_high_precision(module, own_name)}"
            yield ParameterGather(name, shape, None, dtype.itemsize, 0, why)


def _low_bit(
    name: str, gather: LowBitAllGather, shape: torch.Size, world_size: int, shared: list[str]
) -> ParameterGather:
    recipe = gather.recipe
    grids = [plane.grid for plane in recipe.planes(shape) if plane.is_gathered]
    planes = len(grids)
    sent = RowShards(shape, world_size, recipe.numerics.fmt).sent_bytes * world_size * planes
    blocks = sum(grid.num_blocks for grid in grids)
    scales = "of the tensor" if recipe.has_one_block else f"of {blocks} blocks"
    why = (
        f"{recipe.numerics.fmt.name} codes{' in two planes' if planes > 1 else ''} under "
        f"{type(recipe).__name__}; scales {scales} follow from all-reduced amaxes"
    )
    if shared:
        why += f", the tensor's shared with {', '.join(shared)}"
    amaxes = 4 * (blocks + (not recipe.has_one_block))
    return ParameterGather(name, shape, recipe, sent / shape.numel(), amaxes / shape.numel(), why)


def _shares_amax_with(module: torch.nn.Module, parameter: torch.Tensor) -> list[str]:
    """The layers whose masters share a tensor amax with ``parameter``, the weight of ``module``."""
    group = getattr(module, "amax_group", None)
    layers = [] if group is None else group.layers
    return [layer.name for layer in layers if layer.weight is not parameter]


def _owner(fqn: str, dtypes: dict[str, torch.dtype | None]) -> str | None:
    """The innermost sharded module around ``fqn``; None where there is none."""
    around = [name for name in dtypes if not name or f"{fqn}.".startswith(f"{name}.")]
    return max(around, key=len, default=None)
