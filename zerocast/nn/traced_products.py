"""The products of a layer as operations into which torch.compile does not look.

Inside a compiled function a product is one operation, and so is its backward, with the norm or the
activation of a fused layer in them. They run the functions of an uncompiled layer
(:mod:`zerocast.nn.traced_functions`), so their results are the same, bit for bit.

``zerocast::quantized_linear`` is for recipes without state. Under the others a layer makes its
recipe state at its first forward, registers with the reduction of the region around it, and takes
part in activation checkpoints. So ``zerocast::stateful_linear`` is given the layer's *handle*, an
int64 tensor with a number, and runs with the layer's own quantizers. A handle is an input of the
graph: one graph serves all layers of a kind, and a graph that another process made serves this
one's layers. For the backward the operation returns a *ticket*, another number, by which the
quantizer of the gradient is found: that of this forward, even if the layer has a newer one by then.

Note: the order of operations
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Compilers merge equal operations, drop, move and repeat them. Layers register with a reduction in
the same order on all ranks, and draws of stochastic rounding are counted. So each operation with a
handle says that it writes a tensor which the next one writes, too (one in forwards, one in
backwards), so that none can be merged with another one or run before it. Nothing reads these
tensors. Each run of a graph has a new one for the forward, because a graph with checkpoints saves
it. (torch 2.13 reorders the effects of ``torch.library``, and compiles none in a checkpoint.)

Operations inside of a checkpoint are repeated in the backward. Each has the number of its place in
the graph, *site*, by which :mod:`zerocast.nn.recompute` finds what its first run started from.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from zerocast.nn.layer_product import GemmQuantizers, Made
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recompute import as_in_first_run, keep_region
from zerocast.nn.statistics import observer
from zerocast.nn.traced_functions import (
    BACKWARD,
    FORWARD,
    BackwardArguments,
    as_product,
    fake_backward,
    fake_forward,
    in_buffers,
    needed,
    product_to_text,
    recipes_of,
    traced_backward,
    traced_forward,
)
from zerocast.nn.traced_layer import Ticket, has_state, layer_of, next_site, numbered, quantizers_of
from zerocast.tensors import QuantizedTensor


class _Here(threading.local):
    """The tensor that the operations of the next run of a graph write, of each thread."""

    def __init__(self) -> None:
        self.order = numbered(0)


_here, _order_of_grads = _Here(), numbered(0)

# --- what a layer calls where it is traced ---


def register(handle: torch.Tensor, recipe: str) -> None:
    """Register the states of the layer of ``handle`` with the region, where it has no rows to
    quantize.
    """
    _register(_here.order, handle, recipe, torch.is_grad_enabled(), next_site())


def traced_product(
    handle: torch.Tensor | None,
    gemm: int,
    input: torch.Tensor,
    norm: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    source: tuple[Any, ...] | None,
    dtype: torch.dtype,
    wants_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``source(input) @ weight.T + bias`` of quantized operands, with gradients.

    Args:
        handle: the handle of the layer; only a recipe with state needs it.
        gemm: the product's number in the layer.
        input, norm, weight, bias: as in :data:`FORWARD`.
        recipe, source, dtype, wants_norm: as for :func:`product_to_text`.

    Returns:
        [T, M], and what the norm made, [T, K], where it is wanted; both in ``dtype``.

    Raises:
        InputError: when it is traced, where the recipe cannot hold a tensor.
    """
    needs = needed(input, norm, weight, bias)
    product = product_to_text(recipe, source, dtype, wants_norm, needs)
    made: Any
    if not has_state(recipe):
        made = _linear(input, norm, [weight], bias, product, "")
    else:
        assert handle is not None
        at = (gemm, torch.is_grad_enabled(), next_site())
        if any(needs):
            tensors = (input, *[*norm, None, None][:2], weight, bias)
            facts = (product, source is not None, wants_norm, needs)
            made = _StatefulProduct.apply(*tensors, handle, _here.order, _order_of_grads, facts, at)
            made = made if wants_norm else (made,)
        else:
            made = _stateful(input, norm, [weight], bias, product, "", _here.order, handle, *at)
    return made[0], made[1] if wants_norm else None


# --- the derivative, of both kinds ---


