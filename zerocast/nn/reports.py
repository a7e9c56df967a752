"""coverage: lists the parameters of a model that are in codes at present, and why others are not.

    >>> print(zerocast.nn.coverage(model))
    86,848 parameters, 28.3 % held in codes; in memory they take 271.46 kB, 22.38 kB ...
      model.layers.{0..1}.self_attn.{q_proj,o_proj}.weight [64x64]: held in codes by ...
      left: model.layers.{0..1}.mlp.experts.down_proj [4x64x32], 18.9 %: a MixtralExperts ...
      left: 9 smaller ones (embeddings, norms, biases), 0.7 %

It reads the model at each call, so it also shows layers that were replaced since a conversion (a
head, when tokens were added).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from zerocast.arguments import (
    Device,
    check_device,
    check_dtype,
    check_integer,
    check_module,
    shown_bytes,
)
from zerocast.errors import InputError
from zerocast.nn.autocast import get_default_recipe
from zerocast.nn.engines import Engine, Product, Side, engine
from zerocast.nn.quantized_module import QuantizedModule
from zerocast.nn.regions import current
from zerocast.recipes import Recipe, as_recipe, short_name
from zerocast.sharded.all_gather import gather_of
from zerocast.sharded.master_weight import MasterWeight
from zerocast.sharded.placement import to_local
from zerocast.sharded.report import grouped, why_high_precision
from zerocast.tensors import QuantizedTensor
from zerocast.tensors.wrapped_names import named_modules, named_parameters

How = Literal["held in codes", "gathered in codes", "quantized under autocast", "left"]

_LARGE = 0.01
"""The smallest share of a model's parameters at which a left one has a separate line."""


@dataclass(frozen=True, slots=True)
class ParameterCoverage:
    """The form in which one parameter is kept.

    Attributes:
        name: fully qualified; of one that modules share, its name in a linear layer.
        shape: the shape of the whole parameter, where it is sharded.
        how: ``"held in codes"``; ``"gathered in codes"`` from a master of FSDP2; ``"quantized
            under autocast"`` by each forward; ``"left"`` in high precision.
        recipe: the recipe of the codes that are held or gathered; None for the others.
        bytes: that it takes, on all ranks that shard it together: codes, scales and columnwise
            copies, or values.
        why: where it is left, the reason; else empty.
        is_linear: whether it is the weight of a linear layer.
    """

    name: str
    shape: torch.Size
    how: How
    recipe: Recipe | None
    bytes: int
    why: str
    is_linear: bool


@dataclass(frozen=True, slots=True)
class Coverage:
    """The result of :func:`coverage`. Its text has totals first and equal layers in one line.

    Attributes:
        parameters: in the model's order, each once.
    """

    parameters: tuple[ParameterCoverage, ...]

    def elements(self, how: How | None = None) -> int:
        """Return the number of elements of the parameters that are kept so; of all by default."""
        return sum(p.shape.numel() for p in self.parameters if how in (None, p.how))

    def bytes(self, how: How | None = None) -> int:
        """Return the bytes that those parameters take."""
        return sum(p.bytes for p in self.parameters if how in (None, p.how))

    def __str__(self) -> str:
        total = self.elements()
        found = dict.fromkeys(p.how for p in self.parameters if p.how != "left")
        shares = [f"{_percent(self.elements(how), total)} {how}" for how in found]
        head = f"{total:,} parameters, {' and '.join(shares) or 'none in codes'}"
        head += f"; in memory they take {shown_bytes(self.bytes())}"
        if "held in codes" in found:
            head += f", {shown_bytes(self.bytes('held in codes'))} of them codes and scales"
        left = [p for p in self.parameters if p.how == "left"]
        left.sort(key=lambda p: -p.shape.numel())
        matrices = [p for p in left if len(p.shape) > 1]
        large = [p for p in matrices if p.is_linear or p.shape.numel() >= _LARGE * total]
        small = [p for p in left if p not in large]
        lines = [
            f"{names} [{dims}]: {how}"
            for names, _, (dims, how) in grouped(
                (
                    p.name,
                    (
                        _dims(p.shape),
                        p.how if p.recipe is None else f"{p.how} by {short_name(p.recipe)}",
                    ),
                )
                for p in self.parameters
                if p.how != "left"
            )
        ]
        lines += [
            f"left: {names} [{_dims(shape)}], {_percent(count * shape.numel(), total)}: {why}"
            for names, count, (shape, why) in grouped((p.name, (p.shape, p.why)) for p in large)
        ]
        if small:
            share = _percent(sum(p.shape.numel() for p in small), total)
            lines.append(f"left: {len(small)} smaller ones (embeddings, norms, biases), {share}")
        return "\n".join([head, *(f"  {line}" for line in lines)])


