"""The products of a layer as operations into which torch.compile does not look.

Inside a compiled function a product is one operation, and so is its backward, with the norm or the
activation of a fused layer in them. They run the functions of an uncompiled layer
(:mod:`zerocast.nn.layer_product`), so their results are the same, bit for bit. Compilers may
merge, move, repeat or drop them, for they depend on nothing but their arguments.

The exception is the stochastic rounding of a gradient, whose draws are counted by the layer. The
backward finds the layer by its *handle*, an int64 tensor with a number. A handle is an input of the
graph: one graph serves all layers of a kind, and a graph that another process made serves this
one's layers. Such a backward says that it writes a tensor, the same for all, so none can be merged
with another one or run before it. Nothing reads this tensor.

Recipes with state of the forward break the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch

from zerocast.errors import UnsupportedError
from zerocast.nn.layer_product import (
    GemmQuantizers,
    Made,
    Output,
    ProductInputs,
    run_backward,
    run_forward,
)
from zerocast.nn.quantizer import Quantizer, StateSlot
from zerocast.nn.recompute import note_compiled_run
from zerocast.nn.regions import is_exporting
from zerocast.nn.traced_functions import (
    empty_operands,
    fake_backward,
    fake_forward,
    in_buffers,
    product_of,
    product_to_text,
    recipes_of,
    whole_weight,
)
from zerocast.nn.traced_layer import draws_gradients, layer_of, numbered
from zerocast.recipes import recipe_from_text
from zerocast.tensors import QuantizedTensor

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Those of input, gamma, beta, weight and bias. An operation that writes cannot return a list."""

_order = numbered(0)
_UNUSED = StateSlot(dict, lambda amax: None)
"""The state of the quantizers of a forward: only those of gradients would have any."""

# --- what a layer calls where it is traced ---


def plain_run() -> None:
    """Make the graph raise where it is computed again, without the region that its first run had.

    torch.compile then runs a graph of plain products instead of that of the region.
    """
    if not is_exporting():
        _plain_run(_order)


def traced_product(
    handle: torch.Tensor | None, given: ProductInputs, recipe: str, dtype: torch.dtype
) -> Output:
    """Compute the product ``given``, its input [T, S], of quantized operands, with gradients.

    Args:
        handle: the handle of the layer; only stochastic rounding of gradients needs it.
        given: the inputs of the product.
        recipe: the text of the recipe.
        dtype: the dtype of the result.

    Returns:
        [T, M], and what the norm made, [T, K], where it is wanted; both in ``dtype``.

    Raises:
        InputError: when it is traced, where the recipe cannot hold a tensor.
    """
    gemm, input, weight, bias, source, norm, wants_norm, _ = given
    gamma, beta = (*norm, None, None)[:2]
    grads = torch.is_grad_enabled()
    needs = [
        grads and each is not None and each.requires_grad
        for each in (input, gamma, beta, weight, bias)
    ]
    fields = None if source is None else tuple(source)  # no named tuple is a constant of a graph
    product = product_to_text(recipe, fields, dtype, wants_norm, needs)
    if not any(needs):
        made = _linear(input, list(norm), [weight], bias, product)
        return made[0], made[1] if wants_norm else None
    draws = draws_gradients(recipe) and not is_exporting()
    drawing = (handle, _order, gemm) if draws else (None, None, 0)
    facts = (product, source is not None, wants_norm, needs)
    out = _Product.apply(input, gamma, beta, weight, bias, *drawing, facts)
    return out if wants_norm else (out, None)


# --- the operations ---


@torch.library.custom_op("zerocast::plain_run", mutates_args=("order",))
def _plain_run(order: torch.Tensor) -> None:
    note_compiled_run(None)


@_plain_run.register_fake
def _(order: torch.Tensor) -> None:
    return None


@torch.library.custom_op("zerocast::quantized_linear", mutates_args=())
def _linear(
    input: torch.Tensor,  # [T, K]; with a source, what that computes the input from, [T, S]
    norm: Sequence[torch.Tensor],  # gamma and beta [K], as far as the source has them
    weight: Sequence[torch.Tensor],  # [M, K]: one tensor, or the buffers of a quantized weight
    bias: torch.Tensor | None,  # [M] in the product's dtype
    product: str,
) -> list[torch.Tensor]:
    """:class:`Made`, as a list."""
    recipe, computed, _ = product_of(product)
    note_compiled_run(recipe_from_text(recipe))
    quantizers = GemmQuantizers(*(Quantizer(r, slot=_UNUSED) for r in recipes_of(recipe).values()))
    whole = whole_weight(weight, product)
    return _listed(run_forward(computed, quantizers, None, input, norm, whole, bias))


