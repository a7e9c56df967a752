"""What the operations of a compiled layer do: they run the functions of an uncompiled one.

The operations (:mod:`zerocast.nn.traced_product`, :mod:`zerocast.nn.traced_memory`) are given
tensors and texts. What is here makes of them the arguments of
:class:`zerocast.nn.linear_functions.QuantizedLinear` and of the functions before it
(:mod:`zerocast.nn.quantized_functions`), and an object in the place of autograd's context. The
``fake_`` functions say shapes and dtypes of the results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from zerocast.nn.linear_functions import GemmQuantizers, QuantizedLinear, Saved, Watch
from zerocast.nn.quantized_functions import QuantizedActivation, QuantizedNorm
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import ROLES
from zerocast.numerics import FusedOp
from zerocast.recipes import Recipe, recipe_from_text
from zerocast.tensors import QuantizedStorage, QuantizedTensor


class Made(NamedTuple):
    """What a product makes: its result, what the norm made or None, and what is saved: of a norm
    mean and rstd, then what the products of the backward read.
    """

    out: torch.Tensor
    normed: torch.Tensor | None
    saved: list[torch.Tensor]


def run_forward(
    quantizers: GemmQuantizers,
    watch: Watch | None,
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    source: str,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
    meaning: str,
) -> Made:
    """Run the forward of an uncompiled layer."""
    needs_source, needs_weight, needs_bias = any(needs[:3]), needs[3], needs[4]
    normed, statistics = None, []
    if source:
        activation, before = _source(source), _Context(needs[:3])
        quantizers.input.set_usage(rowwise=True, columnwise=needs_weight)
        if activation.is_norm:
            gamma, beta = norm[0], norm[1] if len(norm) > 1 else None
            input, normed = QuantizedNorm.forward(
                before, input, gamma, beta, activation, quantizers.input, dtype, wants_norm, watch
            )
            statistics = [t for t in before.saved_tensors[3:] if t is not None]
        else:
            input = QuantizedActivation.forward(before, input, activation, quantizers.input, watch)
    context = _Context((needs_source, needs_weight, needs_bias))
    whole = _whole(weight, meaning)
    out = QuantizedLinear.forward(context, input, whole, bias, quantizers, dtype, None, watch)
    return Made(out, normed, [*statistics, *context.saved_tensors])


def fake_forward(
    input: torch.Tensor,
    weight: Sequence[torch.Tensor],
    recipe: str,
    source: str,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
    meaning: str,
) -> Made:
    """The shapes and dtypes of :func:`run_forward`'s results.

    Raises:
        InputError: where the recipe cannot hold a tensor.
    """
    shape, weight_dtype, primary = _described(weight, meaning)
    rows, roles = input.shape[0], _roles(recipe)
    roles["input"].check_shape((rows, shape[1]))
    if not primary:
        roles["weight"].check_shape(shape)
    needs_source = any(needs[:3])
    if needs_source or needs[3]:
        roles["grad_output"].check_shape((rows, shape[0]))
    statistics = []
    if source and needs_source and _source(source).is_norm:
        count = 2 if _source(source).function == "layernorm" else 1
        statistics = [input.new_empty(rows, dtype=torch.float32) for _ in range(count)]
    x, w = needs[3], needs_source and not primary
    saved = _saved(roles, rows, shape, (dtype, weight_dtype), input.device, x=x, w=w)
    return Made(
        input.new_empty(rows, shape[0], dtype=dtype),
        input.new_empty(rows, shape[1], dtype=dtype) if wants_norm else None,
        [*statistics, *saved.tensors()],
    )


def run_backward(
    grad_output: Quantizer,
    watch: Watch | None,
    grad: torch.Tensor,
    grad_normed: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    recipe: str,
    source: str,
    meaning: str,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    """Run the backward of an uncompiled layer: the gradients of input, gamma, beta, weight and
    bias, None where they are not needed.
    """
    needs_source, needs_weight, needs_bias = any(needs[:3]), needs[3], needs[4]
    before = _Context(needs[:3])
    if source:
        before.activation = _source(source)
        before.function = before.activation.function
        before.save_for_backward(*inputs)
        if before.activation.is_norm:
            gamma, beta = inputs[1], inputs[2] if len(inputs) > 2 else None
            mean, rstd = None, None
            if needs_source:
                if before.function == "layernorm":
                    mean, *saved = saved
                rstd, *saved = saved
            before.save_for_backward(inputs[0], gamma, beta, mean, rstd)
    context = _Context((needs_source, needs_weight, needs_bias))
    context.primary = bool(weight)
    if weight:
        whole = _whole(weight, meaning)
        assert isinstance(whole, QuantizedTensor)
        context.weight = whole.quantized_storage
        context.version = context.weight.version
    rows = grad.shape[0]
    context.saved = _saved(
        _roles(recipe), rows, shape, (grad.dtype, weight_dtype), torch.device("meta"),
        x=needs_weight, w=needs_source and not weight,
    )  # fmt: skip
    context.saved_tensors = tuple(saved)
    context.grad_output, context.watch = grad_output, watch
    context.dtype, context.weight_dtype = grad.dtype, weight_dtype
    context.input_shape = (rows, shape[1])
    of_input, of_weight, of_bias, *_ = QuantizedLinear.backward(context, grad)
    of_norm: list[torch.Tensor | None] = [None, None]
    if source and needs_source:
        if before.activation.is_norm:
            of_input, *of_norm = QuantizedNorm.backward(before, of_input, grad_normed)[:3]
        else:
            of_input = QuantizedActivation.backward(before, of_input)[0]
    return [of_input, *of_norm, of_weight, of_bias]


def fake_backward(
    grad: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    needs: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The shapes and dtypes of :func:`run_backward`'s results."""
    input = inputs[0] if inputs else grad.new_empty(grad.shape[0], shape[1])
    made: list[torch.Tensor | None] = [torch.empty_like(t) for t in (input, *inputs[1:])]
    made = [*made, None, None][:3]
    made += [grad.new_empty(shape, dtype=weight_dtype), grad.new_empty(shape[0])]
    return [each if is_needed else None for each, is_needed in zip(made, needs, strict=True)]


