"""The tensors of a model that are exported, and this rank's shard of each; read before any cast."""

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from zerocast.cast import CastPlan
from zerocast.comm import Communicator, SingleRank, as_communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.export.dialects import Dialect, stored_name
from zerocast.export.tp_parts import is_fsdp_sharded, tp_part
from zerocast.layout import Extent, chunk
from zerocast.numerics import NVFP4Numerics
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import Recipe
from zerocast.sharded.all_gather import LowBitAllGather
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import fsdp_dimension, is_sharded, to_local
from zerocast.tensors import QuantizedTensor, TensorParallelShard

ExportSource: TypeAlias = "torch.nn.Module | ZeroOptimizer | CastPlan"
"""The holder of the exported tensors: a model, or an optimizer or plan for its weights alone."""

Names: TypeAlias = "Mapping[str, str] | Callable[[str], str] | None"
"""Maps names in the model to names in the checkpoint; names missing from a mapping are kept."""


class StoredParameter(torch.nn.Parameter):
    """A parameter whose values stay in a file until they are cast or stored.

    Attributes:
        read: returns a range of its elements, flat, on the CPU.
    """

    read: Callable[[Extent], torch.Tensor]

    @staticmethod
    def of(
        shape: torch.Size, dtype: torch.dtype, read: Callable[[Extent], torch.Tensor]
    ) -> "StoredParameter":
        """Return one of this shape, which takes the memory of one element."""
        held = torch.empty((), dtype=dtype, device="cpu").expand(shape)
        made = torch.Tensor._make_subclass(StoredParameter, held, False)
        made.read = read
        return made


@dataclass(frozen=True)
class Shard:
    """This rank's shard of a master.

    Attributes:
        values: FP32, BF16 or FP16, flat or in rows; None if the rank owns nothing, or ``read``
            gives them.
        extent: their range in the elements of the weight.
        comm: the ranks that together own all elements.
        read: returns a range of the weight's elements, flat, which are stored in a file; None if
            they are in memory.
    """

    values: torch.Tensor | None
    extent: Extent
    comm: Communicator
    read: Callable[[Extent], torch.Tensor] | None = None

    def loaded(self) -> "Shard":
        """Return the shard with its ``values``, which are read if they are stored elsewhere."""
        if self.read is None:
            return self
        return Shard(self.read(self.extent) if self.extent else None, self.extent, self.comm)


@dataclass(frozen=True)
class Entry:
    """One tensor of the model that is exported.

    Attributes:
        name: the name of the parameter or buffer in the model.
        tensor: the parameter or buffer; a DTensor if it is sharded.
        dtype: the nominal dtype of a quantized weight; the stored dtype of any other tensor.
        dialect: the dialect in which a quantized weight is stored.
        recipe: the recipe by which it is or was cast; None if it is not quantized.
        shard: this rank's shard of the values to cast; None to export the bytes of ``tensor``.
        amax_group: the label of the weights that share its tensor amax; None if it shares none.
        tp_shard: the rows or columns that this rank has under tensor parallelism; None for all.
        exported_as: its name in the checkpoint; ``name`` if empty.
        original: this rank's shard of the masters in the model's order, for matrices that the
            checkpoint has transposed; ``shard`` gets its values by
            :func:`zerocast.export.transposed.with_masters`. None for others.
        experts: the module in the model of the stack of experts that it is or belongs to; else "".
        parts: the names in the checkpoint of the projections of a stack that is not quantized,
            each stored as a tensor; else empty.
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    dialect: Dialect
    recipe: Recipe | None = None
    shard: Shard | None = None
    amax_group: str | None = None
    tp_shard: TensorParallelShard | None = None
    exported_as: str = ""
    original: Shard | None = None
    experts: str = ""
    parts: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensor.shape if self.tp_shard is None else self.tp_shard.whole

    @property
    def stored(self) -> str:
        """The name of the parameter or buffer in the checkpoint."""
        return self.exported_as or self.name

    @property
    def module(self) -> str:
        """The name in the checkpoint of the module that the parameter or buffer belongs to."""
        return self.stored.rpartition(".")[0]

    def stored_name(self, part: str) -> str:
        """Return the name in the checkpoint of the tensor ``part`` of a dialect."""
        return stored_name(self.stored, part)

    def judged(self, values: torch.Tensor) -> torch.Tensor:
        """Return its stored values or scales with a dtype that tells E4M3 from E8M0."""
        is_nvfp4 = self.recipe is not None and isinstance(self.recipe.numerics, NVFP4Numerics)
        return values.view(torch.float8_e4m3fn) if is_nvfp4 else values

    def named(self, value: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the whole ``value`` of an unquantized entry by its names in the checkpoint."""
        if not self.parts:
            return {self.stored: value}
        matrices = value.view(len(self.parts), -1, value.shape[-1])
        return dict(zip(self.parts, matrices, strict=True))

    @property
    def is_value(self) -> bool:
        """Whether it is an unquantized floating-point parameter, whose values must be finite."""
        is_parameter = isinstance(self.tensor, torch.nn.Parameter)
        return self.recipe is None and is_parameter and self.dtype.is_floating_point

    @property
    def num_bytes(self) -> int:
        """The bytes that its codes or values take in the checkpoint, without scales."""
        bits = 8 * self.dtype.itemsize if self.recipe is None else self.recipe.numerics.fmt.bits
        return self.shape.numel() * bits // 8


def stored_tensors(source: ExportSource) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers in a module's state dict by name; or, of an optimizer or a
    plan, its weights.

    A tied parameter has the name that transformers keeps, or its first. Empty buffers, with which
    layers reserve state dict entries for recipe state, are omitted.
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
    """Return the weights of a plan by name, each with this rank's shard of its current master.

    Return an empty dict for any other source.
    """
    if not isinstance(source, CastPlan):
        return {}
    return {
        spec.name: (QuantizedTensor(spec.storage), Shard(master, spec.extent, comm))
        for spec, master, comm in source.shards()
    }


def not_rows(name: str, why: str) -> UnsupportedError:
    """Return the error for a weight that FSDP2 does not split by rows."""
    return UnsupportedError(
        f"{name} is split by {why}, and such a weight cannot be exported yet; load a checkpoint of "
        f"the masters without it, and export that."
    )


def gathered_dtype(gather: LowBitAllGather) -> torch.dtype:
    """Return the dtype in which FSDP2 last gathered a master.

    Raises:
        InputError: if it has not been gathered yet.
    """
    if not gather.is_cast:
        raise InputError(
            f"{gather.name} has not been gathered yet, so the dtype of its weight is unknown; give "
            "dtype=, such as torch.bfloat16."
        )
    return gather.shards.storage.dtype


def own_rows(name: str, tensor: torch.Tensor) -> Shard:
    """Return this rank's rows of a high-precision parameter, or of its part under tensor
    parallelism; FSDP2 may have sharded either.
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


def in_nominal_dtype(source: ExportSource, entries: list[Entry]) -> list[Entry]:
    """Return ``entries`` with unquantized FP32 masters of FSDP2 in the dtype of quantized weights.

    The model was trained in that dtype. Buffers, and parameters that transformers keeps in FP32,
    keep their dtype.
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


def whole(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the whole value of a tensor in ``dtype``, in which it is gathered. Collective if it is
    sharded.
    """
    if isinstance(tensor, QuantizedTensor):
        return tensor.dequantize(dtype)
    if isinstance(tensor, StoredParameter):
        return tensor.read(Extent(0, tensor.numel())).view(tensor.shape).to(dtype)
    stored = tensor.detach().to(dtype)
    return (stored.full_tensor() if is_sharded(stored) else stored).contiguous()