def coverage(model: torch.nn.Module) -> Coverage:
    """Say which parameters of ``model`` are in codes as it is now, and why the others are not.

    Args:
        model: any module, converted or not, sharded or not.

    Raises:
        InputError: for anything else, or a lazy module that has not run yet.
    """
    check_initialized(check_module("model", model))
    return Coverage(tuple(_parameters(model)))


def check_initialized(model: torch.nn.Module) -> None:
    """Raise :class:`InputError` where a parameter of ``model`` has no shape yet."""
    for name, parameter in named_parameters(model):
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(
                f"the parameters of a model must have shapes, got {name} of a lazy module that has "
                f"not run yet; run a forward first."
            )


def _parameters(model: torch.nn.Module) -> Iterator[ParameterCoverage]:
    owners: dict[torch.nn.Parameter, tuple[str, torch.nn.Module, str]] = {}
    for fqn, module in named_modules(model):
        for own_name, parameter in module.named_parameters(recurse=False):
            # A linear layer names it rather than another module that shares it.
            if parameter not in owners or _is_linear(module, own_name):
                owners[parameter] = f"{fqn}.{own_name}".lstrip("."), module, own_name
    for parameter, (name, module, own_name) in owners.items():
        own, shape = to_local(parameter), parameter.shape
        is_linear = _is_linear(module, own_name)
        how: How = "left"
        recipe, why = _own_recipe(parameter), ""
        size = shape.numel() * parameter.dtype.itemsize
        if isinstance(own, QuantizedTensor):
            how = "held in codes"
            size = sum(buffer.nbytes for buffer in own.quantized_storage.buffers.values())
        elif isinstance(own, MasterWeight):
            how = "gathered in codes"
        elif is_linear and isinstance(module, QuantizedModule):
            how = "quantized under autocast"
        else:
            why = why_high_precision(module, own_name)
        yield ParameterCoverage(name, shape, how, recipe, size, why, is_linear)


def _own_recipe(weight: torch.Tensor) -> Recipe | None:
    """Return the recipe of the codes that are held or gathered of a weight; None of others."""
    own = to_local(weight)
    holder = own if isinstance(own, QuantizedTensor) else gather_of(own)
    return None if holder is None else holder.recipe


def _is_linear(module: torch.nn.Module, name: str) -> bool:
    if isinstance(module, QuantizedModule):
        return name.endswith("weight") and name != "layer_norm_weight"
    return name == "weight" and isinstance(module, torch.nn.Linear)


def _dims(shape: torch.Size) -> str:
    return "x".join(map(str, shape))


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


