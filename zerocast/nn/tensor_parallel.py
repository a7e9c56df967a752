"""Tensor parallelism with torch's DTensor styles.

Layers that :func:`zerocast.nn.convert` made are parallelized by torch's own ``ColwiseParallel``,
``RowwiseParallel``, ``SequenceParallel`` and ``PrepareModuleInput``, which do not handle codes:

    zerocast.nn.convert(model, recipe, weights="master")
    parallelize_module(block, mesh["tp"], {"wq": ColwiseParallel(), "wo": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])

The codes and scales that a rank has are those of its shard of the whole weight's cast.

torch's styles gather in high precision. The styles here take the same arguments and gather an input
that is split in time (sequence parallelism) in FP8 codes, half the bytes of BF16:
Float8ColwiseParallel for one layer, PrepareFloat8ModuleInput for several that share it.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput

from zerocast.arguments import check_flag, check_text, present, shown
from zerocast.comm import as_communicator
from zerocast.errors import InputError, UnsupportedError
from zerocast.layout import Source, chunk
from zerocast.nn.layer_product import Watch
from zerocast.nn.linear import Linear
from zerocast.nn.linear_functions import first_derivatives_only
from zerocast.nn.quantized_module import autocast_dtype
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recompute import as_in_first_run
from zerocast.nn.regions import current, is_traced
from zerocast.nn.statistics import observer
from zerocast.sharded.placement import distributed
from zerocast.tensors import QuantizedStorage, QuantizedTensor, TensorParallelShard, rebuild_derived

__all__ = ["Float8ColwiseParallel", "PrepareFloat8ModuleInput"]


def gather_input(style: str, layer: Linear, input: DTensor) -> DTensor:
    """Gather the codes of ``input`` [..., K], which is split in one of its leading dimensions.
    Collective.

    Args:
        style: the name of the calling style, for messages.
        layer: multiplies with it; its quantizer of inputs makes the codes.
        input: Shard(d), d not the last dimension, over a mesh of one dimension.

    Raises:
        InputError: outside of :class:`zerocast.autocast`, or for another placement.
        UnsupportedError: under a recipe whose inputs cannot be gathered so.
    """
    if is_traced():
        torch._dynamo.graph_break()
        return torch.compiler.disable(gather_input)(style, layer, input)
    name = f"{style} of {layer.name}" if layer.name else style
    placement, last = input.placements[0], input.ndim - 1
    dim = placement.dim % input.ndim if isinstance(placement, Shard) else last
    if input.device_mesh.ndim > 1 or dim == last:
        raise InputError(
            f"{name} gathers an input that is split in a leading dimension, Shard(d), over a mesh "
            f"of one dimension, got {input.placements} of shape {tuple(input.shape)}; state its "
            f"input_layouts, or use torch's style."
        )
    with as_in_first_run(layer):
        region = current()
        if not region.enabled or not input.numel():
            raise InputError(
                f"{name} gathers its input in codes, which needs zerocast.autocast(enabled=True) "
                "around the forward and an input with elements, and at least one is missing; for "
                "forwards in high precision use torch's style."
            )
        quantizer = layer._registered(region, input.device)[0].input
        recipe = quantizer.recipe
        if not recipe.has_one_block or recipe.columnwise_source is not Source.ROWWISE:
            raise UnsupportedError(
                f"{name} gathers codes under recipes that quantize an input with one scale "
                f"(Float8CurrentScaling, DelayedScaling), got {recipe}; use torch's style, which "
                f"gathers in high precision and leaves quantizing to the layer."
            )
        needs_columnwise = torch.is_grad_enabled() and layer.weight.requires_grad
        quantizer.set_usage(rowwise=True, columnwise=needs_columnwise)
        dtype = autocast_dtype(input.device) or layer.weight.dtype
        gathered: Any = _GatherInput.apply(input, dim, quantizer, dtype, observer(layer, 0))
        return gathered


class _GatherInput(torch.autograd.Function):
    """``apply(input, dim, quantizer, dtype, watch)``: Shard(dim) -> Replicate, in codes; back as
    Partial sums, reduce-scattered.
    """

    @staticmethod
    def forward(ctx: Any, input: DTensor, dim: int, *options: Any) -> DTensor:
        ctx.placements = input.placements
        whole = _gathered_codes(input, dim, *options)
        return distributed(whole, input.device_mesh, Replicate(), input.shape)

    @staticmethod
    @first_derivatives_only
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor | None, ...]:
        return grad.redistribute(placements=ctx.placements), None, None, None, None


def _gathered_codes(
    input: DTensor, dim: int, quantizer: Quantizer, dtype: torch.dtype, watch: Watch | None
) -> QuantizedTensor:
    """Return the cast of the whole ``input`` in ``dtype``; each rank casts its part."""
    comm = as_communicator(input.device_mesh)
    own = input.to_local().to(dtype).contiguous()
    chunks = [chunk(input.shape[dim], rank, comm.size) for rank in range(comm.size)]
    features = input.shape[-1]
    others = input.numel() // input.shape[dim] // features  # rows for each entry of ``dim``
    rows = math.prod(input.shape[:-1])
    columnwise = quantizer.columnwise
    quantizer.set_usage(rowwise=True, columnwise=False)
    own_rows = own.view(-1, features)
    if not own.numel():  # such a rank takes part in the amax's reduction with a row of zeros
        own_rows = own.new_zeros(1, features)
    start = min(others * chunks[comm.rank].start, rows - len(own_rows))
    quantizer.tp_shard = TensorParallelShard(
        torch.Size((rows, features)), 0, start, len(own_rows), comm
    )
    try:
        codes = quantizer.quantize(own_rows).quantized_storage
    finally:
        quantizer.tp_shard = None
        quantizer.set_usage(rowwise=True, columnwise=columnwise)
    if watch is not None:
        watch("input", own, codes)
    whole = QuantizedStorage.empty(
        input.shape, dtype, quantizer.recipe, own.device, columnwise=columnwise, state=False
    )
    counts = [others * each.size * features for each in chunks]
    is_in_order = math.prod(input.shape[:dim]) == 1
    place = whole.buffers["rowwise_data"].view(-1)
    gathered = place if is_in_order else torch.empty_like(place)
    sent = gathered.split(counts)[comm.rank]
    sent.copy_(codes.buffers["rowwise_data"].view(-1)[: len(sent)])
    comm.all_gather_(gathered, counts)
    if not is_in_order:
        lengths = (*input.shape[:dim], -1, *input.shape[dim + 1 :])
        pieces = [piece.view(lengths) for piece in gathered.split(counts)]
        torch.cat(pieces, dim, out=whole.buffers["rowwise_data"])
    whole.buffers["rowwise_scale_inv"].copy_(codes.buffers["rowwise_scale_inv"])
    rebuild_derived([whole])
    return QuantizedTensor(whole)


class Float8ColwiseParallel(ColwiseParallel):
    """torch's ``ColwiseParallel`` for an input that is split in time, gathered in FP8 codes.

    Only under :class:`zerocast.autocast` with a recipe that has one scale a tensor
    (``Float8CurrentScaling``, ``DelayedScaling``); anything else is an error, because the requested
    gather would not take place.

    Args:
        input_layouts: ``Shard(d)``, d not the last dimension: how an input is split that is not a
            DTensor.
        output_layouts, use_local_output: those of torch's style.

    Raises:
        InputError: for other ``input_layouts``; when applied to anything but a
            :class:`zerocast.nn.Linear`; by the forward, outside of autocast.
        UnsupportedError: by the forward, under another recipe.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        if not isinstance(input_layouts, Shard):
            raise InputError(
                f"Float8ColwiseParallel gathers an input that is split, input_layouts=Shard(d), "
                f"got {input_layouts}; where nothing is gathered use ColwiseParallel."
            )
        _check_layouts("output_layouts", (output_layouts,))
        layouts = {"input_layouts": input_layouts, "output_layouts": output_layouts}
        super().__init__(
            **layouts, use_local_output=check_flag("use_local_output", use_local_output)
        )

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: Any
    ) -> DTensor:
        input = _distributed(inputs[0], device_mesh, input_layouts[0])
        return gather_input("Float8ColwiseParallel", mod, input)

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if not isinstance(module, Linear):
            raise InputError(
                f"Float8ColwiseParallel is for zerocast.nn.Linear, got {type(module).__name__}; "
                f"convert the model by zerocast.nn.convert first, or use ColwiseParallel."
            )
        return super()._apply(module, device_mesh)


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """torch's ``PrepareModuleInput``, where an input that is split in time and desired whole is
    gathered in FP8 codes: once, for all layers in the module that multiply with it.

    Conditions and errors are those of :class:`Float8ColwiseParallel`. The layers themselves are
    parallelized by torch's ``ColwiseParallel()``.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts,
            use_local_output: those of torch's style. At least one input is ``Shard(d)`` and
            desired as ``Replicate()``; others are prepared as torch does.
        fwd_config_submodule_fqn: the layer, by its name in the module, whose quantizer makes the
            codes and records amaxes; the first :class:`zerocast.nn.Linear` by default.

    Raises:
        InputError: where no input would be gathered; when applied, where the module has no such
            layer.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        inputs = _check_pair("input_layouts", input_layouts, desired_input_layouts, tuple)
        kwargs = _check_pair(
            "input_kwarg_layouts", input_kwarg_layouts, desired_input_kwarg_layouts, dict
        )
        if not inputs and not kwargs:
            raise InputError(
                "PrepareFloat8ModuleInput needs the layouts of one input or more, got none; where "
                "nothing is gathered leave the module as it is."
            )
        check_flag("use_local_output", use_local_output)
        if fwd_config_submodule_fqn is not None:
            check_text("fwd_config_submodule_fqn", fwd_config_submodule_fqn)
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        pairs = list(zip(self.input_layouts or (), self.desired_input_layouts or (), strict=True))
        pairs += [
            (layout, self.desired_input_kwarg_layouts.get(name))
            for name, layout in self.input_kwarg_layouts.items()
        ]
        if not any(_is_gathered(*pair) for pair in pairs):
            raise InputError(
                f"PrepareFloat8ModuleInput gathers an input that is Shard(d) and desired as "
                f"Replicate(), got {pairs}; where nothing is gathered use PrepareModuleInput."
            )
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self._layer: Linear | None = None

    def _prepare_input_arg(
        self,
        input: Any,
        mesh: DeviceMesh,
        input_layout: Placement | None,
        desired_layout: Placement | None,
    ) -> Any:
        if not _is_gathered(input_layout, desired_layout):
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        split = _distributed(input, mesh, input_layout)
        gathered = gather_input("PrepareFloat8ModuleInput", present(self._layer), split)
        return gathered.to_local() if self.use_local_output else gathered

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        style = copy.copy(self)  # one style may be applied to many modules, each with its layer
        style._layer = self._layer_in(module)
        return super(PrepareFloat8ModuleInput, style)._apply(module, device_mesh)

    def _layer_in(self, module: torch.nn.Module) -> Linear:
        """Return the layer whose quantizer makes the codes."""
        name = self.fwd_config_submodule_fqn
        modules = module.modules() if name is None else [module.get_submodule(name)]
        for found in modules:
            if isinstance(found, Linear):
                return found
        where = "the module" if name is None else f"its {name!r}"
        raise InputError(
            "PrepareFloat8ModuleInput needs a zerocast.nn.Linear that determines how the input is "
            f"quantized, got none: {where} is {type(module).__name__}; convert the model by "
            "zerocast.nn.convert first, or use PrepareModuleInput."
        )


def _check_layouts(name: str, layouts: Iterable[Any]) -> None:
    for layout in layouts:
        if layout is not None and not isinstance(layout, Placement):
            raise InputError(
                f"{name} takes placements such as Shard(0) and None, got {shown(layout)}."
            )


def _check_pair(name: str, given: Any, desired: Any, kind: type) -> int:
    """Return the number of inputs whose layouts are given, by position or by name, and as they are
    desired.
    """
    sizes = []
    for each, layouts in ((name, given), (f"desired_{name}", desired)):
        if kind is tuple and isinstance(layouts, Placement):
            layouts = (layouts,)
        if layouts is None:
            layouts = kind()
        elif not isinstance(layouts, kind):
            raise InputError(f"{each} must be a {kind.__name__} or None, got {shown(layouts)}.")
        entries = list(layouts.values() if kind is dict else layouts)
        _check_layouts(each, entries)
        sizes.append(len(entries))
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{name} and desired_{name} must be of the same inputs, got {sizes[0]} and {sizes[1]}."
        )
    return sizes[0]


def _is_gathered(layout: Placement | None, desired: Placement | None) -> bool:
    return isinstance(layout, Shard) and desired == Replicate()


def _distributed(input: Any, mesh: DeviceMesh, layout: Placement | None) -> DTensor:
    """Return ``input`` as a DTensor; a plain tensor is what this rank holds of one."""
    if isinstance(input, DTensor):
        return input
    if not isinstance(input, torch.Tensor):
        raise InputError(f"an input that is gathered must be a tensor, got {type(input).__name__}.")
    return DTensor.from_local(input, mesh, (present(layout),), run_check=False)
