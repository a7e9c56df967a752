"""QuantizedModule: what the layers with quantized products have in common.

A layer that runs under :class:`zerocast.autocast` has a :class:`RecipeState` for its forward and
one for its backward, made when a recipe first meets it, and the quantizers of its GEMMs, which
remember there (:mod:`zerocast.nn.stateful_module`).

Which of three ways a product goes:

    autocast             both operands quantized (:class:`QuantizedLinear`)
    a quantized weight   decoded, times the input as it is (:class:`WeightOnlyLinear`)
    neither              ``torch.nn.functional.linear``

In the last two, amaxes are recorded beside it where autocast calibrates.

Inside ``torch.compile`` a quantized weight is decoded in the graph, which is entered only where its
derived copies are true. Under a region of autocast the products are operations of the graph
(:mod:`zerocast.nn.traced_products`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zerocast.errors import InputError
from zerocast.nn import regions
from zerocast.nn.linear_functions import (
    GemmQuantizers,
    QuantizedLinear,
    Watch,
    WeightOnlyLinear,
    is_transformed,
    refuse_transforms,
)
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.regions import HIGH_PRECISION, NO_REGION, Autocast, traced_recipe
from zerocast.nn.stateful_module import StatefulModule
from zerocast.nn.statistics import observer
from zerocast.nn.traced_layer import has_state
from zerocast.nn.traced_products import register, traced_product
from zerocast.recipes import Recipe
from zerocast.sharded.placement import all_tp_shards, check_tp_boundaries, is_sharded
from zerocast.tensors import QuantizedTensor, TensorParallelShard, rebuild_derived


class Quantizing(NamedTuple):
    """How the input of a product is quantized where it is made: by what, rounded to what first, and
    who is shown.
    """

    quantizer: Quantizer
    dtype: torch.dtype
    watch: Watch | None


class QuantizedModule(StatefulModule):
    """A module whose linear products are quantized under autocast.

    Attributes:
        gemms: how many linear products it has.
        name: under stochastic rounding, layers of different names draw different random words.
            :func:`zerocast.nn.convert` gives each layer its name in the model.
    """

    @property
    def is_traceable(self) -> bool:
        """Whether torch.compile traces its quantized products: not where it is tensor-parallel."""
        return not any(is_sharded(each) for each in self._parameters.values() if each is not None)

    # --- products ---

    def _linear(
        self,
        gemm: int,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        leading: Sequence[int] | None = None,
        fp8_output: bool = False,
        tp_shard: TensorParallelShard | None = None,
    ) -> torch.Tensor:
        """Product number ``gemm`` of this module: [..., K] -> [..., M].

        ``leading`` are the leading dimensions of the result, where those of ``input`` were
        flattened; ``part`` says which part of a larger one the weight is.

        Raises:
            InputError: for ``fp8_output`` outside of autocast; under it, where the recipe cannot
                hold a tensor that has to be quantized.
        """
        leading = tuple(input.shape[:-1] if leading is None else leading)
        if torch.compiler.is_compiling() and not fp8_output:
            return self._traced(gemm, input, weight, bias)[0]
        region = regions.current()
        # Where the weight is cut, a rank may have no columns of rows that there are.
        if region.enabled and (input.numel() or (tp_shard and math.prod(leading))):
            return self._quantized_linear(
                region, gemm, input, weight, bias, leading, fp8_output, tp_shard
            )
        if fp8_output:
            raise InputError(
                "fp8_output=True needs zerocast.autocast(enabled=True) around the layer, whose "
                "recipe says how the output is quantized."
            )
        input, bias, dtype = _cast(input, weight, bias)
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        if isinstance(weight, QuantizedTensor) and not is_transformed():
            out = WeightOnlyLinear.apply(input, weight, bias, dtype)
        else:
            out = torch.nn.functional.linear(input, weight, bias)
        if region.enabled or region.calibrating:
            # A rank without rows takes part, too: the states of all ranks join in one order.
            quantizers = self._registered(region, input.device)[gemm]
            quantizers.weight.tp_shard = tp_shard
            if input.numel():
                _calibrate(quantizers, input, weight, out)
        return out

    def _traced_recipe(self) -> str:
        """What counts for this layer in a function that is being compiled."""
        return traced_recipe()

    def _traces_quantized(self, input: torch.Tensor) -> bool:
        """Whether products of ``input`` are quantized in a function that is being compiled."""
        if not torch.compiler.is_compiling() or not input.numel():
            return False
        return self._traced_recipe() not in (NO_REGION, HIGH_PRECISION)

    def _traced(
        self,
        gemm: int,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: tuple[Any, ...] | None = None,
        norm: Sequence[torch.Tensor] = (),
        wants_norm: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """:meth:`_linear` in a function that is being compiled, of ``source(input)``, and what the
        norm made where that is wanted (:mod:`zerocast.nn.traced_products`).
        """
        recipe = self._traced_recipe()
        if not self._traces_quantized(input):
            if recipe not in (NO_REGION, HIGH_PRECISION) and has_state(recipe):
                assert self._handle is not None
                register(self._handle, recipe)
            return torch.nn.functional.linear(input, weight, bias), None
        leading = input.shape[:-1]
        if source is not None:
            dtype = _cast(input.new_empty(0), weight, None)[2] if norm else input.dtype
            bias = None if bias is None else bias.to(dtype)
        else:
            input, bias, dtype = _cast(input, weight, bias)
            _check_dtype(input, dtype)
        rows = input.reshape(-1, input.shape[-1])
        out, normed = traced_product(
            self._handle, gemm, rows, list(norm), weight, bias, recipe, source, dtype, wants_norm
        )
        out = torch.ops.aten._unsafe_view(out, (*leading, weight.shape[0]))
        return out, None if normed is None else normed.view(*leading, normed.shape[-1])

    def _quantized_linear(
        self,
        region: Autocast,
        gemm: int,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        leading: tuple[int, ...],
        fp8_output: bool,
        tp_shard: TensorParallelShard | None,
    ) -> torch.Tensor:
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        quantizers = self._registered(region, input.device)[gemm]
        quantizers.weight.tp_shard = tp_shard
        if isinstance(input, QuantizedTensor):
            dtype = input.dtype
            bias = None if bias is None else bias.to(dtype)
        else:
            input, bias, dtype = _cast(input, weight, bias)
            _check_dtype(input, dtype)
            input = input.reshape(-1, input.shape[-1])
        _check_shapes(quantizers, input, weight, tp_shard)
        watch = observer(self, gemm)
        output_shape = (*leading, weight.shape[0]) if fp8_output else None
        out = QuantizedLinear.apply(input, weight, bias, quantizers, dtype, output_shape, watch)
        if fp8_output:
            return out
        # Not a view, as torch's own is none: FSDP2 warns of modules that return views.
        return torch.ops.aten._unsafe_view(out, (*leading, weight.shape[0]))

    def _quantizing(
        self, gemm: int, source: torch.Tensor, weight: torch.Tensor
    ) -> Quantizing | None:
        """How the input of product ``gemm`` is quantized where it is made from ``source``; None
        where it is not.
        """
        region = regions.current()
        if not region.enabled or not source.numel():
            return None
        quantizers = self._registered(region, source.device)[gemm]
        rows = source.numel() // source.shape[-1]
        _require_holds(quantizers.input.recipe, (rows, weight.shape[1]), "input")
        columnwise = torch.is_grad_enabled() and weight.requires_grad
        quantizers.input.set_usage(rowwise=True, columnwise=columnwise)
        dtype = _cast(source.new_empty(0), weight, None)[2]
        return Quantizing(quantizers.input, dtype, observer(self, gemm))

    # --- the recipe's state ---

    def _registered(self, region: Autocast, device: torch.device) -> list[GemmQuantizers]:
        """The quantizers of each GEMM under the recipe of ``region``, which reduces their
        amaxes.
        """
        recipe = region.recipe
        assert recipe is not None
        refuse_transforms(self.name or type(self).__name__)
        if self._states is None or self._states[0].recipe != recipe:
            self._remember(recipe, device)
        assert self._states is not None
        for state in self._states:
            state.to(device)
        region.register(*self._states)
        return self._quantizers


def _check_dtype(input: torch.Tensor, dtype: torch.dtype) -> None:
    if input.dtype != dtype:
        raise InputError(
            f"input and weight of a layer must have one dtype, got {input.dtype} and {dtype}; "
            f"convert the input, or use torch.autocast."
        )


def _cast(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Input and bias in the dtype that ``torch.autocast`` asks for, and that dtype, or the
    weight's.
    """
    device = input.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return input, bias, weight.dtype
    dtype = torch.get_autocast_dtype(device)
    return input.to(dtype), None if bias is None else bias.to(dtype), dtype


