"""What is exported of a model, and what this rank has of each weight; read before any cast."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from zerocast.cast import CastPlan
from zerocast.comm import Communicator, SingleRank, as_communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.export.dialects import Dialect, stored_name
from zerocast.export.tp_parts import is_fsdp_sharded, tp_part
from zerocast.layout import Extent, chunk
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe
from zerocast.sharded.all_gather import CodesState, LowBitAllGather
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import fsdp_dimension, is_sharded, to_local
from zerocast.tensors import QuantizedTensor, TensorParallelShard

ExportSource: TypeAlias = "torch.nn.Module | ZeroOptimizer | CastPlan"
"""Who holds what is exported: a model, or only the weights of an optimizer or a plan."""

Names: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"
"""The names of parameters in the checkpoint by those in the model; others keep theirs."""


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a master.

    Attributes:
        values: FP32, BF16 or FP16, flat or in rows; None where the rank owns nothing.
        extent: the elements of the weight that they are.
        comm: the ranks that own the others.
    """

    values: torch.Tensor | None
    extent: Extent
    comm: Communicator


@dataclass(frozen=True)
class Entry:
    """One tensor of the model that is exported.

    Attributes:
        name: that of the parameter or buffer in the model.
        tensor: the parameter or buffer; a DTensor where it is sharded.
        dtype: the nominal one of a quantized weight; what any other is stored in.
        recipe: by which it is cast, or was; None where it stays as it is.
        shard: what it is cast from; None where its bytes are those of ``tensor``.
        amax_group: the label of the weights that share its tensor amax; None for it alone.
        tp_shard: the rows or columns that ``shard``, or its bytes, are of; None for all.
        exported_as: its name in the checkpoint, ``name`` unless the caller has others.
        unturned: of matrices that the checkpoint has transposed, what this rank has of the masters
            as the model has them; ``shard`` gets its values by
            :func:`zerocast.export.turned.with_turned_masters`. None for others.
        experts: the module, in the model, of the stack of experts that it is or is of; else empty.
        parts: of a stack that stays as it is the names, in the checkpoint, of its projections, each
            of which is a tensor there; else none.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    recipe: Recipe | None = None
    shard: Shard | None = None
    amax_group: str | None = None
    tp_shard: TensorParallelShard | None = None
    exported_as: str = ""
    unturned: Shard | None = None
    experts: str = ""
    parts: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """That of the whole tensor."""
        return self.tensor.shape if self.tp_shard is None else self.tp_shard.whole

    @property
    def stored(self) -> str:
        """The name of the parameter or buffer in the checkpoint."""
        return self.exported_as or self.name

    def stored_name(self, part: str) -> str:
        """The name, in the checkpoint, of the tensor ``part`` of a dialect."""
        return stored_name(self.stored, part)

    def named(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the whole ``value`` of one that stays as it is by its names in the checkpoint."""
        if not self.parts:
            return {self.stored: value}
        matrices = value.view(len(self.parts), -1, value.shape[-1])
        return dict(zip(self.parts, matrices, strict=True))

    @property
    def is_value(self) -> bool:
        """Whether it is a parameter that stays as it is, and whose values must be finite."""
        is_parameter = isinstance(self.tensor, torch.nn.Parameter)
        return self.recipe is None and is_parameter and self.dtype.is_floating_point

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes in the checkpoint: codes and no scales."""
        bits = 8 * self.dtype.itemsize if self.recipe is None else self.recipe.numerics.fmt.bits
        return self.shape.numel() * bits // 8


def stored_tensors(source: ExportSource) -> dict[str, torch.Tensor]:
    """Return the parameters and the buffers that a state dict of a module has, by name; a tied one
    under the name that transformers keeps, or its first. Buffers without elements are left out:
    layers reserve entries for the state of recipes by them. Of an optimizer or a plan, its weights.
    """
    if isinstance(source, ZeroOptimizer):
        return source.named_weights
    if isinstance(source, CastPlan):
        return {name: weight for name, (weight, _) in planned_weights(source).items()}
    model = source
    dropped = set(getattr(model, "_tied_weights_keys", None) or ())
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.numel() and name not in module._non_persistent_buffers_set
    }
    named = [
        *model.named_parameters(remove_duplicate=False),
        *(each for each in model.named_buffers(remove_duplicate=False) if each[0] in persistent),
    ]
    first: dict[int, str] = {}
    for name, tensor in sorted(named, key=lambda each: each[0] in dropped):
        first.setdefault(id(tensor), name)
    return {name: tensor for name, tensor in named if first[id(tensor)] == name}


def planned_weights(source: ExportSource) -> dict[str, tuple[QuantizedTensor, Shard]]:
    """Return the weights of a plan by name, each with what this rank has of its master as it is
    bound now; nothing of another source.
    """
    if not isinstance(source, CastPlan):
        return {}
    return {
        spec.name: (QuantizedTensor(spec.storage), Shard(master, spec.extent, comm))
        for spec, master, comm in source.shards()
    }


def included_weights(source: ExportSource, names: Sequence[str]) -> set[str]:
    """Return the names of the weights of the linear layers that ``names`` name.

    Raises:
        InputError: where one names no linear layer, or only such that the checkpoint does not have,
            because their weights are tied.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"include must be a list of names of linear layers such as ['model.layers.*'], got "
            f"{names!r}."
        )
    modules = source.named_modules() if isinstance(source, torch.nn.Module) else ()
    linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
    found, stored = set[str](), stored_tensors(source)
    for name in names:
        matching = fnmatch.filter(linear, name)
        if not matching:
            raise InputError(
                f"each name in include must be that of a linear layer, or a pattern with * that "
                f"matches some, got {name!r}, which matches none of {', '.join(linear[:4])}, ..."
            )
        weights = {f"{module}.weight" if module else "weight" for module in matching}
        if not weights & stored.keys():
            raise InputError(
                f"include names {name!r}, whose weight is tied with another and stored under that "
                f"one's name, as it is; leave it out of include, or untie it."
            )
        found |= weights
    return found


