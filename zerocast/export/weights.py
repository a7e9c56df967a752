"""The tensors of a model under the names of a checkpoint, whole on every rank, a bucket at a time.

A quantized weight is exported in one of two ways: as the bytes that the model was trained with, or
cast anew from its masters by the dialect's own recipe. Either way only codes travel, and what is
exported equals ``zerocast.quantize`` of the whole weight, whatever the ranks. A rank holds its
shards and one bucket, never the model.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zerocast.arguments import check_flag, check_integer
from zerocast.cast import CastPlan
from zerocast.cast.amax_groups import Patterns, amax_group_labels
from zerocast.comm import Attempt, Communicator, Group, SingleRank, as_communicator, raise_together
from zerocast.errors import InputError, NonFiniteError, UnsupportedError
from zerocast.export.dialects import Dialect, as_dialect
from zerocast.layout import Extent, chunk
from zerocast.optim import ZeroOptimizer
from zerocast.recipes import NOMINAL_DTYPES, Recipe
from zerocast.sharded.all_gather import CodesState, LowBitAllGather, gather_of
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import fsdp_dimension, is_sharded, reshard, to_local
from zerocast.tensors import QuantizedTensor, empty

BUCKET_BYTES = 1 << 30
"""Bytes of the tensors that are whole on a rank at once, by default."""

NamedTensors = dict[str, torch.Tensor]
"""Tensors of a checkpoint by their names."""


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
    """

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    recipe: Recipe | None = None
    shard: Shard | None = None
    amax_group: str | None = None

    @property
    def module(self) -> str:
        """The name of the module that it belongs to."""
        return self.name.rpartition(".")[0]

    def stored_name(self, part: str) -> str:
        """The name, in the checkpoint, of the tensor ``part`` of a dialect."""
        return f"{self.module}.{part}" if self.module else part

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes in the checkpoint: codes and no scales."""
        bits = 8 * self.dtype.itemsize if self.recipe is None else self.recipe.numerics.fmt.bits
        return self.tensor.numel() * bits // 8


class Export:
    """What is exported of a model, worked out once; iterating over :meth:`buckets` is collective.

    Args:
        model: any module: with quantized weights, whole on every rank, or with masters sharded by
            ``fully_shard`` (``convert(..., weights="master")``).
        dialect: the checkpoint's, or its name.
        optimizer: the ZeroOptimizer that holds the masters of ``model``; needed to cast from them.
        from_masters: False exports the bytes that the model was trained with, which the dialect
            must hold; True casts the masters by the dialect's recipe.
        include: linear layers whose weights are not quantized in the model and are cast by the
            dialect's recipe, too: exact names, or patterns with ``*``.
        amax_groups: weights that share one tensor amax, by patterns of names as for
            :class:`zerocast.CastPlan`: the projections that the server fuses. Weights that
            :func:`zerocast.nn.convert` grouped are grouped without being named.
        dtype: FP32, BF16 or FP16: what masters are rounded to before they are cast, as the weights
            of a model of that dtype, and what is stored of parameters in another. By default those
            of the weights as they are, and of masters of FSDP2 the dtype of their latest gather.
        bucket_bytes: about how many bytes are whole on a rank at once.
        group: the ranks that export together: those of ``optimizer`` by default, or all.

    Attributes:
        comm: the ranks.
        dialect: the checkpoint's.
        entries: in the order of the model, a tied tensor once.

    Raises:
        InputError, UnsupportedError: on every rank, for a wrong argument, or a weight that cannot
            be exported so, on any.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        dialect: Dialect | str,
        *,
        optimizer: ZeroOptimizer | None = None,
        from_masters: bool = False,
        include: Sequence[str] = (),
        amax_groups: Patterns = (),
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        group: Group = None,
    ) -> None:
        if group is None and isinstance(optimizer, ZeroOptimizer):
            group = optimizer.comm
        self.comm = as_communicator(group)
        self._model, self._optimizer, self._from_masters = model, optimizer, from_masters
        attempt = Attempt()
        with attempt:
            if not isinstance(model, torch.nn.Module):
                raise InputError(f"model must be a module, got {type(model).__name__}.")
            if not isinstance(optimizer, ZeroOptimizer | None):
                raise InputError(
                    f"optimizer must be the zerocast.optim.ZeroOptimizer of the model, or None, "
                    f"got {type(optimizer).__name__}; masters of FSDP2 are in the model."
                )
            check_flag("from_masters", from_masters)
            if dtype is not None and dtype not in NOMINAL_DTYPES:
                raise InputError(
                    f"dtype must be one of {', '.join(map(str, NOMINAL_DTYPES))}, or None, got "
                    f"{dtype!r}."
                )
            self._dtype = dtype
            self._bucket_bytes = check_integer("bucket_bytes", bucket_bytes, 1, 2**62)
            self.dialect = as_dialect(dialect)
            if torch.distributed.is_available():
                reshard(model)
            self._included = _included(model, include)
            entries = [self._entry(*named) for named in _tensors(model).items()]
            self.entries = _in_groups(entries, amax_groups, _trained_groups(model))
            if not any(entry.recipe for entry in entries):
                raise InputError(
                    f"an export to {self.dialect.name} needs a model with quantized weights, or "
                    f"masters that FSDP2 gathers in codes, got one with none; call "
                    f"zerocast.nn.convert first, or name layers in include."
                )
        raise_together(self.comm, attempt.error)

    # --- what is exported ---

    def _entry(self, name: str, tensor: torch.Tensor) -> Entry:
        gather, local = gather_of(tensor), to_local(tensor)
        trained: Recipe | None = None
        if isinstance(local, QuantizedTensor):
            trained, shard, dtype = local.recipe, self._trained_shard(name, tensor), tensor.dtype
        elif gather is not None:
            trained, shard = gather.recipe, _rows(name, tensor)
            dtype = self._dtype or _gathered_dtype(gather)
        elif name in self._included:
            shard, dtype = self._plain_shard(name, tensor), self._dtype or tensor.dtype
        else:
            is_value = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
            return Entry(name, tensor, (self._dtype if is_value else None) or tensor.dtype)
        if trained is None or self._from_masters:
            self.dialect.recipe.check_shape(tensor.shape)
            return Entry(name, tensor, dtype, self.dialect.recipe, shard)
        if not self.dialect.holds(trained, tensor.shape):
            raise InputError(
                f"{name} was trained with {trained}, whose bytes {self.dialect.name} cannot hold; "
                f"give from_masters=True to cast its masters by {self.dialect.recipe}."
            )
        if shard is not None and trained.state:
            raise UnsupportedError(
                f"{name} was trained with {trained}, whose bytes depend on earlier casts; give "
                f"from_masters=True to cast its masters by {self.dialect.recipe}."
            )
        return Entry(name, tensor, dtype, trained, shard)

    def _trained_shard(self, name: str, weight: torch.Tensor) -> Shard | None:
        """Return what the optimizer holds of the master of a quantized ``weight``; None where the
        bytes of ``weight`` are exported.
        """
        if not isinstance(weight, QuantizedTensor) or weight.quantized_storage.tp_shard is not None:
            raise _not_whole(name, "tensor parallelism")
        if not self._from_masters:
            return None
        if self._optimizer is None:
            raise InputError(
                f"from_masters=True needs optimizer=, the ZeroOptimizer that holds the master of "
                f"{name}; or leave it out, to export the bytes of the weight."
            )
        return Shard(*self._optimizer.local_master(weight), self._optimizer.comm)

    def _plain_shard(self, name: str, weight: torch.Tensor) -> Shard:
        """Return what this rank casts of an unquantized ``weight``: of its master where the
        optimizer has one, its rows under FSDP2, else an equal share.
        """
        if is_sharded(weight):
            return _rows(name, weight)
        if self._optimizer is not None and weight.requires_grad:
            return Shard(*self._optimizer.local_master(weight), self._optimizer.comm)
        size, rank = self.comm.size, self.comm.rank
        extent = Extent(weight.numel() * rank // size, weight.numel() * (rank + 1) // size)
        values = weight.detach().reshape(-1)[extent.start : extent.end]
        return Shard(values if extent else None, extent, self.comm)

    @property
    def unquantized(self) -> list[str]:
        """The names of the ``torch.nn.Linear`` modules that stay as they are."""
        quantized = {entry.module for entry in self.entries if entry.recipe is not None}
        return [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, torch.nn.Linear) and name not in quantized
        ]

    # --- its tensors ---

    def plan_buckets(self) -> list[list[Entry]]:
        """Return the entries of each bucket, in order; those that share a tensor amax are in one.

        It is the same on any number of ranks.
        """
        buckets: list[list[Entry]] = []
        placed: dict[str, list[Entry]] = {}
        size = self._bucket_bytes
        for entry in self.entries:
            together = placed.get(entry.amax_group or "")
            if together is not None:
                together.append(entry)
                continue
            if not buckets or size >= self._bucket_bytes:
                buckets.append([])
                size = 0
            buckets[-1].append(entry)
            size += entry.num_bytes
            if entry.amax_group is not None:
                placed[entry.amax_group] = buckets[-1]
        return buckets

    def buckets(self) -> Iterator[NamedTensors]:
        """Yield the tensors of one bucket after the other, whole on every rank. Collective.

        Raises:
            NonFiniteError: on every rank, where a weight holds a NaN or an infinity.
        """
        for bucket in self.plan_buckets():
            yield self._tensors(bucket)

    @torch.no_grad()
    def _tensors(self, bucket: Sequence[Entry]) -> NamedTensors:
        cast = _cast([entry for entry in bucket if entry.shard is not None])
        tensors: NamedTensors = {}
        scales: dict[str, torch.Tensor] = {}
        for entry in bucket:
            if entry.recipe is None:
                tensors[entry.name] = _whole(entry.tensor).to(entry.dtype)
                continue
            weight = cast.get(entry.name, entry.tensor)
            assert isinstance(weight, QuantizedTensor)
            for part, tensor in self.dialect.encode(weight.quantized_storage).items():
                tensors[entry.stored_name(part)] = tensor
                if part == self.dialect.scales:
                    scales[entry.name] = tensor
        _check_finite(scales)
        return tensors


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and the buffers that a state dict has, by name; a tied one under the
    name that transformers keeps, or its first. Buffers without elements are left out: layers
    reserve entries for the state of recipes by them.
    """
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


def _included(model: torch.nn.Module, names: Sequence[str]) -> set[str]:
    """Return the names of the weights of the linear layers that ``names`` name.

    Raises:
        InputError: where one names no linear layer.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InputError(
            f"include must be a list of names of linear layers such as ['model.layers.*'], got "
            f"{names!r}."
        )
    linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found: set[str] = set()
    for name in names:
        matching = fnmatch.filter(linear, name)
        if not matching:
            raise InputError(
                f"each name in include must be that of a linear layer, or a pattern with * that "
                f"matches some, got {name!r}, which matches none of {', '.join(linear[:4])}, ..."
            )
        found |= {f"{module}.weight" if module else "weight" for module in matching}
    return found


