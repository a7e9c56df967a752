"""explain: who computes the products of a model's layers, and why.

    >>> print(zerocast.nn.explain(model, recipe=zerocast.MXFP8BlockScaling()))
    0 of 192 products are computed by GEMMs on codes, under MXFP8BlockScaling()
      layers.{0..31}.{up,down}, output: decoded operands: mxfp8 GEMMs need compute capability ...

It answers from shapes, recipes and the device, without running anything: with the code that decides
when a layer runs (:func:`zerocast.nn.gemm.engine`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerocast.arguments import check_device, check_dtype, check_integer, check_module
from zerocast.errors import InputError
from zerocast.nn.autocast import current
from zerocast.nn.gemm import Engine, Product, engine
from zerocast.nn.library_gemm import Side
from zerocast.nn.model_init import get_default_recipe
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.recipes import Recipe, as_recipe
from zerocast.sharded.report import grouped
from zerocast.tensors import QuantizedTensor


@dataclass(frozen=True, slots=True)
class ProductExplanation:
    """Who computes one product of one layer.

    Attributes:
        layer: its name in the model.
        product: ``"output"``, ``"input gradient"`` or ``"weight gradient"``.
        engine: ``"library"``, or ``"decoded"``: both operands are decoded and multiplied in high
            precision.
        reason: which call of the library; or why it is not that.
    """

    layer: str
    product: str
    engine: str
    reason: str

    def __str__(self) -> str:
        return f"{self._name}{self._said}"

    @property
    def _name(self) -> str:
        return self.layer or "(the model itself)"

    @property
    def _said(self) -> str:
        return f", {self.product}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What :func:`explain` found; printed, totals first, equal layers in one line."""

    recipe: Recipe
    products: tuple[ProductExplanation, ...]

    def __str__(self) -> str:
        library = sum(p.engine == "library" for p in self.products)
        head = (
            f"{library} of {len(self.products)} products are computed by GEMMs on codes, under "
            f"{self.recipe}"
        )
        lines = grouped((p._name, p._said) for p in self.products)
        return "\n".join([head, *(f"  {layers}{said}" for layers, _, said in lines)])


def explain(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    *,
    tokens: int = 4096,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Say who computes the products of the layers in ``model``, and why.

    Args:
        model: any module; zerocast's layers in it are explained, itself included.
        recipe: under which they run, or its name; by default that of the autocast around the call,
            or the one that autocast takes by default.
        tokens: rows of a layer's input, which have to fit, too.
        device: where they run; by default where each weight is.
        dtype: of their results; by default each weight's own.

    Raises:
        InputError: for another recipe, or fewer than one token.
    """
    if recipe is None:
        recipe = current().recipe or get_default_recipe()
    recipe = as_recipe(recipe)
    check_module("model", model)
    if check_integer("tokens", tokens, -(2**63), 2**63 - 1) < 1:
        raise InputError(f"tokens must be at least 1, got {tokens}.")
    if device is not None:
        device = check_device("device", device)
    if dtype is not None:
        check_dtype("dtype", dtype)
    products = [
        ProductExplanation(
            name + part,
            product.title,
            "decoded" if chosen.kind is None else "library",
            str(chosen),
        )
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
        for part, weight in _weights(module)
        for product, chosen in _engines(weight, recipe, tokens, device, dtype)
    ]
    return Explanation(recipe, tuple(products))


def _weights(module: QuantizedModule) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a layer's products; with what to add to its name, where there are several."""
    weights = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and name.endswith("weight") and name != "layer_norm_weight"
    }
    for name, weight in weights.items():
        yield (f".{name}" if len(weights) > 1 else ""), weight


def _engines(
    weight: torch.Tensor,
    recipe: Recipe,
    tokens: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[Product, Engine]]:
    """Who computes each product of a layer with this weight."""
    rows, cols = weight.shape
    x = _Operand(recipe.for_role("input"), (tokens, cols))
    dy = _Operand(recipe.for_role("grad_output"), (tokens, rows))
    if isinstance(weight, QuantizedTensor):
        w = _Operand(weight.recipe, (rows, cols), weight.quantized_storage.has_columnwise)
    else:
        w = _Operand(recipe.for_role("weight"), (rows, cols))
    where = weight.device if device is None else torch.device(device)
    for product, operands in zip(Product, ((x, w), (dy, w), (dy, x)), strict=True):
        yield product, _engine(product, operands, dtype or weight.dtype, where)


class _Operand(NamedTuple):
    """A quantized tensor of a layer."""

    recipe: Recipe
    shape: tuple[int, int]
    has_columnwise: bool = True


def _engine(
    product: Product,
    operands: tuple[_Operand, _Operand],
    dtype: torch.dtype,
    device: torch.device,
) -> Engine:
    sides = []
    for operand, columnwise in zip(operands, product.value, strict=True):
        try:
            operand.recipe.check_shape(operand.shape)
        except InputError as error:
            return Engine(None, f"none, for the layer refuses to run: {error}")
        if columnwise and not operand.has_columnwise:
            return Engine(None, "the weight was made with columnwise=False")
        sides.append(Side(operand.recipe, operand.shape, columnwise))
    return engine(sides[0], sides[1], dtype, device)