# --- a quantized weight, as its buffers ---


def in_buffers(func: Any, *args: Any) -> Any:
    """Call ``func`` with the buffers of its quantized weight, and their meaning."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=True))
    storage = given["weight"][0].quantized_storage
    buffers = storage.buffers
    values = [storage.recipe.text, str(storage.dtype), list(storage.shape), list(buffers)]
    given |= {"weight": list(buffers.values()), "meaning": json.dumps(values)}
    return func(*given.values())


def _described(
    weight: Sequence[torch.Tensor], meaning: str
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape and dtype of a weight, and whether it holds codes."""
    if not meaning:
        return tuple(weight[0].shape), weight[0].dtype, isinstance(weight[0], QuantizedTensor)
    _, dtype, shape, _ = json.loads(meaning)
    return tuple(shape), getattr(torch, dtype.removeprefix("torch.")), True


def _whole(weight: Sequence[torch.Tensor], meaning: str) -> torch.Tensor:
    """The weight that :func:`in_buffers` took apart, or the plain one."""
    if not meaning:
        return weight[0]
    recipe, _, _, names = json.loads(meaning)
    shape, dtype, _ = _described(weight, meaning)
    buffers = dict(zip(names, weight, strict=True))
    return QuantizedTensor(QuantizedStorage(shape, dtype, recipe_from_text(recipe), buffers))


# --- what the autograd.Functions are given ---


class _Context(SimpleNamespace):
    """What autograd would hold between forward and backward."""

    saved_tensors: tuple[Any, ...]

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        super().__init__(needs_input_grad=(*needs_input_grad, *(False,) * 5), saved_tensors=())

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


@cache
def _source(text: str) -> FusedOp:
    return FusedOp(*json.loads(text))


@cache
def _roles(recipe: str) -> dict[str, Recipe]:
    whole = recipe_from_text(recipe)
    return {role: whole.for_role(role) for roles in ROLES.values() for role in roles}


def new_quantizers(recipe: str) -> GemmQuantizers:
    """Those of a recipe that remembers nothing, by its text."""
    return GemmQuantizers(*(Quantizer(each) for each in _roles(recipe).values()))


def _saved(
    roles: dict[str, Recipe],
    rows: int,
    shape: Sequence[int],
    dtypes: tuple[torch.dtype, torch.dtype],
    device: torch.device,
    *,
    x: bool,
    w: bool,
) -> Saved:
    """What the forward saves of the input [rows, K] and of a weight of this ``shape`` [M, K]."""
    saved = Saved()
    for is_saved, role, of, dtype in (
        (x, "input", (rows, shape[1]), dtypes[0]),
        (w, "weight", tuple(shape), dtypes[1]),
    ):
        made = None
        if is_saved:
            made = QuantizedStorage.empty(
                of, dtype, roles[role], device, columnwise=True, state=False
            )
        saved.add(made)
    return saved
