"""The products of a linear layer as operations that torch.compile takes whole.

Inside a compiled function a layer calls ``zerocast::quantized_linear``, whose backward is
``zerocast::quantized_linear_backward``. Both run :class:`zerocast.nn.products.QuantizedLinear` on
the tensors that they are given, so their results are those of an uncompiled layer, bit for bit.
What the tensors mean crosses the border as text, and all of it: a compiled graph may be loaded from
a cache by a process that never traced it.

Recipes that remember something between casts are not served: a graph cannot hold what they write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from zerocast.nn.products import GemmQuantizers, QuantizedLinear, Saved
from zerocast.recipes import Recipe, recipe_from_text
from zerocast.tensors import QuantizedStorage, QuantizedTensor, Quantizer


def traced_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
) -> torch.Tensor:
    """``input @ weight.T + bias`` of quantized operands, with gradients.

    Args:
        input: [T, K].
        weight: [M, K], quantized or in high precision.
        bias: [M] in the dtype of ``input``, or None.
        recipe: of the region, as a text.

    Returns:
        [T, M], in the dtype of ``input``.

    Raises:
        InputError: when it is traced, where the recipe cannot hold a tensor.
    """
    grads = torch.is_grad_enabled()
    keeps_weight = grads and input.requires_grad
    keeps_input = grads and weight.requires_grad
    return _linear(input, [weight], bias, recipe, "", keeps_input, keeps_weight)[0]


@torch.library.custom_op(
    "zerocast::quantized_linear",
    mutates_args=(),
    schema="(Tensor input, Tensor[] weight, Tensor? bias, str recipe, str meaning, "
    "bool keeps_input, bool keeps_weight) -> Tensor[]",
)
def _linear(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    recipe: str,
    meaning: str,
    keeps_input: bool,
    keeps_weight: bool,
) -> list[torch.Tensor]:
    """The result, and what the backward reads of input and weight."""
    whole, context = _whole(weight, meaning), _Context((keeps_weight, keeps_input, False))
    out = QuantizedLinear.forward(
        context, input, whole, bias, _quantizers(recipe), input.dtype, None, None
    )
    return [out, *context.saved_tensors]


@_linear.register_fake
def _(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    recipe: str,
    meaning: str,
    keeps_input: bool,
    keeps_weight: bool,
) -> list[torch.Tensor]:
    shape, _, primary = _described(weight, meaning)
    rows = input.shape[0]
    quantizers = _quantizers(recipe)
    quantizers.input.recipe.check_shape(tuple(input.shape))
    if not primary:
        quantizers.weight.recipe.check_shape(shape)
    if keeps_input or keeps_weight:
        quantizers.grad_output.recipe.check_shape((rows, shape[0]))
    x, w = keeps_input, keeps_weight and not primary
    saved = _saved(quantizers, rows, shape, input.dtype, input.device, x=x, w=w)
    return [input.new_empty(rows, shape[0]), *saved.tensors()]


@torch.library.custom_op(
    "zerocast::quantized_linear_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor[] saved, Tensor[] weight, str recipe, str meaning, "
    "int[] shape, ScalarType weight_dtype, bool needs_input, bool needs_weight, "
    "bool needs_bias) -> Tensor[]",
)
def _backward(
    grad: torch.Tensor,
    saved: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    recipe: str,
    meaning: str,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> list[torch.Tensor]:
    """The gradients that are needed, of input, weight and bias."""
    quantizers, (rows, cols) = _quantizers(recipe), (grad.shape[0], shape[1])
    context = _Context((needs_input, needs_weight, needs_bias))
    context.primary = bool(weight)
    if weight:
        whole = _whole(weight, meaning)
        assert isinstance(whole, QuantizedTensor)
        context.weight = whole.quantized_storage
        context.version = context.weight.version
    context.saved = _saved(
        quantizers, rows, shape, grad.dtype, torch.device("meta"),
        x=needs_weight, w=needs_input and not weight,
    )  # fmt: skip
    context.saved_tensors = tuple(saved)
    context.grad_output, context.watch = quantizers.grad_output, None
    context.dtype, context.weight_dtype, context.input_shape = (
        grad.dtype,
        weight_dtype,
        (rows, cols),
    )
    grads = QuantizedLinear.backward(context, grad)
    return [each for each in grads if each is not None]


@_backward.register_fake
def _(
    grad: torch.Tensor,
    saved: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    recipe: str,
    meaning: str,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    needs_input: bool,
    needs_weight: bool,
    needs_bias: bool,
) -> list[torch.Tensor]:
    made = []
    if needs_input:
        made.append(grad.new_empty(grad.shape[0], shape[1]))
    if needs_weight:
        made.append(grad.new_empty(shape, dtype=weight_dtype))
    if needs_bias:
        made.append(grad.new_empty(shape[0]))
    return made


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    _, (weight,), _, ctx.recipe, _, ctx.keeps_input, ctx.keeps_weight = inputs
    ctx.primary = isinstance(weight, QuantizedTensor)
    ctx.shape, ctx.weight_dtype = tuple(weight.shape), weight.dtype
    kept = [weight] if ctx.primary and ctx.keeps_weight else []
    ctx.save_for_backward(*kept, *output[1:])
    ctx.num_weights = len(kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    grad = grads[0]
    if grad is None:
        return (None,) * 7
    weight, saved = ctx.saved_tensors[: ctx.num_weights], ctx.saved_tensors[ctx.num_weights :]
    needs_bias = ctx.needs_input_grad[2]
    made = iter(
        _backward(
            grad, list(saved), list(weight), ctx.recipe, "", ctx.shape, ctx.weight_dtype,
            ctx.keeps_weight, ctx.keeps_input, needs_bias,
        )
    )  # fmt: skip
    grad_input = next(made) if ctx.keeps_weight else None
    grad_weight = next(made) if ctx.keeps_input else None
    grad_bias = next(made) if needs_bias else None
    return grad_input, [grad_weight], grad_bias, None, None, None, None


_linear.register_autograd(_differentiate, setup_context=_setup_context)


# --- a quantized weight, as its buffers ---


def _in_buffers(func: Any, *args: Any) -> Any:
    """Call ``func`` with the buffers of its quantized weight, and their meaning."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=True))
    storage = given["weight"][0].quantized_storage
    buffers = storage.buffers
    values = [storage.recipe.text, str(storage.dtype), list(storage.shape), list(buffers)]
    given |= {"weight": list(buffers.values()), "meaning": json.dumps(values)}
    return func(*given.values())