def _not_whole(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name} is split by {why}, and such a weight cannot be exported yet; load a checkpoint of "
        f"the masters without it, and export that."
    )


def _gathered_dtype(gather: LowBitAllGather) -> torch.dtype:
    """Return the dtype in which FSDP2 gathered a master last."""
    if gather.codes is CodesState.NONE:
        raise InputError(
            f"{gather.name} has not been gathered yet, so nothing tells the dtype of its weight; "
            f"give dtype=, such as torch.bfloat16."
        )
    return gather.shards.dtype


def _rows(name: str, tensor: torch.Tensor) -> Shard:
    """Return this rank's rows of a parameter in high precision, which FSDP2 may have sharded."""
    local = to_local(tensor).detach()
    values = local.value if isinstance(local, MasterWeight) else local
    if not is_sharded(tensor):
        return Shard(values, Extent(0, tensor.numel()), SingleRank())
    split = [placement for placement in tensor.placements if not placement.is_replicate()]
    from torch.distributed.tensor import Shard as DTensorShard

    if len(split) != 1 or type(split[0]) is not DTensorShard or split[0].dim != 0:
        raise _not_whole(name, f"the placements {tensor.placements}")
    comm = as_communicator(tensor.device_mesh.get_group(fsdp_dimension(tensor)))
    rows, columns = chunk(tensor.shape[0], comm.rank, comm.size), tensor.shape[1:].numel()
    extent = Extent(rows.start * columns, rows.end * columns)
    return Shard(values if extent else None, extent, comm)


