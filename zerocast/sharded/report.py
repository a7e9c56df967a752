"""report: lists what FSDP2's all-gather sends for each parameter of a model, and why.

Reports group equal entries under one pattern such as ``layers.{0..31}.mlp.{up,down}``
(:func:`grouped`). Reports of :mod:`zerocast.nn` use the same patterns and reasons.
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from zerocast.arguments import check_module, counted
from zerocast.layout import chunk
from zerocast.recipes import Recipe
from zerocast.sharded.all_gather import LowBitAllGather, gather_of
from zerocast.sharded.all_gather_input import AllGatherInput
from zerocast.sharded.placement import (
    gather_dtypes,
    gather_size,
    gathered_shape,
    is_sharded,
    reshard,
    to_local,
    tp_shard_of,
)
from zerocast.tensors import TensorParallelShard
from zerocast.tensors.wrapped_names import named_modules


@dataclass(frozen=True)
class ParameterGather:
    """The all-gather of one parameter.

    Attributes:
        name: the fully qualified name.
        shape: the shape of the gathered parameter; under tensor parallelism that of its largest
            shard.
        recipe: the recipe of its codes; None if it is sent in high precision.
        bytes_per_element: the bytes that each all-gather moves per element of ``shape``, including
            scales and the padding of uneven shards; 0 if there is no gather.
        all_reduced_bytes_per_element: the bytes of amaxes that are reduced per element, once for
            each value of the master, over the ranks that shard it. The errors that 4-over-6
            compares are not included.
        why: what is sent, or why no codes are sent.
    """

    name: str
    shape: torch.Size
    recipe: Recipe | None
    bytes_per_element: float
    all_reduced_bytes_per_element: float
    why: str

    def __str__(self) -> str:
        return f"{self.name}{self._description}"

    @property
    def _description(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f" [{shape}]: {self.bytes_per_element:.3f} bytes an element, {self.why}"


@dataclass(frozen=True)
class GatherReport:
    """The result of :func:`report`.

    Attributes:
        parameters: the gather of each parameter, in the model's order.
    """

    parameters: tuple[ParameterGather, ...]

    @property
    def gathered_bytes(self) -> float:
        """The bytes moved by gathering every parameter once, among the ranks that share this rank's
        part of the model.
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
        lines = grouped((p.name, p._description) for p in self.parameters)
        return "\n".join([head, *(f"  {names}{text}" for names, _, text in lines)])


def report(model: torch.nn.Module) -> GatherReport:
    """Return what FSDP2 all-gathers for every parameter of ``model``, and why.

    Args:
        model: a model sharded by ``torch.distributed.fsdp.fully_shard``. Parameters that are not
            sharded are reported as such.
    """
    check_module("model", model)
    reshard(model)  # only a sharded parameter shows how it is gathered
    return GatherReport(tuple(_gathers(model)))


def _gathers(model: torch.nn.Module) -> Iterator[ParameterGather]:
    dtypes = gather_dtypes(model)
    seen: set[torch.Tensor] = set()  # a shared parameter is gathered once
    for fqn, module in named_modules(model):
        for own_name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            name, gather = f"{fqn}.{own_name}".lstrip("."), gather_of(parameter)
            owners = [n for n in dtypes if not n or f"{fqn}.".startswith(f"{n}.")]
            if not owners or not is_sharded(parameter) or (gather and not gather.is_gathered):
                why = "not sharded: fully_shard was not called on its module, or ignores it"
                yield ParameterGather(name, to_local(parameter).shape, None, 0, 0, why)
                continue
            shape, world_size = gathered_shape(parameter), gather_size(parameter)
            if gather is not None:
                group = getattr(module, "amax_group", None)
                layers = [] if group is None else group.layers
                others = [layer.name for layer in layers if layer.weight is not parameter]
                tp_shard = tp_shard_of(name, parameter, is_fsdp_sharded=True)
                yield _low_bit(name, gather, shape, world_size, tp_shard, others)
                continue
            dtype = dtypes[max(owners, key=len)] or parameter.dtype  # the innermost module's
            why = f"{dtype}: {why_high_precision(module, own_name)}"
            rows = max(shape[0], 1)
            padded = chunk(rows, 0, world_size).size * world_size
            yield ParameterGather(name, shape, None, dtype.itemsize * padded / rows, 0, why)