def _keep(
    ctx: Any,
    tensors: tuple[torch.Tensor, list[torch.Tensor], torch.Tensor],
    product: str,
    has_source: bool,
    needs: Sequence[bool],
    saved: Sequence[torch.Tensor],
) -> None:
    """Keep for :func:`_arguments_of_backward` the input, norm and weight in ``tensors``, as far as
    the backward reads them, and what the operation ``saved``.
    """
    input, norm, weight = tensors
    kept = [input, *norm] if has_source else []
    ctx.num_inputs = len(kept)
    kept += [weight] if isinstance(weight, QuantizedTensor) and any(needs[:3]) else []
    ctx.num_kept = len(kept)
    ctx.save_for_backward(*kept, *saved)
    ctx.product, ctx.needs = product, needs
    ctx.shape, ctx.weight_dtype = tuple(weight.shape), weight.dtype


def _arguments_of_backward(
    ctx: Any, grad: torch.Tensor, grad_normed: torch.Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments :data:`BACKWARD`; what the operation saved is the fourth."""
    tensors = ctx.saved_tensors  # once, for each access runs the hooks on saved tensors
    inputs, weight = list(tensors[: ctx.num_inputs]), list(tensors[ctx.num_inputs : ctx.num_kept])
    saved = list(tensors[ctx.num_kept :])
    return grad, grad_normed, inputs, saved, weight, ctx.product, "", ctx.shape, ctx.weight_dtype


# --- the operations under recipes without state ---


@torch.library.custom_op(
    "zerocast::quantized_linear", mutates_args=(), schema=f"({FORWARD}) -> Tensor[]"
)
def _linear(*given: Any) -> list[torch.Tensor]:
    """:class:`Made`, as a list."""
    keep_region()
    quantizers = GemmQuantizers(*map(Quantizer, recipes_of(as_product(given[4])[0]).values()))
    return _listed(traced_forward(quantizers, None, *given))


@_linear.register_fake
def _(input: Any, norm: Any, weight: Any, bias: Any, product: str, buffers: str) -> Any:
    return _listed(fake_forward(input, weight, product, buffers))


def _listed(made: Made) -> list[torch.Tensor]:
    return [made.out, *([] if made.normed is None else [made.normed]), *made.tensors()]


@torch.library.custom_op(
    "zerocast::quantized_linear_backward", mutates_args=(), schema=f"({BACKWARD}) -> Tensor[]"
)
def _linear_backward(*given: Any) -> list[torch.Tensor]:
    """Return the gradients that are needed, of input, gamma, beta, weight and bias."""
    arguments = BackwardArguments(*given)
    quantizer = Quantizer(recipes_of(as_product(arguments.product)[0])["grad_output"])
    return [each for each in traced_backward(quantizer, None, arguments) if each is not None]


@_linear_backward.register_fake
def _(*given: Any) -> list[torch.Tensor]:
    return [each for each in fake_backward(BackwardArguments(*given)) if each is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    input, norm, (weight,), _, text, _ = inputs
    _, product = as_product(text)
    ctx.num_norm, ctx.wants_norm = len(norm), product.wants_norm
    saved = output[1 + product.wants_norm :]
    has_source = product.source is not None
    _keep(ctx, (input, norm, weight), text, has_source, product.needs, saved)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    grad, grad_normed = grads[0], grads[1] if ctx.wants_norm else None
    if grad is None and grad_normed is None:
        return (None,) * 6
    # As autograd does for an uncompiled layer.
    if grad is None:
        assert grad_normed is not None
        grad = grad_normed.new_zeros(len(grad_normed), ctx.shape[0])
    if ctx.wants_norm and grad_normed is None:
        grad_normed = grad.new_zeros(len(grad), ctx.shape[1])
    made = iter(_linear_backward(*_arguments_of_backward(ctx, grad, grad_normed)))
    of_input, *of_norm, of_weight, of_bias = [next(made) if n else None for n in ctx.needs]
    return of_input, of_norm[: ctx.num_norm], [of_weight], of_bias, None, None


_linear.register_autograd(_differentiate, setup_context=_setup_context)


# --- the operations under recipes with state ---

# Operations that write their arguments return a fixed number of tensors: empty ones fill up.
_MOST_SAVED = 8  # mean, rstd, and three buffers of each operand


class _StatefulProduct(torch.autograd.Function):
    """The derivative: torch registers none for an operation that writes its arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        gamma: torch.Tensor | None,
        beta: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        handle: torch.Tensor,
        order: torch.Tensor,
        order_of_grads: torch.Tensor,
        facts: tuple[str, bool, bool, list[bool]],
        at: tuple[int, bool, int],
    ) -> Any:
        product, has_source, wants_norm, needs = facts
        norm = [each for each in (gamma, beta) if each is not None]
        out, normed, *saved = _stateful(
            input, norm, [weight], bias, product, "", order, handle, *at
        )
        _keep(ctx, (input, norm, weight), product, has_source, needs, saved)
        ctx.order = order_of_grads  # not saved: the backwards of other steps write it in between
        ctx.wants_norm = wants_norm
        return (out, normed) if wants_norm else out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = _arguments_of_backward(ctx, grads[0], grads[1] if ctx.wants_norm else None)
        ticket, *saved = given[3]
        made = _stateful_backward(*given[:3], saved, *given[4:], ctx.order, ticket)
        needed_ones = [grad if need else None for grad, need in zip(made, ctx.needs, strict=True)]
        return *needed_ones, None, None, None, None, None


