"""QuantizedModule: the common base of layers with quantized products.

A layer that runs under :class:`zerocast.autocast` has a :class:`RecipeState` for its forward and
one for its backward, made in its first forward under a recipe, and the quantizers of its GEMMs,
whose state is there (:mod:`zerocast.nn.stateful_module`).

A product is computed in one of three ways:

    autocast             both operands quantized (:class:`QuantizedProduct`)
    a quantized weight   decoded, times the input as it is (:class:`WeightOnlyLinear`)
    neither              ``torch.nn.functional.linear``

In the last two, amaxes are recorded if autocast calibrates.

Inside ``torch.compile`` a quantized weight is decoded in the graph, which is entered only if its
derived copies are not stale. Under a region of autocast the products are operations of the graph
(:mod:`zerocast.nn.traced_products`).
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from zerocast.errors import InputError
from zerocast.nn import regions
from zerocast.nn.layer_product import GemmQuantizers
from zerocast.nn.linear_functions import (
    QuantizedProduct,
    WeightOnlyLinear,
    is_transformed,
    refuse_transforms,
)
from zerocast.nn.quantized_ops import in_high_precision
from zerocast.nn.regions import HIGH_PRECISION, NO_REGION, Autocast, is_traced, traced_recipe
from zerocast.nn.stateful_module import StatefulModule
from zerocast.nn.statistics import observer
from zerocast.nn.traced_products import plain_run, traced_product
from zerocast.numerics import FusedOp
from zerocast.recipes import Recipe
from zerocast.sharded.placement import all_tp_shards, check_tp_boundaries, is_sharded
from zerocast.tensors import QuantizedTensor, TensorParallelShard, rebuild_derived


class ProductSource(NamedTuple):
    """The norm or the activation that makes what a product multiplies.

    Attributes:
        op: the fields of its :class:`zerocast.numerics.FusedOp` (torch.compile traces no such
            object); None where the input itself is multiplied.
        norm: weight and bias of a norm, [K] each, as far as it has them.
        wants_norm: whether the layer returns what the norm made, too.
    """

    op: tuple[Any, ...] | None = None
    norm: tuple[torch.Tensor, ...] = ()
    wants_norm: bool = False

    def in_high_precision(self, input: torch.Tensor) -> torch.Tensor:
        """Compute it by torch's own functions; return the input itself without an operation."""
        if self.op is None:
            return input
        return in_high_precision(*self.op, input=input, norm=self.norm)


NO_SOURCE = ProductSource()


Output: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""A product, and what a norm made of its input, or None."""


class ProductInputs(NamedTuple):
    """The inputs of one product of a layer, ``source(input) @ weight.T + bias``.

    Attributes:
        gemm: the product's number in the layer.
        input: [..., S]; S = K without a source.
        weight: [M, K].
        bias: [M], or None.
        source: the function that makes [..., K] of the input.
        tp_shard: which rows or columns of a larger one the weight is.
    """

    gemm: int
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    source: ProductSource = NO_SOURCE
    tp_shard: TensorParallelShard | None = None


class QuantizedModule(StatefulModule):
    """A module whose linear products are quantized under autocast.

    Attributes:
        gemms: the number of its linear products.
        name: under stochastic rounding, layers of different names draw different random bits.
            :func:`zerocast.nn.convert` gives each layer its name in the model.
    """

    @property
    def is_traceable(self) -> bool:
        """Whether torch.compile traces its quantized products: not where it is tensor-parallel."""
        return not any(is_sharded(each) for each in self._parameters.values() if each is not None)

    # --- products ---

    def _product(self, given: ProductInputs, *, fp8_output: bool = False) -> Output:
        """Compute a product, quantized with ``fp8_output``; return what a norm made, too, if it is
        wanted.

        Returns:
            [..., M], and [..., K] or None.

        Raises:
            InputError: for ``fp8_output`` outside of autocast; under it, where the recipe cannot
                hold a tensor that has to be quantized.
        """
        if is_traced() and not fp8_output:
            return self._traced(given)
        region, input = regions.current(), given.input
        # Under tensor parallelism the input may have rows, and this rank none of its columns.
        if region.enabled and (input.numel() or (given.tp_shard and math.prod(input.shape[:-1]))):
            return self._quantized(region, given, fp8_output=fp8_output)
        if fp8_output:
            raise InputError(
                "fp8_output=True needs zerocast.autocast(enabled=True) around the layer, whose "
                "recipe says how the output is quantized."
            )
        input = given.source.in_high_precision(input)
        return self._in_high_precision(region, given._replace(input=input)), input

    def _traced_recipe(self) -> str:
        """Return what quantizes this layer's products in a function that is being compiled."""
        return traced_recipe()

    def _traced(self, given: ProductInputs) -> Output:
        """Compute :meth:`_product` in a function that is being compiled."""
        gemm, input, weight, bias, source, _ = given
        recipe = self._traced_recipe()
        in_region = recipe not in (NO_REGION, HIGH_PRECISION)
        if not (in_region and input.numel()):
            if not in_region and torch.is_grad_enabled() and regions.were_entered:
                plain_run()
            input = source.in_high_precision(input)
            return torch.nn.functional.linear(input, weight, bias), input
        rows, bias, dtype = _rows(given)
        out, normed = traced_product(
            self._handle, gemm, rows, list(source.norm), weight, bias, recipe, source.op, dtype,
            source.wants_norm,
        )  # fmt: skip
        return _like_input(input, out, normed)

    def _quantized(self, region: Autocast, given: ProductInputs, *, fp8_output: bool) -> Output:
        gemm, input, weight, _, source, tp_shard = given
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        quantizers = self._registered(region, input.device)[gemm]
        quantizers.weight.tp_shard = tp_shard
        rows, bias, dtype = _rows(given)
        _check_shapes(quantizers, given._replace(input=rows))
        gamma, beta = (*source.norm, None, None)[:2]
        out, normed = QuantizedProduct.apply(
            rows,
            gamma,
            beta,
            weight,
            bias,
            None if source.op is None else FusedOp(*source.op),
            dtype,
            source.wants_norm,
            quantizers,
            (*input.shape[:-1], weight.shape[0]) if fp8_output else None,
            observer(self, gemm),
        )
        return (out, normed) if fp8_output else _like_input(input, out, normed)

    def _in_high_precision(self, region: Autocast, given: ProductInputs) -> torch.Tensor:
        """Compute the product with a decoded weight; record amaxes if the region asks for them."""
        weight = given.weight
        input, bias, dtype = _cast(given)
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        if isinstance(weight, QuantizedTensor) and not is_transformed():
            out = WeightOnlyLinear.apply(input, weight, bias, dtype)
        else:
            out = torch.nn.functional.linear(input, weight, bias)
        if region.enabled or region.calibrating:
            # A rank without rows registers, too: the states of all ranks do so in one order.
            quantizers = self._registered(region, input.device)[given.gemm]
            quantizers.weight.tp_shard = given.tp_shard
            if input.numel():
                _calibrate(quantizers, input, weight, out)
        return out

    # --- the recipe's state ---

    def _registered(self, region: Autocast, device: torch.device) -> list[GemmQuantizers]:
        """Return the quantizers of each GEMM under the recipe of ``region``, which reduces their
        amaxes.
        """
        recipe = region.recipe
        assert recipe is not None
        refuse_transforms(self.name or type(self).__name__)
        states = self._states
        if states is None or states[0].recipe != recipe or states[0].device != device:
            states = self._take_states(recipe, device)
        region.register(*states)
        return self._quantizers


