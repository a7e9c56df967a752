"""What the operations of a compiled layer do: they run the functions of an uncompiled one.

The operations (:mod:`zerocast.nn.traced_products`) are given tensors and texts. This module makes
of them the arguments of :class:`zerocast.nn.linear_functions.QuantizedLinear` and of the functions
before it (:mod:`zerocast.nn.quantized_functions`), and an object in the place of autograd's
context. The ``fake_`` functions say shapes and dtypes of the results.

What the tensors mean crosses the border of the graph as text, and all of it: a compiled graph may
be loaded from a cache by a process that never traced it.
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

FORWARD = (
    "Tensor input, Tensor[] norm, Tensor[] weight, Tensor? bias, str product, str weight_buffers"
)
"""The arguments of a product:

    input           [T, K]; with a source, what that computes the input from, [T, S]
    norm            gamma and beta [K], as far as the source has them
    weight          [M, K]: one tensor, or the buffers of a quantized weight
    bias            [M] in the product's dtype
    product         the other facts about it: a :class:`Product`, as a text
    weight_buffers  what the buffers of a quantized weight are, as a text; else ""
"""

BACKWARD = (
    "Tensor grad, Tensor? grad_normed, Tensor[] inputs, Tensor[] saved, Tensor[] weight, "
    "str product, str weight_buffers, int[] shape, ScalarType weight_dtype"
)
"""The arguments of its backward: the gradients of what it returned, the source's input and
parameters, what the forward saved, a quantized weight or nothing, the two texts of the forward, and
shape and dtype of the weight.
"""


class Product(NamedTuple):
    """The facts about a product that are no tensors.

    Attributes:
        recipe: of the region, as a text.
        source: the norm or the activation that makes the input, or None.
        dtype: of the result, and of what the source makes.
        wants_norm: whether what a norm makes is returned, too.
        needs: whether input, gamma, beta, weight and bias need gradients.
    """

    recipe: str
    source: FusedOp | None
    dtype: torch.dtype
    wants_norm: bool
    needs: tuple[bool, ...]

    @property
    def needs_source(self) -> bool:
        """Whether the gradient of the product's own input is needed."""
        return any(self.needs[:3])

    @property
    def num_statistics(self) -> int:
        """How many numbers a row the norm saves for its backward: mean and rstd, or rstd."""
        if self.source is None or not self.needs_source:
            return 0
        return {"layernorm": 2, "rmsnorm": 1}.get(self.source.function, 0)


def product_to_text(
    recipe: str,
    source: tuple[Any, ...] | None,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
) -> str:
    """A :class:`Product`, whose source is given by the fields of its :class:`FusedOp`."""
    return json.dumps([recipe, source, str(dtype), wants_norm, needs])


# As torch.compiler.assume_constant_result does, which loads the compiler.
product_to_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def as_product(text: str) -> Product:
    """What :func:`product_to_text` was given."""
    recipe, source, dtype, wants_norm, needs = json.loads(text)
    activation = None if source is None else FusedOp(*source)
    return Product(recipe, activation, _dtype(dtype), wants_norm, tuple(needs))


def needed(
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[bool]:
    """Which gradients a backward will need: of input, gamma, beta, weight and bias."""
    gamma = norm[0] if norm else None
    beta = norm[1] if len(norm) > 1 else None
    grads = torch.is_grad_enabled()
    return [grads and t is not None and t.requires_grad for t in (input, gamma, beta, weight, bias)]


# --- what the operations run ---


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
    product: Product,
    weight_buffers: str,
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
) -> Made:
    """Run the forward of an uncompiled layer."""
    source, needs, dtype = product.source, product.needs, product.dtype
    normed, statistics = None, []
    if source is not None:
        before = _Context(needs[:3])
        quantizers.input.set_usage(rowwise=True, columnwise=needs[3])
        if source.is_norm:
            gamma, beta = norm[0], norm[1] if len(norm) > 1 else None
            input, normed = QuantizedNorm.forward(
                before, input, gamma, beta, source, quantizers.input, dtype, product.wants_norm,
                watch,
            )  # fmt: skip
            statistics = [t for t in before.saved_tensors[3:] if t is not None]
        else:
            input = QuantizedActivation.forward(before, input, source, quantizers.input, watch)
    context = _Context((product.needs_source, *needs[3:]))
    whole = _whole(weight, weight_buffers)
    out = QuantizedLinear.forward(context, input, whole, bias, quantizers, dtype, None, watch)
    return Made(out, normed, [*statistics, *context.saved_tensors])


def fake_forward(
    input: torch.Tensor, weight: Sequence[torch.Tensor], product: Product, weight_buffers: str
) -> Made:
    """The shapes and dtypes of :func:`run_forward`'s results.

    Raises:
        InputError: where the recipe cannot hold a tensor.
    """
    shape, weight_dtype, primary = _described(weight, weight_buffers)
    rows, recipes = input.shape[0], recipes_of(product.recipe)
    recipes["input"].check_shape((rows, shape[1]))
    if not primary:
        recipes["weight"].check_shape(shape)
    if product.needs_source or product.needs[3]:
        recipes["grad_output"].check_shape((rows, shape[0]))
    statistics = [input.new_empty(rows, dtype=torch.float32) for _ in range(product.num_statistics)]
    saved = _saved(product, rows, shape, weight_dtype, primary, input.device)
    return Made(
        input.new_empty(rows, shape[0], dtype=product.dtype),
        input.new_empty(rows, shape[1], dtype=product.dtype) if product.wants_norm else None,
        [*statistics, *saved.tensors()],
    )