@_linear.register_fake
def _(input: Any, norm: Any, weight: Any, bias: Any, product: str) -> Any:
    return _listed(fake_forward(input, whole_weight(weight, product), product))


def _listed(made: Made) -> list[torch.Tensor]:
    return [made.out, *([] if made.normed is None else [made.normed]), *made.tensors()]


@torch.library.custom_op("zerocast::quantized_linear_backward", mutates_args=("order",))
def _linear_backward(
    grad: torch.Tensor,  # of the result, [T, M]
    grad_normed: torch.Tensor | None,  # of what the norm made, [T, K]
    inputs: Sequence[torch.Tensor],  # the source's input and parameters
    saved: Sequence[torch.Tensor],  # what the forward saved
    weight: Sequence[torch.Tensor],  # the buffers of a quantized weight; none for another
    product: str,
    shape: Sequence[int],  # of the weight
    weight_dtype: torch.dtype,
    handle: torch.Tensor | None,
    order: torch.Tensor | None,
    gemm: int,
) -> Gradients:
    """Return the gradients of input, gamma, beta, weight and bias; empty ones that none needs."""
    recipe, computed, _ = product_of(product)
    of_gradient = recipes_of(recipe)["grad_output"]
    if not of_gradient.state:
        quantizer = Quantizer(of_gradient)
    elif handle is not None:
        layer = layer_of(handle)
        quantizer = layer.gradient_quantizer(recipe_from_text(recipe), gemm, grad.device)
    else:
        raise UnsupportedError(
            f"an exported graph has no backward under {of_gradient}, which rounds gradients "
            f"stochastically by the state of a layer; export for inference, or with "
            f"disable_stochastic_rounding=True."
        )
    rows, meta = grad.shape[0], torch.device("meta")
    operands = empty_operands(product, rows, shape, weight_dtype, bool(weight), meta)
    x, w = operands.restore(saved[computed.num_statistics :])
    if weight:
        quantized = whole_weight(weight, product)
        assert isinstance(quantized, QuantizedTensor)
        w = quantized.quantized_storage
    statistics = saved[: computed.num_statistics]
    grads = grad, grad_normed
    made = run_backward(computed, quantizer, None, grads, inputs, statistics, x, w, weight_dtype)
    return _without_none(made, grad)


@_linear_backward.register_fake
def _(
    grad: Any, grad_normed: Any, inputs: Any, saved: Any, weight: Any, product: str, shape: Any,
    weight_dtype: torch.dtype, *drawing: Any,
) -> Any:  # fmt: skip
    made = fake_backward(grad, inputs, product, shape, weight_dtype)
    return _without_none(made, grad)


def _without_none(made: Sequence[torch.Tensor | None], like: torch.Tensor) -> Gradients:
    input, gamma, beta, weight, bias = (
        like.new_empty(0) if gradient is None else gradient for gradient in made
    )
    return input, gamma, beta, weight, bias


for _operation in (_linear, _linear_backward):
    QuantizedTensor.operations[_operation._opoverload] = in_buffers

# --- the derivative ---


class _Product(torch.autograd.Function):
    """The derivative. torch registers none with an argument of the backward alone, such as the
    order: a graph that gave it to the forward would save it, and other backwards write it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        handle: torch.Tensor | None,
        order: torch.Tensor | None,
        gemm: int,
        facts: tuple[str, bool, bool, list[bool]],
    ) -> Any:
        product, has_source, wants_norm, needs = facts
        norm = [each for each in (gamma, beta) if each is not None]
        out, *others = _linear(input, norm, [weight], bias, product)
        kept = [input, *norm] if has_source else []
        ctx.num_inputs = len(kept)
        kept += [weight] if isinstance(weight, QuantizedTensor) and any(needs[:3]) else []
        ctx.num_kept = len(kept)
        ctx.save_for_backward(*kept, *others[1 if wants_norm else 0 :])
        ctx.product, ctx.needs, ctx.wants_norm = product, needs, wants_norm
        ctx.shape, ctx.weight_dtype = tuple(weight.shape), weight.dtype
        ctx.handle, ctx.order, ctx.gemm = handle, order, gemm
        return (out, others[0]) if wants_norm else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors  # once, for each access runs the hooks on saved tensors
        made = _linear_backward(
            grads[0],
            grads[1] if ctx.wants_norm else None,
            list(tensors[: ctx.num_inputs]),
            list(tensors[ctx.num_kept :]),
            list(tensors[ctx.num_inputs : ctx.num_kept]),
            ctx.product,
            ctx.shape,
            ctx.weight_dtype,
            ctx.handle,
            ctx.order,
            ctx.gemm,
        )
        needed_ones = [grad if need else None for grad, need in zip(made, ctx.needs, strict=True)]
        return *needed_ones, None, None, None, None
