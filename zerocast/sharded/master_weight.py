"""MasterWeight: a parameter in high precision that FSDP2 all-gathers in codes.

Optimizers, initialization and checkpoints read and write it like any other tensor, and FSDP2 shards
it by rows. It differs from a plain tensor in two ways. It has FSDP2's two extension methods,
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. Every piece of it (a shard, an alias, the same
rows on another device) refers to the :class:`LowBitAllGather` of the whole.

A view of it is again a MasterWeight, so that writes through views are detected. Any other result
is a plain tensor. It cannot be an operand of a product: otherwise a layer whose weight was not
gathered would silently compute in high precision.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from zerocast.arguments import check_tensor
from zerocast.errors import InputError, UnsupportedError
from zerocast.recipes import NOMINAL_DTYPES, Recipe
from zerocast.sharded.all_gather import AllGatherInput, LowBitAllGather, gather_of
from zerocast.sharded.casts import cast_group_of, codes_to_send
from zerocast.sharded.placement import check_placement, is_sharded, sharded_like, to_local
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrappers import decomposed, inference_mode_of, wrapper_of, written_arguments

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

aten = torch.ops.aten

_COPIES = {
    aten.clone.default, aten.empty_like.default, aten.new_zeros.default, aten._to_copy.default,
    aten._pin_memory.default,
}  # fmt: skip
"""The operations, in addition to views, whose results are masters. FSDP2 and ``Module`` use them to
make parameters from parameters."""

_VALUES = _COPIES - {aten.empty_like.default, aten.new_zeros.default}
"""The operations of :data:`_COPIES` whose results have the same values."""

_PRODUCTS = {
    aten.linear.default, aten.mm.default, aten.addmm.default, aten.bmm.default, aten.t.default,
    aten.matmul.default, aten.embedding.default, aten.mv.default, aten.addmv.default,
    aten.baddbmm.default, aten.addbmm.default, aten._grouped_mm.default,
}  # fmt: skip


class MasterWeight(torch.Tensor):
    """A whole master or a piece of one. :func:`zerocast.nn.convert` with ``weights="master"`` makes
    it.

    Attributes:
        value: the plain tensor of the same shape, dtype and device.
        low_bit_all_gather: the gather of the whole weight, which all pieces share.
    """

    value: torch.Tensor
    low_bit_all_gather: LowBitAllGather

    # Only operations are intercepted, not torch functions: those would wrap results a second time,
    # and torch.compile could not trace them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, value: torch.Tensor, gather: LowBitAllGather) -> MasterWeight:
        check_tensor("value", value)
        master = wrapper_of(cls, value)
        master.low_bit_all_gather = gather
        return master

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func is aten.new_zeros.default and isinstance(first, MasterWeight) and all(args[1]):
            _note_shard(first, args[1])
        if func in _PRODUCTS:
            operand = next(each for each in args if isinstance(each, MasterWeight))
            raise not_gathered(operand.low_bit_all_gather.name)
        if (out := decomposed(func, args, kwargs)) is not NotImplemented:
            return out
        plain_args, plain_kwargs = tree_map_only(
            MasterWeight, lambda master: master.value, (tuple(args), kwargs)
        )
        if (func.is_view or func in _COPIES) and isinstance(first, MasterWeight):
            with inference_mode_of(first):
                out = func(*plain_args, **plain_kwargs)
                values = first.low_bit_all_gather.cast_values
                if func in _VALUES and values.are_in(first.value):
                    values.copied(first.value, out)
                return tree_map_only(torch.Tensor, lambda piece: _piece(func, first, piece), out)
        out = func(*plain_args, **plain_kwargs)
        arguments = written_arguments(func, args, kwargs)
        written = [each for each in arguments if isinstance(each, MasterWeight)]
        source = args[1] if func is aten.copy_.default else None
        for master in written:
            gather = master.low_bit_all_gather
            if isinstance(source, MasterWeight) and source.low_bit_all_gather is gather:
                gather.cast_values.copied(source.value, master.value)
            else:
                gather.cast_values.written(master.value)
        return first if written and isinstance(out, torch.Tensor) else out

    # --- FSDP2's extension methods ---

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], AllGatherInput]:
        """Return the tensors that this rank sends, and their metadata.

        Raises:
            UnsupportedError: on every rank, at the first gather, if the weight cannot be gathered
                in codes.
        """
        gather = self.low_bit_all_gather
        # This is a shard of the parameter, or a copy of one on the device of the gather.
        parameter = next(
            each
            for each in module._parameters.values()
            if each is not None and gather_of(each) is gather
        )
        if not gather.is_sent or gather.kept is not None:
            check_placement(gather.name, parameter)
        dtype = mp_policy.param_dtype or self.dtype
        cast_group = cast_group_of(module, parameter, dtype)
        return codes_to_send(gather, cast_group, mesh, dtype, self.device)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: AllGatherInput,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """Return the gathered weight and its other tensors, or write it into ``out`` if given.

        Outside linear layers the weight is its dequantized value.
        """
        gather = self.low_bit_all_gather
        if not gather.for_linear:
            own = None if out is None else to_local(out)  # a DTensor under tensor parallelism
            value = gather.gathered_value(all_gather_outputs, metadata, own)
            return None if out is not None else (value, [value])
        if out is None:
            return gather.gathered_weight(all_gather_outputs, metadata)
        weight = to_local(out)
        assert isinstance(weight, QuantizedTensor)
        gather.refill(weight.quantized_storage, all_gather_outputs, metadata)
        return None

    # --- attributes that torch reads from memory, which a wrapper does not have ---

    @property
    def data(self) -> torch.Tensor:
        """An alias without a gradient. Assigning a tensor replaces ``value``, and may change the
        dtype.
        """
        return self.detach()

    @data.setter
    def data(self, given: torch.Tensor) -> None:
        gather = self.low_bit_all_gather
        if given.shape != self.shape:
            raise InputError(
                f"what is assigned to .data of {gather.name} must be of its shape "
                f"{list(self.shape)}, got {list(given.shape)}."
            )
        value = given.value if isinstance(given, MasterWeight) else given.detach()
        torch.Tensor.data.__set__(self, MasterWeight(value, gather))  # type: ignore[attr-defined]
        self.value = value

    def data_ptr(self) -> int:
        """Return the address of ``value``, by which wrappers recognize a parameter."""
        return self.value.data_ptr()

    def __dlpack__(self, **options: Any) -> Any:
        return self.value.__dlpack__(**options)

    # --- copying and saving ---

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.value}, recipe={self.low_bit_all_gather.recipe})"

    def __deepcopy__(self, memo: dict[int, Any]) -> MasterWeight:
        if id(self) in memo:
            return memo[id(self)]
        gather = self.low_bit_all_gather
        gather = memo.setdefault(id(gather), gather.copy_for(self.value))
        value = copy.deepcopy(self.value, memo)
        copied = restore(value, gather, self.requires_grad, isinstance(self, torch.nn.Parameter))
        memo[id(self)] = copied
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        is_parameter = isinstance(self, torch.nn.Parameter)
        gather = self.low_bit_all_gather.copy_for(self.value)
        return restore, (self.value, gather, self.requires_grad, is_parameter)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.Size, Recipe]]:
        """Return the parts without the gather, so that all masters share what torch.compile
        compiles. Its results are therefore not pieces of any master.
        """
        return ["value"], (self.low_bit_all_gather.shape, self.low_bit_all_gather.recipe)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        context: tuple[torch.Size, Recipe],
        outer_size: Any,
        outer_stride: Any,
    ) -> MasterWeight:
        return MasterWeight(inner["value"], LowBitAllGather(*context, "weight"))


def restore(
    value: torch.Tensor, gather: LowBitAllGather, requires_grad: bool, is_parameter: bool
) -> MasterWeight:
    """Return a master around ``value``, for unpickling and deepcopy.

    Raises:
        InputError: if ``value`` is not a plain FP32, BF16 or FP16 tensor, or ``gather`` is invalid.
    """
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, MasterWeight | QuantizedTensor)
        or value.dtype not in NOMINAL_DTYPES
        or not isinstance(gather, LowBitAllGather)
    ):
        raise InputError(
            f"a master that is loaded needs a plain tensor of torch.float32, torch.bfloat16 or "
            f"torch.float16 and a LowBitAllGather, got {type(value).__name__} of "
            f"{getattr(value, 'dtype', None)} and {type(gather).__name__}; the file is damaged or "
            f"was not written by zerocast."
        )
    master = MasterWeight(value, gather)
    if gather.cast_values.are_loaded:
        gather.cast_values.set_to(value, are_loaded=True)
    if is_parameter:
        return torch.nn.Parameter(master, requires_grad)  # type: ignore[return-value]
    return master.requires_grad_(requires_grad)  # type: ignore[return-value]


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a master as a plain tensor of the same memory and sharding; any other tensor
    unchanged.
    """
    local = to_local(tensor)
    if not isinstance(local, MasterWeight):
        return tensor
    plain, values = sharded_like(tensor, local.value.detach()), local.low_bit_all_gather.cast_values
    return values.count_writes(plain) if is_sharded(tensor) else plain


