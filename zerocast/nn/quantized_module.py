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

import torch

from zerocast.errors import InputError
from zerocast.nn import regions
from zerocast.nn.layer_product import GemmQuantizers, Output, ProductInputs
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
from zerocast.recipes import Recipe
from zerocast.sharded.placement import all_tp_shards, check_tp_boundaries, is_sharded
from zerocast.tensors import QuantizedTensor, rebuild_derived


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
        input = _sourced(given)
        return self._in_high_precision(region, given._replace(input=input)), input

    def _traced_recipe(self) -> str:
        """Return what quantizes this layer's products in a function that is being compiled."""
        return traced_recipe()

    def _traced(self, given: ProductInputs) -> Output:
        """Compute :meth:`_product` in a function that is being compiled."""
        input, recipe = given.input, self._traced_recipe()
        in_region = recipe not in (NO_REGION, HIGH_PRECISION)
        if not (in_region and input.numel()):
            if not in_region and torch.is_grad_enabled() and regions.were_entered:
                plain_run()
            input = _sourced(given)
            return torch.nn.functional.linear(input, given.weight, given.bias), input
        rows, dtype = _rows(given)
        return _like_input(input, *traced_product(self._handle, rows, recipe, dtype))

    def _quantized(self, region: Autocast, given: ProductInputs, *, fp8_output: bool) -> Output:
        gemm, input, weight, *_ = given
        if isinstance(weight, QuantizedTensor):
            _prepare(weight)
        quantizers = self._registered(region, input.device)[gemm]
        quantizers.weight.tp_shard = given.tp_shard
        given, dtype = _rows(given)
        _check_shapes(quantizers, given)
        gamma, beta = (*given.norm, None, None)[:2]
        out, normed = QuantizedProduct.apply(
            given.input,
            gamma,
            beta,
            weight,
            given.bias,
            given.source,
            dtype,
            given.wants_norm,
            quantizers,
            (*input.shape[:-1], weight.shape[0]) if fp8_output else None,
            observer(self, gemm),
        )
        return (out, normed) if fp8_output else _like_input(input, out, normed)

    def _in_high_precision(self, region: Autocast, given: ProductInputs) -> torch.Tensor:
        """Compute the product with a decoded weight; record amaxes if the region asks for them."""
        (_, input, weight, bias, *_), dtype = _cast(given)
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


def _sourced(given: ProductInputs) -> torch.Tensor:
    """Return what the product multiplies, computed by torch's own functions."""
    if given.source is None:
        return given.input
    return in_high_precision(given.source, given.input, given.norm)


def _rows(given: ProductInputs) -> tuple[ProductInputs, torch.dtype]:
    """Return a product's inputs with input and bias as its quantized form takes them, and the dtype
    of the result.

    Raises:
        InputError: where input and weight differ in dtype, outside of torch.autocast.
    """
    if given.source is None and isinstance(given.input, QuantizedTensor):
        dtype = given.input.dtype
        return given._replace(bias=None if given.bias is None else given.bias.to(dtype)), dtype
    if given.source is None:
        given, dtype = _cast(given)
        if given.input.dtype != dtype:
            raise InputError(
                f"input and weight of a layer must have one dtype, got {given.input.dtype} and "
                f"{dtype}; convert the input, or use torch.autocast."
            )
    else:
        dtype = given.input.dtype
        if given.norm:
            dtype = autocast_dtype(given.input.device) or given.weight.dtype
        given = given._replace(bias=None if given.bias is None else given.bias.to(dtype))
    return given._replace(input=given.input.reshape(-1, given.input.shape[-1])), dtype


def _cast(given: ProductInputs) -> tuple[ProductInputs, torch.dtype]:
    """Return the inputs, those in high precision in the dtype that ``torch.autocast`` asks for, and
    that dtype; outside of it all as they are, and the weight's dtype.
    """
    dtype = autocast_dtype(given.input.device)
    if dtype is None:
        return given, given.weight.dtype
    bias = None if given.bias is None else given.bias.to(dtype)
    return given._replace(input=given.input.to(dtype), bias=bias), dtype


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
    """Rebuild stale copies of a weight, or raise an error, as its plan is configured."""
    weight.quantized_storage.prepare_for_forward(lambda storage: rebuild_derived([storage]))


def _check_shapes(quantizers: GemmQuantizers, given: ProductInputs) -> None:
    """Raise :class:`InputError` if a recipe cannot hold a tensor that forward or backward
    quantizes.

    The gradient is checked here because the backward would be too late, and the other
    tensor-parallel shards because their ranks wait for this one.
    """
    input, weight, tp_shard = given.input, given.weight, given.tp_shard
    rows = input.numel() // input.shape[-1] if input.shape[-1] else 1
    is_quantized = given.source is None and isinstance(input, QuantizedTensor)
    needs_grad = any(each.requires_grad for each in (input, *given.norm, weight))
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
