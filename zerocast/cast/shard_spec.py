"""ShardSpec: what a caller passes to a cast, checked on this rank before anything is written.

The checks that need other ranks (are the weights the same, do the shards cover them) are in
:mod:`zerocast.cast.consistency`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from zerocast.arguments import check_names, check_text, why_unusable
from zerocast.cast.amax_groups import Patterns, amax_group_labels, by_first_names
from zerocast.cast.master_checks import check_list, extent_of
from zerocast.comm import Communicator
from zerocast.errors import InputError
from zerocast.layout import Extent, Source
from zerocast.numerics import byte_span
from zerocast.tensors import QuantizedStorage, QuantizedTensor
from zerocast.tensors.owned_shard import OwnedShard
from zerocast.tensors.wrapped_names import without_wrappers

OwnCodes: TypeAlias = "Sequence[torch.Tensor | Sequence[torch.Tensor | None] | None]"
"""For each weight None, or the buffer that receives the codes of this rank's shard; a pair of
buffers for a weight with two planes."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One weight and what this rank owns of it.

    Attributes:
        name: the weight's name in error messages.
        is_named: whether the caller gave that name, so that ranks can compare it.
        storage: the weight's bytes.
        extent: the elements that this rank's master holds.
        codes: the caller's uint8 buffers that receive the shard's codes instead of the weight, by
            the names of the weight's gathered buffers; empty if the weight receives them.
        amax_group: a label; weights with the same one share their tensor amax. None: not shared.
    """

    name: str
    is_named: bool
    storage: QuantizedStorage
    extent: Extent
    codes: Mapping[str, torch.Tensor]
    amax_group: str | None

    def own_codes(self, plane: str) -> torch.Tensor | None:
        """Return the buffer of :attr:`codes` for ``plane``, flat, or None."""
        codes = self.codes.get(plane)
        return None if codes is None else codes.view(-1)

    def check_own_codes(self) -> None:
        """Raise :class:`InputError` if :attr:`codes` are not, or no longer, as required."""
        for codes in self.codes.values():
            _check_buffer(self.name, self.storage, self.extent, codes)


def check_specs(
    model_weights: Sequence[torch.Tensor],
    master_weights: Sequence[torch.Tensor | None],
    start_offsets: Sequence[int | None],
    fsdp_shard_model_weights: OwnCodes | None,
    names: Sequence[str] | None,
    amax_groups: Patterns = (),
) -> list[ShardSpec]:
    """Check the arguments of :class:`zerocast.CastPlan`; return one :class:`ShardSpec` per weight.

    Raises:
        InputError: what is required, what was given and for which weight.
    """
    check_list("model_weights", model_weights, model_weights)
    check_list("master_weights", master_weights, model_weights)
    check_list("start_offsets", start_offsets, model_weights)
    if fsdp_shard_model_weights is not None:
        check_list("fsdp_shard_model_weights", fsdp_shard_model_weights, model_weights)
    if names is not None:
        check_list("names", names, model_weights)
        for i, name in enumerate(names):
            check_text(f"names[{i}]", name)
        names = list(map(without_wrappers, names))
        check_names("names", names)
    grouped = not isinstance(amax_groups, list | tuple) or len(amax_groups) > 0
    if grouped and names is None:
        raise InputError(
            "amax_groups needs the names of the weights, got none; give names to the plan."
        )
    labels = amax_group_labels(amax_groups, names or ())
    given = [weight for weight in model_weights if isinstance(weight, QuantizedTensor)]
    QuantizedStorage.share_forms(weight.quantized_storage for weight in given)
    specs: list[ShardSpec] = []
    first_use: dict[int, str] = {}
    for i, weight in enumerate(model_weights):
        name = names[i] if names is not None else f"model_weights[{i}]"
        storage = _check_weight(name, weight)
        if id(storage) in first_use:
            raise InputError(
                f"{name} is the same weight as {first_use[id(storage)]}; give a tied weight once."
            )
        first_use[id(storage)] = name
        first_device = specs[0].storage.device if specs else storage.device
        if storage.device != first_device:
            raise InputError(
                f"all weights of a cast must be on one device, got {specs[0].name} on "
                f"{first_device} and {name} on {storage.device}; make one plan per device."
            )
        own: Any = None if fsdp_shard_model_weights is None else fsdp_shard_model_weights[i]
        if isinstance(storage, OwnedShard):
            own = list(storage.own_codes.values())
        check_castable(name, storage, holds_codes=own is None)
        if storage.tp_shard is not None:
            storage.tp_shard.require_comm()
            storage.tp_shard.check(storage.recipe, storage.shape, columnwise=storage.has_columnwise)
        extent = extent_of(name, storage, master_weights[i], start_offsets[i])
        codes = _shard_codes(name, storage, extent, own)
        group = (labels[i] if labels else None) or storage.amax_group
        specs.append(ShardSpec(name, names is not None, storage, extent, codes, group))
    groups = by_first_names([spec.amax_group for spec in specs], [spec.name for spec in specs])
    return [
        spec if group is None else replace(spec, amax_group=group)
        for spec, group in zip(specs, groups, strict=True)
    ]


def _check_weight(name: str, weight: torch.Tensor) -> QuantizedStorage:
    if not isinstance(weight, QuantizedTensor):
        raise InputError(
            f"{name} must be a zerocast.QuantizedTensor, got {type(weight).__name__}; make one "
            "with zerocast.quantize(tensor, recipe) or zerocast.empty(shape, recipe)."
        )
    storage = weight.quantized_storage
    if storage.device.type == "meta":
        raise InputError(
            f"{name} must have memory, got a weight on the meta device; call to_empty on the "
            "module before the plan is made."
        )
    return storage


def check_castable(name: str, storage: QuantizedStorage, *, holds_codes: bool = True) -> None:
    """Raise :class:`InputError` if a cast from master shards cannot fill the weight.

    With ``holds_codes=False`` the weight needs only its buffers other than codes.
    """
    if Source.TRANSPOSED_MASTER in (plane.source for plane in storage.planes):
        raise InputError(
            f"{name}: under {storage.recipe} the columnwise copy is quantized from the transposed "
            "tensor, and ranks have no shards of that; make the weight with columnwise=False, or "
            "choose 2-D blocks for weights."
        )
    if not (storage.is_whole if holds_codes else storage.has_scales):
        raise InputError(
            f"{name} must hold rowwise codes and the state of {storage.recipe}, got "
            f"{', '.join(storage.buffers)} only, as in a tensor that a quantizer made of a layer's "
            "input; make weights with zerocast.quantize(tensor, recipe)."
        )


def _shard_codes(
    name: str, storage: QuantizedStorage, extent: Extent, given: Any
) -> Mapping[str, torch.Tensor]:
    """Return the buffers for a shard's codes, by the names of the weight's gathered buffers."""
    if given is None:
        return {}
    planes = storage.gathered
    buffers = list(given) if isinstance(given, list | tuple) else [given]
    if len(buffers) != len(planes):
        raise InputError(
            f"{name}: fsdp_shard_model_weights must be None, or a buffer for each of "
            f"{' and '.join(planes)}, got {len(buffers)}."
        )
    nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
    buffers = [nothing if codes is None and not extent else codes for codes in buffers]
    for codes in buffers:
        _check_buffer(name, storage, extent, codes)
    return dict(zip(planes, buffers, strict=True))


def _check_buffer(name: str, storage: QuantizedStorage, extent: Extent, codes: Any) -> None:
    """Raise :class:`InputError` unless ``codes`` can receive the codes of ``extent``."""
    first, last = byte_span(storage.form.numerics.fmt, extent.start, extent.end)
    problem = why_unusable(codes, (torch.uint8,), storage.device)
    if problem is None and codes.numel() != last - first:
        problem = f"{codes.numel()} bytes"
    if problem is not None:
        raise InputError(
            f"{name}: fsdp_shard_model_weights must be contiguous torch.uint8 on device "
            f"{storage.device} with allocated storage, the {last - first} bytes of elements "
            f"{extent}, got {problem}."
        )


def check_amax_groups(
    specs: Sequence[ShardSpec], members: Mapping[Communicator, Sequence[int]]
) -> None:
    """Raise :class:`InputError` if weights of one amax group do not match.

    They must have one recipe and dtype, and be sharded over one group of ranks. They must be held
    by one tensor-parallel group or none, and be stacks of the same matrices.
    """
    comm_of = {i: comm for comm, indices in members.items() for i in indices}
    leaders: dict[str, int] = {}
    first_tp_shard: dict[str, ShardSpec] = {}
    for i, spec in enumerate(specs):
        if spec.amax_group is None:
            continue
        first = leaders.setdefault(spec.amax_group, i)
        leader = specs[first]
        given, wanted = ((r.storage.recipe, r.storage.dtype) for r in (spec, leader))
        if given != wanted or comm_of[i] != comm_of[first]:
            raise InputError(
                "weights of one amax group must have one recipe and one dtype and be sharded over "
                f"one group, got {leader.name} ({wanted[0]}, {wanted[1]}, {comm_of[first]}) and "
                f"{spec.name} ({given[0]}, {given[1]}, {comm_of[i]})."
            )
        if (tp_shard := spec.storage.tp_shard) is not None:
            other = first_tp_shard.setdefault(spec.amax_group, spec)
            assert other.storage.tp_shard is not None
            if tp_shard.comm != other.storage.tp_shard.comm:
                raise InputError(
                    "weights of one amax group must be sharded over one tensor-parallel group, or "
                    f"not at all, got {other.name} ({other.storage.tp_shard.comm}) and {spec.name} "
                    f"({tp_shard.comm})."
                )
    _check_matrices([spec for spec in specs if spec.amax_group is not None])


def _check_matrices(grouped: Sequence[ShardSpec]) -> None:
    """Raise :class:`InputError` if weights of one amax group do not have the same matrices.

    They must be stacks of equal size; matrix i shares its amax with matrix i of the others. This
    rank must hold the same matrices of each. Shards by rows or columns have a part of every matrix.
    """
    first: dict[tuple[str | None, str], tuple[ShardSpec, object]] = {}
    for spec in grouped:
        storage, tp_shard = spec.storage, spec.storage.tp_shard
        whole = storage.shape if tp_shard is None else tp_shard.whole
        held: dict[str, object] = {"stack": tuple(storage.recipe.stack_of(whole))}
        if tp_shard is None or tp_shard.has_whole_matrices(storage.recipe):
            start = storage.first_matrix
            held["matrices"] = Extent(start, start + storage.form.num_matrices)
        for what, mine in held.items():
            other, theirs = first.setdefault((spec.amax_group, what), (spec, mine))
            if mine != theirs:
                raise InputError(
                    "weights of one amax group must be matrices, or stacks of equally many, of "
                    f"which a rank has the same ones, got {other.name} ({what} {theirs}) and "
                    f"{spec.name} ({what} {mine}); split them alike, or remove one from the group."
                )