def as_master_like(master: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which replaces ``master``, as a master of the same gather, with the
    sharding of ``tensor``. Return it unchanged if it is a master, or ``master`` is not one.
    """
    gather = gather_of(master)
    if gather is None or gather_of(tensor) is not None:
        return tensor
    return sharded_like(tensor, MasterWeight(to_local(tensor).detach(), gather))


def not_gathered(name: str) -> UnsupportedError:
    """Return the error for a product with a weight that FSDP2 should have gathered in codes."""
    return UnsupportedError(
        f"{name} was to be all-gathered in codes before its layer runs, and FSDP2 has not gathered "
        f"it; call torch.distributed.fsdp.fully_shard on the layer or a module around it, without "
        f"the parameter among ignored_params, and run it by that module's forward. accelerate's "
        f"FSDP2 plugin, also under transformers' Trainer, does that for several processes with "
        f"accelerators only, and nothing on CPUs or in one process. (For a model that is not "
        f"sharded, convert with weights='quantized' or 'high_precision'.)"
    )


def _piece(func: Any, master: MasterWeight, value: torch.Tensor) -> MasterWeight:
    """Wrap ``value``, the result of ``func`` on ``master``. A view of the whole is wrapped around
    the same tensor, so that they share torch's version counter.
    """
    whole = master.value
    places = [(t.shape, t.stride(), t.storage_offset()) for t in (value, whole)]
    return MasterWeight(
        whole if func.is_view and places[0] == places[1] else value, master.low_bit_all_gather
    )


def _note_shard(master: MasterWeight, shape: Sequence[int]) -> None:
    """Note that FSDP2 allocates its shard of ``master``. Only DTensor also calls ``new_zeros`` on
    masters, for tensors without elements.

    Raises:
        UnsupportedError: if FSDP2 shards another dimension than the rows.
    """
    sizes = list(zip(shape, master.shape, strict=False))[1:]
    dims = [dim for dim, (own, whole) in enumerate(sizes, 1) if own != whole]
    if dims and len(shape) == master.dim():
        raise UnsupportedError(
            f"{master.low_bit_all_gather.name}: a low-bit all-gather needs masters sharded by "
            f"rows, got a split of dimension {dims[0]}; leave shard_placement_fn out for this "
            f"parameter, or leave its layer out of zerocast.nn.convert by filter_fqns or include."
        )
    master.low_bit_all_gather.is_gathered = True