def _rows(given: ProductInputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Return input and bias as a quantized product takes them, and the dtype of its result.

    Raises:
        InputError: where input and weight differ in dtype, outside of torch.autocast.
    """
    _, input, weight, bias, source, _ = given
    is_quantized = source.op is None and isinstance(input, QuantizedTensor)
    if source.op is None and not is_quantized:
        input, bias, dtype = _cast(given)
        if input.dtype != dtype:
            raise InputError(
                f"input and weight of a layer must have one dtype, got {input.dtype} and {dtype}; "
                f"convert the input, or use torch.autocast."
            )
    else:
        dtype = input.dtype
        if source.norm:
            dtype = autocast_dtype(input.device) or weight.dtype
        bias = None if bias is None else bias.to(dtype)
    return input if is_quantized else input.reshape(-1, input.shape[-1]), bias, dtype


def _cast(given: ProductInputs) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Return input and bias in the dtype that ``torch.autocast`` asks for, and that dtype; outside
    of it both as they are, and the weight's dtype.
    """
    _, input, weight, bias, *_ = given
    dtype = autocast_dtype(input.device)
    if dtype is None:
        return input, bias, weight.dtype
    return input.to(dtype), None if bias is None else bias.to(dtype), dtype


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that ``torch.autocast`` asks for; None outside of it."""
    kind = device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def _like_input(input: torch.Tensor, out: torch.Tensor, normed: torch.Tensor | None) -> Output:
    """Return the results [T, ...] with the leading dimensions of ``input``."""
    leading = input.shape[:-1]
    # Not a view: FSDP2 warns of modules that return views, and torch's own return none.
    out = torch.ops.aten._unsafe_view(out, (*leading, out.shape[1]))
    return out, None if normed is None else normed.view(*leading, normed.shape[1])


def _prepare(weight: QuantizedTensor) -> None:
    """Rebuild stale copies of a weight, or raise an error, as the plan that cast it was told."""
    weight.quantized_storage.prepare_for_forward(lambda storage: rebuild_derived([storage]))


def _check_shapes(quantizers: GemmQuantizers, given: ProductInputs) -> None:
    """Raise :class:`InputError` if a recipe cannot hold a tensor that forward or backward
    quantizes.

    The gradient is checked here because the backward would be too late, and the other
    tensor-parallel shards because their ranks wait for this one.
    """
    _, input, weight, _, source, tp_shard = given
    rows = input.numel() // input.shape[-1] if input.shape[-1] else 1
    is_quantized = source.op is None and isinstance(input, QuantizedTensor)
    needs_grad = any(each.requires_grad for each in (input, *source.norm, weight))
    shapes = [tuple(weight.shape)]
    if tp_shard is not None:
        shapes = list(dict.fromkeys(tuple(each.shape) for each in all_tp_shards(tp_shard)))
        if not isinstance(weight, QuantizedTensor):
            check_tp_boundaries("the layer's weight", tp_shard, quantizers.weight.recipe)
    wanted: list[tuple[str, Recipe, tuple[int, ...]]] = []
    for shape in shapes:
        if not is_quantized:
            wanted.append(("input", quantizers.input.recipe, (rows, shape[1])))
        if not isinstance(weight, QuantizedTensor) and tp_shard is None:
            wanted.append(("weight", quantizers.weight.recipe, shape))
        if torch.is_grad_enabled() and needs_grad:
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
    """Record the amaxes that quantizing would record; that of the output's gradient in the
    backward.
    """
    quantizers.input.calibrate(input.detach().reshape(-1, input.shape[-1]))
    if not isinstance(weight, QuantizedTensor):
        quantizers.weight.calibrate(weight.detach())
    if out.requires_grad:
        record: Callable[[torch.Tensor], None] = quantizers.grad_output.calibrate
        out.register_hook(lambda grad: record(grad.reshape(-1, grad.shape[-1])))