def not_rows(name: str, why: str) -> UnsupportedError:
    """Return the error for a weight that is split otherwise than by rows under FSDP2."""
    return UnsupportedError(
        f"{name} is split by {why}, and such a weight cannot be exported yet; load a checkpoint of "
        f"the masters without it, and export that."
    )


def gathered_dtype(gather: LowBitAllGather) -> torch.dtype:
    """Return the dtype in which FSDP2 gathered a master last."""
    if gather.codes is CodesState.NONE:
        raise InputError(
            f"{gather.name} has not been gathered yet, so nothing tells the dtype of its weight; "
            f"give dtype=, such as torch.bfloat16."
        )
    return gather.shards.storage.dtype


def own_rows(name: str, tensor: torch.Tensor) -> Shard:
    """Return this rank's rows of a parameter in high precision, or of the part of it that tensor
    parallelism leaves this rank, which FSDP2 may have sharded.
    """
    local, tp_shard = to_local(tensor).detach(), tp_part(name, tensor)
    values = (local.value if isinstance(local, MasterWeight) else local).contiguous()
    shape = tensor.shape if tp_shard is None else tp_shard.shape
    if not is_sharded(tensor) or not is_fsdp_sharded(tensor):
        return Shard(values if shape.numel() else None, Extent(0, shape.numel()), SingleRank())
    dim = fsdp_dimension(tensor)
    if getattr(tensor.placements[dim], "dim", None) != 0:
        raise not_rows(name, f"the placements {tensor.placements}")
    comm = as_communicator(tensor.device_mesh.get_group(dim))
    rows, columns = chunk(shape[0], comm.rank, comm.size), shape[1:].numel()
    extent = Extent(rows.start * columns, rows.end * columns)
    return Shard(values if extent else None, extent, comm)


def renamed(entries: Sequence[Entry], names: Names, dialect: Dialect) -> list[Entry]:
    """Return ``entries`` under their names in a checkpoint of ``dialect``.

    Raises:
        InputError: where two have one, or tensors of one name, or a name is no text, or that of a
            weight that the checkpoint has in another form.
    """
    if not (names is None or callable(names) or isinstance(names, Mapping)):
        raise InputError(
            f"names must be a mapping from names of parameters to those of the checkpoint, a "
            f"function of a name, or None, got {type(names).__name__}."
        )
    found: list[Entry] = []
    taken: dict[str, str] = {}
    for entry in entries:
        name = checkpoint_name(names, entry.name)
        stays_fused = isinstance(names, Mapping) and entry.name in names
        own = () if stays_fused else entry.parts
        parts = tuple(checkpoint_name(names, part) for part in own)
        its_own = [*parts] or [name]
        if isinstance(name, str) and entry.recipe is not None:
            if dialect.of(name) != dialect.of(entry.name):
                raise InputError(
                    f"{entry.name} is stored as {dialect.of(entry.name).name}, and names gives it "
                    f"that of a weight of {dialect.of(name).name}: {name}."
                )
            its_own = [stored_name(name, part) for part in dialect.of(name).names]
        for each in its_own:
            if not isinstance(each, str) or each in taken:
                which = f"both {taken[each]} and {entry.name}" if each in taken else entry.name
                raise InputError(
                    f"names must give each tensor a name of its own, got {each!r} for {which}."
                )
            taken[each] = entry.name
        found.append(dataclasses.replace(entry, exported_as=name, parts=parts))
    return found


def in_nominal_dtype(source: ExportSource, entries: list[Entry]) -> list[Entry]:
    """Return ``entries``, of which FP32 masters of FSDP2 that are not quantized are stored in the
    dtype of the quantized weights, in which the model was trained: not buffers, and not what
    transformers keeps in FP32.
    """
    nominal = next((each.dtype for each in entries if each.recipe is not None), None)
    if nominal in (None, torch.float32) or not isinstance(source, torch.nn.Module):
        return entries
    lists = ["_keep_in_fp32_modules_strict"]
    lists += ["_keep_in_fp32_modules"] if nominal == torch.float16 else []
    kept = [f"*{like}*" for each in lists for like in getattr(source, each, None) or ()]
    masters = {
        name
        for name, parameter in source.named_parameters(remove_duplicate=False)
        if is_fsdp_sharded(parameter) and parameter.dtype == torch.float32
        if not any(fnmatch.fnmatchcase(name, like) for like in kept)
    }
    return [
        dataclasses.replace(each, dtype=nominal)
        if each.recipe is None and each.name in masters
        else each
        for each in entries
    ]


def checkpoint_name(names: Names, name: str) -> str:
    """Return what the checkpoint calls the parameter ``name``."""
    if names is None:
        return name
    return names(name) if callable(names) else names.get(name, name)


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the value of a tensor whole, in ``dtype``, in which it travels; collective where it is
    sharded.
    """
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize(dtype)
    stored = tensor.detach().to(dtype)
    return (stored.full_tensor() if is_sharded(stored) else stored).contiguous()
