"""What a caller hands to a cast, checked on this rank alone and before anything is written.

The checks that need other ranks (does everybody mean the same weights, do the shards cover them)
are in :mod:`zerocast.cast.world`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

import torch

from zerocast.cast.amax_groups import Patterns, amax_group_labels
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.formats import byte_span
from zerocast.layout import Extent
from zerocast.tensors import QuantizedStorage, QuantizedTensor

OwnCodes: TypeAlias = "Sequence[torch.Tensor | Sequence[torch.Tensor] | None]"
"""By weight None, or the buffer that receives the codes of this rank's shard; a pair of buffers for
a weight with two planes."""


@dataclass(frozen=True, slots=True)
class ShardRequest:
    """One weight and what this rank owns of it.

    Attributes:
        name: what error messages call the weight.
        is_named: whether the caller gave that name, so that ranks can compare it.
        storage: the weight's bytes.
        extent: the elements that this rank's master holds.
        codes: by the names of the weight's gathered buffers, uint8 buffers that receive the shard's
            codes instead of the weight; empty where the weight receives them.
        amax_group: weights with the same one share their tensor amax; None for a weight of its own.
    """

    name: str
    is_named: bool
    storage: QuantizedStorage
    extent: Extent
    codes: Mapping[str, torch.Tensor]
    amax_group: str | None

    @property
    def codes_start(self) -> int:
        """The element whose code is in the low bits of the first byte written to: the weight's
        first, or that of ``codes``, the extent's start rounded down to a byte.
        """
        if not self.codes:
            return 0
        fmt = self.storage.recipe.law.fmt
        return byte_span(fmt, self.extent.start, self.extent.end)[0] * 8 // fmt.bits


def check_request(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    fsdp_shard_model_weights: OwnCodes | None,
    names: Sequence[str] | None,
    amax_groups: Patterns = (),
) -> list[ShardRequest]:
    """The requests, one a weight, in order; the arguments are those of :class:`zerocast.CastPlan`.

    Raises:
        InputError: what is required, what was given and for which weight.
    """
    required = {
        "model_weights": model_weights,
        "master_weights": master_weights,
        "start_offsets": start_offsets,
    }
    optional = {"fsdp_shard_model_weights": fsdp_shard_model_weights, "names": names}
    lists = required | {key: given for key, given in optional.items() if given is not None}
    for argument, given in lists.items():
        _check_list(argument, given)
        if len(given) != len(model_weights):
            raise InputError(
                f"{argument} must have one entry for each of the {len(model_weights)} "
                f"model_weights, got {len(given)} entries; give None where this rank owns nothing "
                "of a weight."
            )
    if amax_groups and names is None:
        raise InputError(
            "amax_groups are patterns of the weights' names, got no names; give the plan names."
        )
    labels = amax_group_labels(amax_groups, names or ())
    requests: list[ShardRequest] = []
    first_use: dict[int, str] = {}
    for i, weight in enumerate(model_weights):
        name = names[i] if names is not None else f"model_weights[{i}]"
        storage = _check_weight(name, weight)
        if id(storage) in first_use:
            raise InputError(
                f"{name} is the same weight as {first_use[id(storage)]}; give a tied weight once."
            )
        first_use[id(storage)] = name
        first_device = requests[0].storage.device if requests else storage.device
        if storage.device != first_device:
            raise InputError(
                f"all weights of a cast must be on one device, got {requests[0].name} on "
                f"{first_device} and {name} on {storage.device}; make one plan a device."
            )
        own = fsdp_shard_model_weights[i] if fsdp_shard_model_weights is not None else None
        check_castable(name, storage, holds_codes=own is None)
        if storage.part is not None:
            storage.part.require_comm()
            storage.part.check(storage.recipe, storage.shape, columnwise=storage.has_columnwise)
        extent = _check_master(name, storage, master_weights[i], start_offsets[i])
        codes = _check_shard_codes(name, storage, extent, own)
        label = (labels[i] if labels else None) or storage.amax_group
        requests.append(ShardRequest(name, names is not None, storage, extent, codes, label))
    return requests


def _check_list(argument: str, given: object) -> None:
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise InputError(
            f"{argument} must be a list with one entry a weight, got {type(given).__name__}; wrap "
            "a single entry in [...], and an iterator in list(...)."
        )


def _check_weight(name: str, weight: torch.Tensor) -> QuantizedStorage:
    if not isinstance(weight, QuantizedTensor):
        raise InputError(
            f"{name} must be a zerocast.QuantizedTensor, got {type(weight).__name__}; make one "
            "with zerocast.quantize(tensor, recipe) or zerocast.empty(shape, recipe)."
        )
    return weight.storage


def check_castable(name: str, storage: QuantizedStorage, *, holds_codes: bool = True) -> None:
    """Raise :class:`InputError` where a cast from shards of its master cannot fill the weight, or
    without ``holds_codes`` what of it is no code.
    """
    if storage.recipe.casts_transpose and storage.has_columnwise:
        raise InputError(
            f"{name}: under {storage.recipe} the columnwise copy is quantized from the transposed "
            "tensor, of which no rank has a shard; make the weight with columnwise=False, or give "
            "weights blocks of two dimensions."
        )
    if not (storage.is_whole if holds_codes else storage.has_scales):
        raise InputError(
            f"{name} must hold rowwise codes and what {storage.recipe} remembers between casts, "
            f"and holds {', '.join(storage.buffers)} only, as a quantizer makes tensors of a "
            "layer's inputs; make weights with zerocast.quantize(tensor, recipe)."
        )


def _check_master(
    name: str, storage: QuantizedStorage, master: torch.Tensor | None, given: SupportsIndex | None
) -> Extent:
    numel = storage.shape.numel()
    if master is None:
        if given is not None:
            raise InputError(
                f"{name}: start_offsets is {given} but there is no master weight; give both, or "
                "None for both where this rank owns nothing of the weight."
            )
        return Extent(0, 0)
    check_master_tensor(name, storage, master)
    if given is None and master.numel() == 0:
        return Extent(0, 0)
    start = _as_int(given)
    if start is None:
        raise InputError(
            f"{name}: start_offsets must say, as an int, at which element of the weight the "
            f"master of {master.numel()} elements starts, got {given!r}."
        )
    if start < 0 or start + master.numel() > numel:
        raise InputError(
            f"{name}: the master must lie inside the weight's {numel} elements, got start offset "
            f"{start} and {master.numel()} elements, so [{start}, {start + master.numel()})."
        )
    return Extent(start, start + master.numel())


def _as_int(value: object) -> int | None:
    """The integer that ``value`` is, of numpy's or torch's types too; None where it is none."""
    if value is None or isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # the question is whether it can
    except TypeError:
        return None


def as_tensors(master_weights: Any) -> Any:
    """Masters that are no torch tensors but speak DLPack (CuPy arrays, say) as tensors of the same
    memory; everything else as it is.

    Raises:
        InputError: for one whose memory cannot be shared.
    """
    if not isinstance(master_weights, list | tuple):
        return master_weights
    return [_as_tensor(i, master) for i, master in enumerate(master_weights)]


def _as_tensor(i: int, master: Any) -> Any:
    if isinstance(master, torch.Tensor) or not hasattr(master, "__dlpack__"):
        return master
    try:
        return torch.from_dlpack(master)
    except (BufferError, RuntimeError, TypeError) as error:
        raise InputError(
            f"master_weights[{i}] must be a torch tensor or share its memory by DLPack, got a "
            f"{type(master).__name__} that does not: {error}; pass a torch tensor."
        ) from error


def check_master_tensor(name: str, storage: QuantizedStorage, master: torch.Tensor) -> None:
    """Raise :class:`InputError` where ``master`` cannot be read as an FP32 shard of the weight."""
    if not isinstance(master, torch.Tensor) or master.dtype != torch.float32:
        given = master.dtype if isinstance(master, torch.Tensor) else type(master).__name__
        raise InputError(f"{name}: the master weight must be a torch.float32 tensor, got {given}.")
    if master.device != storage.device:
        raise InputError(
            f"{name}: the master weight must be on the weight's device {storage.device}, got "
            f"{master.device}."
        )
    if not master.is_contiguous():
        raise InputError(
            f"{name}: the master weight must be contiguous, got shape {tuple(master.shape)} with "
            f"strides {master.stride()}; call .contiguous() and keep the result as the master."
        )


def check_rebind(
    requests: Sequence[ShardRequest], master_weights: Sequence[torch.Tensor | None]
) -> None:
    """Raise :class:`InputError` where other masters do not fit the shards that ``requests`` were
    made for.
    """
    _check_list("master_weights", master_weights)
    if len(master_weights) != len(requests):
        raise InputError(
            f"master_weights must have one entry for each of the plan's {len(requests)} weights, "
            f"got {len(master_weights)}."
        )
    for request, master in zip(requests, master_weights, strict=True):
        if master is not None:
            check_master_tensor(request.name, request.storage, master)
        size = 0 if master is None else master.numel()
        if size != request.extent.size:
            raise InputError(
                f"{request.name}: the plan was made for a master of {request.extent.size} "
                f"elements, got {size}; make a new plan for another partition."
            )


def _check_shard_codes(
    name: str, storage: QuantizedStorage, extent: Extent, given: Any
) -> dict[str, torch.Tensor]:
    """The buffers for a shard's codes, flat, by the names of the weight's gathered buffers."""
    if given is None:
        return {}
    planes = storage.gathered
    buffers = list(given) if isinstance(given, list | tuple) else [given]
    if len(buffers) != len(planes):
        raise InputError(
            f"{name}: fsdp_shard_model_weights must be None, or a buffer for each of "
            f"{' and '.join(planes)}, got {len(buffers)}."
        )
    first, last = byte_span(storage.recipe.law.fmt, extent.start, extent.end)
    for codes in buffers:
        if not isinstance(codes, torch.Tensor):
            raise InputError(
                f"{name}: fsdp_shard_model_weights must be a torch.uint8 tensor or None, got "
                f"{type(codes).__name__}."
            )
        if (
            codes.dtype != torch.uint8
            or codes.device != storage.device
            or not codes.is_contiguous()
        ):
            raise InputError(
                f"{name}: fsdp_shard_model_weights must be contiguous torch.uint8 on "
                f"{storage.device}, got {codes.dtype} on {codes.device} with strides "
                f"{codes.stride()}."
            )
        if codes.numel() != last - first:
            raise InputError(
                f"{name}: fsdp_shard_model_weights must hold the {last - first} bytes of elements "
                f"{extent}, got {codes.numel()}."
            )
    return {plane: codes.view(-1) for plane, codes in zip(planes, buffers, strict=True)}


def check_amax_groups(
    requests: Sequence[ShardRequest], members: Mapping[Communicator, Sequence[int]]
) -> None:
    """Raise :class:`InputError` where weights of one amax group differ in recipe or dtype, are not
    sharded over one group of ranks, or are parts that different groups of ranks hold.
    """
    comm_of = {i: comm for comm, indices in members.items() for i in indices}
    leaders: dict[str, int] = {}
    cut: dict[str, ShardRequest] = {}
    for i, request in enumerate(requests):
        if request.amax_group is None:
            continue
        first = leaders.setdefault(request.amax_group, i)
        leader = requests[first]
        given, wanted = ((r.storage.recipe, r.storage.dtype) for r in (request, leader))
        if given != wanted or comm_of[i] != comm_of[first]:
            raise InputError(
                "weights of one amax group must have one recipe and one dtype and be sharded over "
                f"one group, got {leader.name} ({wanted[0]}, {wanted[1]}, {comm_of[first]}) and "
                f"{request.name} ({given[0]}, {given[1]}, {comm_of[i]})."
            )
        if (part := request.storage.part) is not None:
            other = cut.setdefault(request.amax_group, request)
            assert other.storage.part is not None
            if part.comm != other.storage.part.comm:
                raise InputError(
                    "weights of one amax group must be cut over one tensor-parallel group, or not "
                    f"at all, got {other.name} ({other.storage.part.comm}) and {request.name} "
                    f"({part.comm})."
                )
