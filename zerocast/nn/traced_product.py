"""The products of a layer as operations that torch.compile takes whole.

Inside a compiled function a product is ``zerocast::quantized_linear``, whose backward is
``zerocast::quantized_linear_backward``; of a fused layer they hold the norm or the activation
before it, too. Both run the functions of an uncompiled layer
(:class:`zerocast.nn.linear_functions.QuantizedLinear` and :mod:`zerocast.nn.quantized_functions`)
on the tensors that they are given, so their results are the same, bit for bit. What the tensors
mean crosses the border as text, and all of it: a compiled graph may be loaded from a cache by a
process that never traced it.

These operations are for recipes that remember nothing between casts. The others are served by
:mod:`zerocast.nn.traced_memory`, which runs the same functions with the layer's own quantizers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch

from zerocast.nn.recompute import keep_region
from zerocast.nn.traced_functions import (
    Made,
    fake_backward,
    fake_forward,
    in_buffers,
    new_quantizers,
    run_backward,
    run_forward,
)
from zerocast.tensors import QuantizedTensor

FORWARD = (
    "Tensor input, Tensor[] norm, Tensor[] weight, Tensor? bias, str recipe, str source, "
    "ScalarType dtype, bool wants_norm, bool[] needs, str meaning"
)
"""The arguments of a product:

    input       [T, K]; of a source, what it is computed from, [T, S]
    norm        gamma and beta [K], as far as the source has them
    weight      [M, K]: one tensor, or the buffers of a quantized weight
    bias        [M] in ``dtype``
    recipe      of the region, as a text
    source      the norm or the activation that makes the input, by :func:`source_to_text`; or ""
    dtype       of the result, and of what the source makes
    wants_norm  whether what a norm makes is returned, too
    needs       whether input, gamma, beta, weight and bias need gradients
    meaning     of the buffers of a weight; else ""
"""

BACKWARD = (
    "Tensor grad, Tensor? grad_normed, Tensor[] inputs, Tensor[] saved, Tensor[] weight, "
    "str recipe, str source, str meaning, int[] shape, ScalarType weight_dtype, bool[] needs"
)
"""The arguments of its backward: the gradients of what it returned, the source's input and
parameters, what the forward saved, a quantized weight or nothing, and shape and dtype of the
weight.
"""


def traced_product(
    input: torch.Tensor,
    norm: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    source: str,
    dtype: torch.dtype,
    wants_norm: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``source(input) @ weight.T + bias`` of quantized operands, with gradients; the arguments are
    those of :data:`FORWARD`.

    Returns:
        [T, M], and what the norm made, [T, K], where it is wanted; both in ``dtype``.

    Raises:
        InputError: when it is traced, where the recipe cannot hold a tensor.
    """
    needs = needed(input, norm, weight, bias)
    made = _linear(input, norm, [weight], bias, recipe, source, dtype, wants_norm, needs, "")
    return made[0], made[1] if wants_norm else None


def needed(
    input: torch.Tensor,
    norm: list[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[bool]:
    """Which gradients a backward will need: of input, gamma, beta, weight and bias."""
    gamma = norm[0] if norm else None
    beta = norm[1] if len(norm) > 1 else None
    grads = torch.is_grad_enabled()
    return [grads and t is not None and t.requires_grad for t in (input, gamma, beta, weight, bias)]


def source_to_text(function: str, eps: float = 0.0, zero_centered_gamma: bool = False) -> str:
    """For :func:`traced_product`: a norm or an activation, by the fields of :class:`FusedOp`."""
    return json.dumps([function, eps, zero_centered_gamma])


# As torch.compiler.assume_constant_result does, which loads the compiler.
source_to_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


# --- the operations ---


@torch.library.custom_op(
    "zerocast::quantized_linear", mutates_args=(), schema=f"({FORWARD}) -> Tensor[]"
)
def _linear(
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    recipe: str,
    source: str,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
    meaning: str,
) -> list[torch.Tensor]:
    """:class:`Made`, as a list."""
    keep_region()
    made = run_forward(
        new_quantizers(recipe), None,
        input, norm, weight, bias, source, dtype, wants_norm, needs, meaning,
    )  # fmt: skip
    return _listed(made)


@_linear.register_fake
def _(
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    *others: Any,
) -> list[torch.Tensor]:
    return _listed(fake_forward(input, weight, *others))


def _listed(made: Made) -> list[torch.Tensor]:
    return [made.out, *([] if made.normed is None else [made.normed]), *made.saved]


@torch.library.custom_op(
    "zerocast::quantized_linear_backward", mutates_args=(), schema=f"({BACKWARD}) -> Tensor[]"
)
def _backward(
    grad: torch.Tensor,
    grad_normed: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    recipe: str,
    *others: Any,
) -> list[torch.Tensor]:
    """The gradients that are needed, of input, gamma, beta, weight and bias."""
    quantizer = new_quantizers(recipe).grad_output
    made = run_backward(quantizer, None, grad, grad_normed, inputs, saved, weight, recipe, *others)
    return [each for each in made if each is not None]


@_backward.register_fake
def _(
    grad: torch.Tensor,
    grad_normed: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    recipe: str,
    source: str,
    meaning: str,
    *others: Any,
) -> list[torch.Tensor]:
    return [each for each in fake_backward(grad, inputs, *others) if each is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    input, norm, (weight,), _, ctx.recipe, ctx.source, _, ctx.wants_norm, ctx.needs, _ = inputs
    ctx.shape, ctx.weight_dtype, ctx.num_norm = tuple(weight.shape), weight.dtype, len(norm)
    kept = [input, *norm] if ctx.source else []
    ctx.num_inputs = len(kept)
    kept += kept_weight(weight, ctx.needs)
    ctx.num_kept = len(kept)
    ctx.save_for_backward(*kept, *output[1 + ctx.wants_norm :])
    ctx.set_materialize_grads(False)


def kept_weight(weight: torch.Tensor, needs: Sequence[bool]) -> list[torch.Tensor]:
    """The weight, where the backward reads its codes."""
    return [weight] if isinstance(weight, QuantizedTensor) and any(needs[:3]) else []


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    tensors, (grad, grad_normed, *_) = ctx.saved_tensors, [*grads, None]
    if not ctx.wants_norm:
        grad_normed = None
    if grad is None and grad_normed is None:
        return (None,) * 10
    # As autograd does for an uncompiled layer.
    if grad is None:
        assert grad_normed is not None
        grad = grad_normed.new_zeros(len(grad_normed), ctx.shape[0])
    if ctx.wants_norm and grad_normed is None:
        grad_normed = grad.new_zeros(len(grad), ctx.shape[1])
    made = iter(
        _backward(
            grad, grad_normed,
            list(tensors[: ctx.num_inputs]), list(tensors[ctx.num_kept :]),
            list(tensors[ctx.num_inputs : ctx.num_kept]),
            ctx.recipe, ctx.source, "", ctx.shape, ctx.weight_dtype, ctx.needs,
        )
    )  # fmt: skip
    of_input, *of_norm, of_weight, of_bias = [next(made) if n else None for n in ctx.needs]
    return of_input, of_norm[: ctx.num_norm], [of_weight], of_bias, *(None,) * 6


_linear.register_autograd(_differentiate, setup_context=_setup_context)


for _operation in (_linear, _backward):
    QuantizedTensor.operations[_operation._opoverload] = in_buffers