def _in_groups(
    entries: Sequence[Entry], patterns: Patterns, trained: Mapping[str, str]
) -> list[Entry]:
    """Return ``entries`` with the labels of ``patterns``, or else those of ``trained``; whole bytes
    are cast by nobody and need none.
    """
    cast = [entry.name for entry in entries if entry.shard is not None]
    labels = dict(zip(cast, amax_group_labels(patterns, cast), strict=True))
    return [
        dataclasses.replace(entry, amax_group=labels[entry.name] or trained.get(entry.name))
        if entry.name in labels
        else entry
        for entry in entries
    ]


def _trained_groups(model: torch.nn.Module) -> Mapping[str, str]:
    """Return the labels of the weights that were trained under a shared tensor amax."""
    labels: dict[str, str] = {}
    known: dict[int, str] = {}
    for name, module in model.named_modules():
        group: Any = getattr(module, "amax_group", None)
        if group is not None:
            weight = f"{name}.weight" if name else "weight"
            labels[weight] = f"trained {known.setdefault(id(group), str(len(known)))}"
    return labels


def _cast(entries: Sequence[Entry]) -> dict[str, QuantizedTensor]:
    """Return the weights of ``entries``, cast from their shards and gathered in codes, without
    columnwise copies.
    """
    weights: dict[str, QuantizedTensor] = {}
    for entry in entries:
        assert entry.recipe is not None
        assert entry.shard is not None
        weight = empty(
            entry.tensor.shape,
            entry.recipe,
            dtype=entry.dtype,
            device=to_local(entry.tensor).device,
            columnwise=False,
            name=entry.name,
        )
        weight.quantized_storage.amax_group = entry.amax_group
        weights[entry.name] = weight
    shards = [entry.shard for entry in entries if entry.shard is not None]
    if weights:
        plan = CastPlan(
            list(weights.values()),
            [shard.values for shard in shards],
            [shard.extent.start if shard.values is not None else None for shard in shards],
            [shard.comm for shard in shards],
            names=list(weights),
        )
        plan.cast()
        plan.all_gather()
    return weights


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return an unquantized tensor whole; collective where it is sharded."""
    whole = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole.detach().contiguous()


def _check_finite(scales: Mapping[str, torch.Tensor]) -> None:
    """Raise :class:`NonFiniteError` where a scale is a NaN, as that of a block with a NaN or an
    infinity is.
    """
    flags = [
        (each == 255 if each.dtype == torch.uint8 else ~each.float().isfinite()).any()
        for each in scales.values()
    ]
    if not flags:
        return
    for name, flag in zip(scales, torch.stack(flags).tolist(), strict=True):
        if flag:
            raise NonFiniteError(
                f"{name} holds a NaN or an infinity, so no server can use it; export a checkpoint "
                f"of an earlier step."
            )