def _prepare(weight: QuantizedTensor) -> None:
    """Rebuild stale copies of a weight, or refuse it, as its plan says."""
    weight.quantized_storage.prepare_for_forward(lambda storage: rebuild_derived([storage]))


def _check_shapes(
    quantizers: GemmQuantizers,
    input: torch.Tensor,
    weight: torch.Tensor,
    tp_shard: TensorParallelShard | None,
) -> None:
    """Raise where a tensor that forward or backward will quantize is not one that it can hold.

    Of the gradient, too: the backward would be too late. Of the other parts of a weight, too: their
    ranks wait for this one.
    """
    rows = input.numel() // input.shape[-1] if input.shape[-1] else 1
    shapes = [tuple(weight.shape)]
    if tp_shard is not None:
        shapes = list(dict.fromkeys(tuple(each.shape) for each in all_tp_shards(tp_shard)))
        if not isinstance(weight, QuantizedTensor):
            check_tp_boundaries("the layer's weight", tp_shard, quantizers.weight.recipe)
    wanted: list[tuple[str, Recipe, tuple[int, ...]]] = []
    for shape in shapes:
        if not isinstance(input, QuantizedTensor):
            wanted.append(("input", quantizers.input.recipe, (rows, shape[1])))
        if not isinstance(weight, QuantizedTensor) and tp_shard is None:
            wanted.append(("weight", quantizers.weight.recipe, shape))
        if torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad):
            wanted.append(
                ("gradient of the output", quantizers.grad_output.recipe, (rows, shape[0]))
            )
    for what, recipe, shape in wanted:
        _require_holds(recipe, shape, what)


def _require_holds(recipe: Recipe, shape: tuple[int, ...], what: str) -> None:
    try:
        recipe.check_shape(shape)
    except InputError as error:
        raise InputError(
            f"the layer's {what} cannot be quantized: {error} Or run the layer under "
            f"zerocast.autocast(enabled=False)."
        ) from error


def _calibrate(
    quantizers: GemmQuantizers, input: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    """Record what quantizing would record, the gradient of the output when it comes."""
    quantizers.input.calibrate(input.detach().reshape(-1, input.shape[-1]))
    if not isinstance(weight, QuantizedTensor):
        quantizers.weight.calibrate(weight.detach())
    if out.requires_grad:
        record: Callable[[torch.Tensor], None] = quantizers.grad_output.calibrate
        out.register_hook(lambda grad: record(grad.reshape(-1, grad.shape[-1])))
