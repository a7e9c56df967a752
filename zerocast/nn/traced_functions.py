"""The text of a compiled layer's product, and the shapes of what its operations return.

The operations (:mod:`zerocast.nn.traced_products`) take tensors and one text, and run the functions
of an uncompiled layer (:mod:`zerocast.nn.layer_product`). The ``fake_`` functions return tensors of
the shapes and dtypes of the results.

The text says everything that the tensors mean, because a process may load a compiled graph from a
cache without ever tracing it.
"""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from zerocast.nn.layer_product import LayerProduct, Made, SavedOperands
from zerocast.nn.recipe_state import ROLES
from zerocast.numerics import FusedOp
from zerocast.recipes import Recipe, recipe_from_text
from zerocast.tensors import QuantizedStorage, QuantizedTensor


class TracedProduct(NamedTuple):
    """The meaning of a product's text.

    Attributes:
        recipe: the text of the recipe.
        product: what is computed.
        codes: for a quantized weight, given by its buffers, the text of its recipe, its dtype and
            shape, and the names of the buffers; None for one in high precision.
    """

    recipe: str
    product: LayerProduct
    codes: tuple[str, torch.dtype, tuple[int, ...], list[str]] | None


def product_to_text(
    recipe: str,
    source: tuple[Any, ...] | None,
    dtype: torch.dtype,
    wants_norm: bool,
    needs: Sequence[bool],
) -> str:
    """Return a :class:`LayerProduct` under the recipe of a text, as a text. The source is given by
    the fields of its :class:`FusedOp`.
    """
    return json.dumps([recipe, source, str(dtype), wants_norm, needs, None])


# torch.compiler.assume_constant_result sets this attribute, but also loads the compiler.
product_to_text._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def product_of(text: str) -> TracedProduct:
    """Return what :func:`product_to_text` was given, and what :func:`in_buffers` added."""
    recipe, source, dtype, wants_norm, needs, codes = json.loads(text)
    op = None if source is None else FusedOp(*source)
    if codes is not None:
        codes = codes[0], _dtype(codes[1]), tuple(codes[2]), codes[3]
    return TracedProduct(recipe, LayerProduct(op, _dtype(dtype), wants_norm, tuple(needs)), codes)


@cache
def recipes_of(recipe: str) -> dict[str, Recipe]:
    """Return the scheme of each role under the recipe of this text."""
    whole = recipe_from_text(recipe)
    return {role: whole.for_role(role) for roles in ROLES.values() for role in roles}


# --- a quantized weight, as its buffers ---


def in_buffers(func: Any, *args: Any) -> Any:
    """Call ``func`` with the buffers of its quantized weight, described in its text."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=True))
    storage = given["weight"][0].quantized_storage
    codes = [storage.recipe.text, str(storage.dtype), list(storage.shape), list(storage.buffers)]
    given["weight"] = list(storage.buffers.values())
    given["product"] = json.dumps([*json.loads(given["product"])[:-1], codes])
    return func(*given.values())


def whole_weight(weight: Sequence[torch.Tensor], text: str) -> torch.Tensor:
    """Return the weight that :func:`in_buffers` took apart, or the one in high precision."""
    codes = product_of(text).codes
    if codes is None:
        return weight[0]
    recipe, dtype, shape, names = codes
    buffers = dict(zip(names, weight, strict=True))
    return QuantizedTensor(QuantizedStorage(shape, dtype, recipe_from_text(recipe), buffers))


def _dtype(text: str) -> torch.dtype:
    return getattr(torch, text.removeprefix("torch."))


# --- shapes and dtypes ---


def fake_forward(input: torch.Tensor, weight: torch.Tensor, text: str) -> Made:
    """Return the shapes and dtypes of what :func:`run_forward` returns.

    Raises:
        InputError: where the recipe cannot hold a tensor.
    """
    recipe, product, _ = product_of(text)
    shape, is_quantized = tuple(weight.shape), isinstance(weight, QuantizedTensor)
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
        empty_operands(text, rows, shape, weight.dtype, is_quantized, input.device),
    )


def fake_backward(
    grad: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    text: str,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
) -> list[torch.Tensor | None]:
    """Return the shapes and dtypes of what :func:`run_backward` returns."""
    inputs = inputs or [grad.new_empty(grad.shape[0], shape[1])]
    made: list[torch.Tensor | None] = [torch.empty_like(each) for each in inputs]
    made = [*made, None, None][:3]
    made += [grad.new_empty(shape, dtype=weight_dtype), grad.new_empty(shape[0])]
    needs = product_of(text).product.needs
    return [each if is_needed else None for each, is_needed in zip(made, needs, strict=True)]


def empty_operands(
    text: str,
    rows: int,
    shape: Sequence[int],
    weight_dtype: torch.dtype,
    has_codes: bool,
    device: torch.device,
) -> SavedOperands:
    """Return the operands, unfilled, that a forward saves: of its input [rows, K], and of a weight
    of this ``shape`` [M, K] unless that ``has_codes``.
    """
    recipe, product, _ = product_of(text)
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