def run_backward(
    grad_output: Quantizer,
    watch: Watch | None,
    product: Product,
    weight_buffers: str,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    grad: torch.Tensor,
    grad_normed: torch.Tensor | None,
    inputs: Sequence[torch.Tensor],
    saved: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Run the backward of an uncompiled layer: the gradients of input, gamma, beta, weight and
    bias, None where they are not needed.
    """
    source, rows, count = product.source, grad.shape[0], product.num_statistics
    context = _Context((product.needs_source, *product.needs[3:]))
    context.primary = bool(weight)
    if weight:
        whole = _whole(weight, weight_buffers)
        assert isinstance(whole, QuantizedTensor)
        context.weight = whole.quantized_storage
        context.version = context.weight.version
    context.saved = _saved(product, rows, shape, weight_dtype, bool(weight), torch.device("meta"))
    context.saved_tensors = tuple(saved[count:])
    context.grad_output, context.watch = grad_output, watch
    context.dtype, context.weight_dtype = grad.dtype, weight_dtype
    context.input_shape = (rows, shape[1])
    of_input, of_weight, of_bias, *_ = QuantizedLinear.backward(context, grad)
    of_norm: list[torch.Tensor | None] = [None, None]
    if source is not None and product.needs_source:
        before = _Context(product.needs[:3])
        if source.is_norm:
            before.op = source
            statistics = [*[None] * (2 - count), *saved[:count]]
            before.save_for_backward(*inputs, *[None] * (3 - len(inputs)), *statistics)
            of_input, *of_norm = QuantizedNorm.backward(before, of_input, grad_normed)[:3]
        else:
            before.function = source.function
            before.save_for_backward(*inputs)
            of_input = QuantizedActivation.backward(before, of_input)[0]
    return [of_input, *of_norm, of_weight, of_bias]


def fake_backward(
    grad: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    product: Product,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
) -> list[torch.Tensor | None]:
    """The shapes and dtypes of :func:`run_backward`'s results."""
    input = inputs[0] if inputs else grad.new_empty(grad.shape[0], shape[1])
    made: list[torch.Tensor | None] = [torch.empty_like(t) for t in (input, *inputs[1:])]
    made = [*made, None, None][:3]
    made += [grad.new_empty(shape, dtype=weight_dtype), grad.new_empty(shape[0])]
    return [
        each if is_needed else None for each, is_needed in zip(made, product.needs, strict=True)
    ]


class _Context(SimpleNamespace):
    """What autograd would hold between forward and backward."""

    saved_tensors: tuple[Any, ...]

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        super().__init__(needs_input_grad=(*needs_input_grad, *(False,) * 5), saved_tensors=())

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        self.saved_tensors = tensors


@cache
def recipes_of(recipe: str) -> dict[str, Recipe]:
    """The scheme of each role under the recipe of this text."""
    whole = recipe_from_text(recipe)
    return {role: whole.for_role(role) for roles in ROLES.values() for role in roles}


def _saved(
    product: Product,
    rows: int,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    primary: bool,
    device: torch.device,
) -> Saved:
    """What the forward saves of its input [rows, K] and of a weight of this ``shape`` [M, K]."""
    recipes, saved = recipes_of(product.recipe), Saved()
    for is_saved, role, of, dtype in (
        (product.needs[3], "input", (rows, shape[1]), product.dtype),
        (product.needs_source and not primary, "weight", tuple(shape), weight_dtype),
    ):
        made = None
        if is_saved:
            made = QuantizedStorage.empty(
                of, dtype, recipes[role], device, columnwise=True, state=False
            )
        saved.add(made)
    return saved


# --- a quantized weight, as its buffers ---


def in_buffers(func: Any, *args: Any) -> Any:
    """Call ``func`` with the buffers of its quantized weight, and what they are."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=True))
    storage = given["weight"][0].quantized_storage
    buffers = storage.buffers
    values = [storage.recipe.text, str(storage.dtype), list(storage.shape), list(buffers)]
    given |= {"weight": list(buffers.values()), "weight_buffers": json.dumps(values)}
    return func(*given.values())


def _described(
    weight: Sequence[torch.Tensor], weight_buffers: str
) -> tuple[tuple[int, ...], torch.dtype, bool]:
    """Shape and dtype of a weight, and whether it holds codes."""
    if not weight_buffers:
        return tuple(weight[0].shape), weight[0].dtype, isinstance(weight[0], QuantizedTensor)
    _, dtype, shape, _ = json.loads(weight_buffers)
    return tuple(shape), _dtype(dtype), True


def _whole(weight: Sequence[torch.Tensor], weight_buffers: str) -> torch.Tensor:
    """The weight that :func:`in_buffers` took apart, or the plain one."""
    if not weight_buffers:
        return weight[0]
    recipe, dtype, shape, names = json.loads(weight_buffers)
    buffers = dict(zip(names, weight, strict=True))
    return QuantizedTensor(
        QuantizedStorage(tuple(shape), _dtype(dtype), recipe_from_text(recipe), buffers)
    )


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text.removeprefix("torch."))