@torch.library.custom_op(
    "zerocast::register",
    mutates_args=("order",),
    schema="(Tensor(a!) order, Tensor handle, str recipe, bool grads, int site) -> ()",
)
def _register(*given: Any) -> None:
    _, handle, recipe, grads, site = given
    layer = _running(handle)
    with as_in_first_run(layer, site):
        quantizers_of(layer, recipe, handle.device, grads)


@_register.register_fake
def _(*given: Any) -> None:
    return None


@torch.library.custom_op(
    "zerocast::stateful_linear",
    mutates_args=("order",),
    schema=f"({FORWARD}, Tensor(a!) order, Tensor handle, int gemm, bool grads, int site) -> "
    f"({', '.join(['Tensor'] * (3 + _MOST_SAVED))})",
)
def _stateful(*given: Any) -> tuple[torch.Tensor, ...]:
    """Return the result, what the norm made, the ticket, and what the backward reads."""
    *product, _, handle, gemm, grads, site = given
    recipe, _ = as_product(product[4])
    keep_region()
    layer = _running(handle)
    with as_in_first_run(layer, site):
        quantizers = quantizers_of(layer, recipe, product[0].device, grads)[gemm]
        quantizers.weight.tp_shard = None
        watch = observer(layer, gemm)
        made = traced_forward(quantizers, watch, *product)
    return _filled(made, Ticket.new(quantizers.grad_output, watch))


@_stateful.register_fake
def _(input: Any, norm: Any, weight: Any, bias: Any, product: str, buffers: str, *_: Any) -> Any:
    made = fake_forward(input, weight, product, buffers)
    return _filled(made, torch.empty(2, dtype=torch.int64, device="cpu"))


@torch.library.custom_op(
    "zerocast::stateful_linear_backward",
    mutates_args=("order",),
    schema=f"({BACKWARD}, Tensor(a!) order, Tensor ticket) -> ({', '.join(['Tensor'] * 5)})",
)
def _stateful_backward(*given: Any) -> tuple[torch.Tensor, ...]:
    """Return the gradients of input, gamma, beta, weight and bias."""
    *arguments, _, ticket = given
    made = traced_backward(*Ticket.found(ticket), BackwardArguments(*arguments))
    return tuple(_or_empty(each, given[0]) for each in made)


@_stateful_backward.register_fake
def _(*given: Any) -> tuple[torch.Tensor, ...]:
    made = fake_backward(BackwardArguments(*given[:-2]))
    return tuple(_or_empty(each, given[0]) for each in made)


def _or_empty(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if tensor is None else tensor


def _filled(made: Made, ticket: torch.Tensor) -> tuple[torch.Tensor, ...]:
    saved = made.tensors()
    missing = _MOST_SAVED - len(saved)
    assert missing >= 0, missing
    empty = (made.out.new_empty(0) for _ in range(missing))
    return made.out, _or_empty(made.normed, made.out), ticket, *saved, *empty


def _running(handle: torch.Tensor) -> Any:
    """Return the layer of ``handle``; from here on operations write a new tensor, which belongs to
    this run of the graph.
    """
    _here.order = numbered(0)
    return layer_of(handle)


for _operation in (_linear, _linear_backward, _stateful, _stateful_backward):
    QuantizedTensor.operations[_operation._opoverload] = in_buffers