for _operation in (_linear, _backward):
    QuantizedTensor.operations[_operation._opoverload] = _in_buffers


def _described(
    weight: Sequence[torch.Tensor], meaning: str
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape and dtype of a weight, and whether it holds codes."""
    if not meaning:
        return tuple(weight[0].shape), weight[0].dtype, isinstance(weight[0], QuantizedTensor)
    _, dtype, shape, _ = json.loads(meaning)
    return tuple(shape), getattr(torch, dtype.removeprefix("torch.")), True


def _whole(weight: Sequence[torch.Tensor], meaning: str) -> torch.Tensor:
    """The weight that :func:`_in_buffers` took apart, or the plain one."""
    if not meaning:
        return weight[0]
    recipe, _, _, names = json.loads(meaning)
    shape, dtype, _ = _described(weight, meaning)
    buffers = dict(zip(names, weight, strict=True))
    return QuantizedTensor(QuantizedStorage(shape, dtype, recipe_from_text(recipe), buffers))


# --- what the autograd.Function is given ---


class _Context(SimpleNamespace):
    """What autograd would hold between forward and backward."""

    def __init__(self, needs_input_grad: tuple[bool, bool, bool]) -> None:
        super().__init__(needs_input_grad=(*needs_input_grad, False, False, False, False))

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


@cache
def _roles(recipe: str) -> list[Recipe]:
    whole = recipe_from_text(recipe)
    return [
        whole.for_role(role) for role in ("input", "weight", "output", "grad_output", "grad_input")
    ]


def _quantizers(recipe: str) -> GemmQuantizers:
    return GemmQuantizers(*(Quantizer(each) for each in _roles(recipe)))


def _saved(
    quantizers: GemmQuantizers,
    rows: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    x: bool,
    w: bool,
) -> Saved:
    """What the forward saves of the input [rows, K] and of a weight of this ``shape`` [M, K]."""
    saved = Saved()
    for is_saved, recipe, of in (
        (x, quantizers.input.recipe, (rows, shape[1])),
        (w, quantizers.weight.recipe, tuple(shape)),
    ):
        made = None
        if is_saved:
            made = QuantizedStorage.empty(of, dtype, recipe, device, columnwise=True, state=False)
        saved.add(made)
    return saved