@dataclass(frozen=True, slots=True)
class ProductExplanation:
    """The engine that computes one product of one layer.

    Attributes:
        layer: its name in the model.
        product: ``"output"``, ``"input gradient"`` or ``"weight gradient"``.
        engine: ``"library"``, or ``"decoded"``: both operands are decoded and multiplied in high
            precision.
        reason: which call of the library; or why it is not that.
        recipe: under which the layer runs.
    """

    layer: str
    product: str
    engine: str
    reason: str
    recipe: Recipe

    def __str__(self) -> str:
        return ", ".join(self._parts)

    @property
    def _parts(self) -> tuple[str, str]:
        return self.layer or "(the model itself)", f"{self.product}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """The result of :func:`explain`. Its text has totals first and equal layers in one line.

    Attributes:
        recipe: that was given, or of the autocast around the call; None where there is neither.
        products: three of each weight of a layer.
    """

    recipe: Recipe | None
    products: tuple[ProductExplanation, ...]

    def __str__(self) -> str:
        library = sum(p.engine == "library" for p in self.products)
        recipes = dict.fromkeys(str(p.recipe) for p in self.products)
        head = f"{library} of {len(self.products)} products are computed by GEMMs on codes"
        head += f", under {' and '.join(recipes)}" if recipes else ""
        if recipes and self.recipe is None:
            head += " (no autocast is active here, so those of the weights, or autocast's default)"
        lines = grouped(p._parts for p in self.products)
        return "\n".join([head, *(f"  {layers}, {text}" for layers, _, text in lines)])


def explain(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    *,
    tokens: int = 4096,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> Explanation:
    """Say what computes the products of the layers in ``model``, and why.

    Args:
        model: any module; zerocast's layers in it are explained, itself included.
        recipe: under which they run, or its name; by default that of the autocast around the call.
            Where there is none, that of each weight, as it was converted, and for weights in high
            precision the one that autocast takes by default.
        tokens: rows of a layer's input, which have to fit, too.
        device: where they run; by default where each weight is.
        dtype: the dtype of their results; by default that of each weight.

    Raises:
        InputError: for anything that is not a recipe, or for fewer than one token.
    """
    recipe = current().recipe if recipe is None else as_recipe(recipe)
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
            under,
        )
        for name, module in named_modules(model)
        if isinstance(module, QuantizedModule)
        for part, weight in _weights(module)
        for under in [recipe or _own_recipe(weight) or get_default_recipe()]
        for product, chosen in _engines(weight, under, tokens, device, dtype)
    ]
    return Explanation(recipe, tuple(products))


def _weights(module: QuantizedModule) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a layer's products, each with the suffix that the layer's name gets if
    there are several.
    """
    weights = {
        name: parameter
        for name, parameter in module.named_parameters(recurse=False)
        if _is_linear(module, name)
    }
    for name, weight in weights.items():
        yield (f".{name}" if len(weights) > 1 else ""), weight


def _engines(
    weight: torch.Tensor, recipe: Recipe, tokens: int, device: Device, dtype: torch.dtype | None
) -> Iterator[tuple[Product, Engine]]:
    """Yield each product of a layer with this weight, and what computes it."""
    rows, cols = weight.shape
    x = recipe.for_role("input"), (tokens, cols)
    dy = recipe.for_role("grad_output"), (tokens, rows)
    w, has_columnwise = (recipe.for_role("weight"), (rows, cols)), True
    if isinstance(weight, QuantizedTensor):
        w, has_columnwise = (weight.recipe, (rows, cols)), weight.quantized_storage.has_columnwise
    where = weight.device if device is None else torch.device(device)
    sides = (*x, "in_features"), (*w, "in_features"), (*dy, "out_features")
    refused = next(filter(None, (_refusal(*side) for side in sides)), None)
    for product, operands in zip(Product, ((x, w), (dy, w), (dy, x)), strict=True):
        a, b = (Side(*operand, c) for operand, c in zip(operands, product.value, strict=True))
        found = refused
        if found is None and product is Product.INPUT_GRADIENT and not has_columnwise:
            found = Engine(None, "the weight was made with columnwise=False")
        yield product, found or engine(a, b, dtype or weight.dtype, where)


def _refusal(recipe: Recipe, shape: tuple[int, int], width: str) -> Engine | None:
    try:
        recipe.check_shape(shape)
    except InputError:
        return Engine(
            None,
            f"under autocast it would be refused: its {width}, {shape[1]}, must be a multiple of "
            f"{recipe.block[1]}; pad the weight, or run the layer outside of autocast",
        )
    return None