def _low_bit(
    name: str,
    gather: LowBitAllGather,
    shape: torch.Size,
    world_size: int,
    tp_shard: TensorParallelShard | None,
    others: list[str],
) -> ParameterGather:
    """Return the report of a master's gather; ``others`` name the weights that share its amax."""
    recipe = gather.recipe
    shards = AllGatherInput(
        shape, torch.float32, recipe, {}, world_size, 0, torch.device("meta"),
        columnwise=gather.columnwise, tp_shard=tp_shard,
    )  # fmt: skip
    sent = sum(each.numel() for each in shards.flat) * world_size
    form, own = shards.storage.form, shards.storage
    grids = [plane.grid for plane in form.planes if plane.is_gathered]
    blocks = sum(grid.num_blocks for grid in grids)
    scales = "of the tensor" if form.has_one_block else f"of {counted(blocks, 'block')}"
    if form.stack:
        scales += f" for each of {form.num_matrices} matrices"
    are_sent, are_made = len(own.by_owner) > 0, len(own.by_owner) < max(len(own.own_scales), 1)
    ways = [" travel with them"] * are_sent + [" follow from all-reduced amaxes"] * are_made
    scales += " or".join(ways)
    why = (
        f"{recipe.numerics.fmt.name} codes{' in two planes' if len(grids) > 1 else ''} under "
        f"{type(recipe).__name__}; scales {scales}"
    )
    if not gather.for_linear:
        why += "; the module works with their value"
    if others:
        why += f", the tensor's shared with {', '.join(others)}"
    amaxes = 4 * (form.num_matrices + shards.reduced_amaxes)
    return ParameterGather(name, shape, recipe, sent / shape.numel(), amaxes / shape.numel(), why)


# --- why a parameter stays in high precision ---

_REASON = "_zerocast_in_high_precision_because_"
_CANDIDATE = "_zerocast_was_to_convert_"


def note_reason(
    module: torch.nn.Module, reason: str, name: str = "weight", *, is_candidate: bool = True
) -> None:
    """Store in ``module`` why its parameter ``name`` stays in high precision, "" if it does not;
    and whether it was a candidate for conversion.
    """
    setattr(module, _REASON + name, reason)
    if is_candidate:
        setattr(module, _CANDIDATE + name, True)


def is_included(module: torch.nn.Module, name: str) -> bool:
    """Return whether ``module`` is not a linear layer and its parameter ``name`` was named for
    conversion.
    """
    return hasattr(module, _CANDIDATE + name) and not isinstance(module, torch.nn.Linear)


def why_high_precision(module: torch.nn.Module, name: str) -> str:
    """Return why the direct parameter ``name`` of ``module`` stays in high precision."""
    parameter = module._parameters[name]
    assert parameter is not None
    if noted := getattr(module, _REASON + name, ""):
        return noted
    if name == "weight" and isinstance(module, torch.nn.Linear):
        return (
            "its layer was made after zerocast.nn.convert, or never given to it; give its module "
            "to zerocast.nn.convert"
        )
    if parameter.dim() < 2:
        return "only weights of linear layers are converted, not biases or norms"
    return why_other(module)


def why_other(module: torch.nn.Module) -> str:
    """Return why a matrix of ``module``, which is no linear layer, is converted only on demand."""
    if isinstance(module, torch.nn.Embedding):
        return "an embedding is looked up, not multiplied"
    from torch.distributed.fsdp import FSDPModule

    # fully_shard replaces the class of a module by one with FSDPModule and another name.
    own_class = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
    return f"it belongs to class {own_class.__name__}, not torch.nn.Linear"


# --- names of equal things ---

Description = TypeVar("Description", bound=Hashable)


def grouped(
    described: Iterable[tuple[str, Description]],
) -> Iterator[tuple[str, int, Description]]:
    """Group the names of modules or parameters that have the same description. Yield a pattern, the
    number of names that match it, and the description, in order of first occurrence.
    """
    names: dict[Description, list[str]] = {}
    for name, description in described:
        names.setdefault(description, []).append(name)
    for description, alike in names.items():
        for pattern, count in grouped_names(alike):
            yield pattern, count, description


def grouped_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Return patterns that cover ``names``, each with the number of names that it covers.

    Names that differ in one component are merged, with the components in braces. Numbers are merged
    first.
    """
    groups = {tuple(name.split(".")): 1 for name in names}
    places = range(max(map(len, groups), default=0))
    for is_kind in (str.isdecimal, str.isidentifier):
        for place in reversed(places):
            alike: dict[tuple[str | None, ...], list[tuple[str, int]]] = {}
            for name, count in groups.items():
                own = name[place] if place < len(name) else ""
                key = (*name[:place], None, *name[place + 1 :]) if is_kind(own) else name
                alike.setdefault(key, []).append((own, count))
            groups = {
                tuple(_braces([own for own, _ in found]) if each is None else each for each in key):
                sum(count for _, count in found)
                for key, found in alike.items()
            }  # fmt: skip
    return [(".".join(name), count) for name, count in groups.items()]


def pattern_of(name: str) -> str:
    """Return a pattern that fits ``name`` and those that differ in the numbers inside of it."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


def _braces(components: Sequence[str]) -> str:
    """Return ``{0..3,7}`` or ``{up,down}``; a single component unchanged."""
    if len(components) == 1:
        return components[0]
    if not components[0].isdecimal():
        return f"{{{','.join(components)}}}"
    runs: list[list[int]] = []
    for number in sorted(map(int, components)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return f"{{{','.join(str(r[0]) if len(r) == 1 else f'{r[0]}..{r[-1]}' for r in runs)}}}"
