"""The arguments of the operations of a compiled layer, which run an uncompiled layer's functions.

The operations (:mod:`zerocast.nn.traced_products`) take tensors and texts. This module turns them
into the arguments of :func:`zerocast.nn.layer_product.run_forward` and ``run_backward``. The
``fake_`` functions say shapes and dtypes of the results.

The texts say everything that the tensors mean, because a process may load a compiled graph from a
cache without ever tracing it.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from zerocast.nn.layer_product import (
    GemmQuantizers,
    LayerProduct,
    Made,
    SavedOperands,
    Watch,
    run_backward,
    run_forward,
)
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
    product         the recipe and a :class:`LayerProduct`, as a text
    weight_buffers  what the buffers of a quantized weight are, as a text; else ""
"""

BACKWARD = (
    "Tensor grad, Tensor? grad_normed, Tensor[] inputs, Tensor[] saved, Tensor[] weight, "
    "str product, str weight_buffers, int[] shape, ScalarType weight_dtype"
)
"""The arguments of its backward; :class:`BackwardArguments` says what they are."""


class BackwardArguments(NamedTuple):
    """The arguments :data:`BACKWARD`.

    Attributes:
        grad: the gradient of the result, [T, M].
        grad_normed: the gradient of what the norm made, [T, K].
        inputs: the source's input and parameters.
        saved: the tensors that the forward saved.
        weight: the buffers of a quantized weight; none for another.
        product, weight_buffers: the two texts of the forward.
        shape, weight_dtype: those of the weight.
    """

    grad: torch.Tensor
    grad_normed: torch.Tensor | None
    inputs: Sequence[torch.Tensor]
    saved: Sequence[torch.Tensor]
    weight: Sequence[torch.Tensor]
    product: str
    weight_buffers: str
    shape: Sequence[int]
    weight_dtype: torch.dtype


def product_to_text(
    recipe: str,
    source: tuple[Any, ...] | None,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
) -> str:
    """Return a :class:`LayerProduct` under a recipe, as a text. The source is given by the fields
    of its :class:`FusedOp`.
    """
    return json.dumps([recipe, source, str(dtype), wants_norm, needs])


# torch.compiler.assume_constant_result sets this attribute, but also loads the compiler.
product_to_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def as_product(text: str) -> tuple[str, LayerProduct]:
    """Return the recipe's text and the product that :func:`product_to_text` was given."""
    recipe, source, dtype, wants_norm, needs = json.loads(text)
    op = None if source is None else FusedOp(*source)
    return recipe, LayerProduct(op, _dtype(dtype), wants_norm, tuple(needs))


def needed(
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> list[bool]:
    """Say which gradients a backward will need: of input, gamma, beta, weight and bias."""
    gamma = norm[0] if norm else None
    beta = norm[1] if len(norm) > 1 else None
    grads = torch.is_grad_enabled()
    return [grads and t is not None and t.requires_grad for t in (input, gamma, beta, weight, bias)]


# --- what the operations run ---


def traced_forward(
    quantizers: GemmQuantizers,
    watch: Watch | None,
    input: torch.Tensor,
    norm: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    text: str,
    weight_buffers: str,
) -> Made:
    """Run :func:`zerocast.nn.layer_product.run_forward` with the arguments :data:`FORWARD`."""
    whole = _whole(weight, weight_buffers)
    return run_forward(as_product(text)[1], quantizers, watch, input, norm, whole, bias)


def fake_forward(
    input: torch.Tensor, weight: Sequence[torch.Tensor], text: str, weight_buffers: str
) -> Made:
    """Return the shapes and dtypes of :func:`traced_forward`'s results.

    Raises:
        InputError: where the recipe cannot hold a tensor.
    """
    recipe, product = as_product(text)
    shape, weight_dtype, is_quantized = _described(weight, weight_buffers)
    rows, recipes = input.shape[0], recipes_of(recipe)
    recipes["input"].check_shape((rows, shape[1]))
    if not is_quantized:
        recipes["weight"].check_shape(shape)
    if product.needs_source or product.needs[3]:
        recipes["grad_output"].check_shape((rows, shape[0]))
    statistics = [input.new_empty(rows, dtype=torch.float32) for _ in range(product.num_statistics)]
    return Made(
        input.new_empty(rows, shape[0], dtype=product.dtype),
        input.new_empty(rows, shape[1], dtype=product.dtype) if product.wants_norm else None,
        statistics,
        _saved(text, rows, shape, weight_dtype, is_quantized, input.device),
    )


def traced_backward(
    quantizer: Quantizer, watch: Watch | None, given: BackwardArguments
) -> list[torch.Tensor | None]:
    """Run :func:`zerocast.nn.layer_product.run_backward`."""
    product = as_product(given.product)[1]
    meanings = _saved(
        given.product,
        given.grad.shape[0],
        given.shape,
        given.weight_dtype,
        bool(given.weight),
        torch.device("meta"),
    )
    statistics = given.saved[: product.num_statistics]
    x, w = meanings.restore(given.saved[product.num_statistics :])
    if given.weight:
        weight = _whole(given.weight, given.weight_buffers)
        assert isinstance(weight, QuantizedTensor)
        w = weight.quantized_storage
    grads = given.grad, given.grad_normed
    return run_backward(
        product, quantizer, watch, grads, given.inputs, statistics, x, w, given.weight_dtype
    )


def fake_backward(given: BackwardArguments) -> list[torch.Tensor | None]:
    """Return the shapes and dtypes of :func:`traced_backward`'s results."""
    grad, shape = given.grad, given.shape
    inputs = given.inputs or [grad.new_empty(grad.shape[0], shape[1])]
    made: list[torch.Tensor | None] = [torch.empty_like(each) for each in inputs]
    made = [*made, None, None][:3]
    made += [grad.new_empty(shape, dtype=given.weight_dtype), grad.new_empty(shape[0])]
    needs = as_product(given.product)[1].needs
    return [each if is_needed else None for each, is_needed in zip(made, needs, strict=True)]


@cache
def recipes_of(recipe: str) -> dict[str, Recipe]:
    """Return the scheme of each role under the recipe of this text."""
    whole = recipe_from_text(recipe)
    return {role: whole.for_role(role) for roles in ROLES.values() for role in roles}


def _saved(
    text: str,
    rows: int,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    has_codes: bool,
    device: torch.device,
) -> SavedOperands:
    """Return what the forward saves of its input [rows, K] and of a weight of this ``shape`` [M,
    K].
    """
    recipe, product = as_product(text)
    recipes, saved = recipes_of(recipe), SavedOperands()
    for is_saved, role, of, dtype in (
        (product.needs[3], "input", (rows, shape[1]), product.dtype),
        (product.needs_source and not has_codes, "weight", tuple(shape), weight_dtype),
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
    """Return the weight that :func:`in_buffers` took apart, or the plain one."""
    if not weight_buffers:
        return weight[0]
    recipe, dtype, shape, names = json.loads(weight_buffers)
    buffers = dict(zip(names, weight, strict=True))
    return QuantizedTensor(
        QuantizedStorage(tuple(shape), _dtype(dtype), recipe_from_text(recipe), buffers)
    )


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text.removeprefix("torch."))
