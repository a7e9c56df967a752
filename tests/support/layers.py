"""What the tests of layers share: every recipe, and a record of the products that a layer makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

import zerocast
from tests.support import recipes
from zerocast.nn import layer_product
from zerocast.nn.engines import Product
from zerocast.nn.scaled_mm import gemm
from zerocast.recipes import NVFP4BlockScaling, Recipe, Role
from zerocast.tensors import QuantizedStorage, dequantize

NAMES = [name for name in recipes.RECIPES if name != "nvfp4-drawn"]
RECIPES = {name: recipes.RECIPES[name] for name in NAMES}
"""Of layers. Drawn weights are others at every cast; gradients are drawn under NVFP4 anyway."""

every_recipe = recipes.each(*NAMES)

breaks = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
"""Of the compiler, where it takes up a function after a break, about a tensor that is no leaf."""

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

both_dtypes = pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]
)


def to_nearest(recipe: Recipe) -> Recipe:
    """The same without random bits, so that two backwards give the same."""
    if not isinstance(recipe, NVFP4BlockScaling):
        return recipe
    return NVFP4BlockScaling(nvfp4_4over6=recipe.nvfp4_4over6, disable_stochastic_rounding=True)


def step(
    model: torch.nn.Module,
    x: torch.Tensor,
    recipe: Recipe | None = None,
    run: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    inside: bool = False,
    when: str = "",
) -> dict[str, torch.Tensor]:
    """Output and all gradients of one forward, under a recipe where there is one, and backward.

    Args:
        model: whose gradients are cleared before.
        run: what is called; the model.
        inside: whether the backward runs in the region, too.
        when: what names in the result begin with.
    """
    model.zero_grad()
    x.grad = None
    with zerocast.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x) if run is None else run(x)
        loss = y.float().square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return gradients(model, x, y, when)


def gradients(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, when: str = ""
) -> dict[str, torch.Tensor]:
    """Copies of the output and of all gradients, by name."""
    found = {"output": y.detach(), "input": x.grad}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return {when + name: t.clone() for name, t in found.items() if t is not None}


@contextmanager
def kept_for_backward() -> Iterator[list[torch.Tensor]]:
    """What autograd keeps of forwards in the context."""
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        yield kept


@dataclass
class Made:
    """A product that was made: its operands in float64, [rows, cols] as stored, and its result."""

    product: Product
    a: torch.Tensor
    b: torch.Tensor
    result: torch.Tensor


@contextmanager
def recorded_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Made]]:
    """The products of quantized operands, in order, while the context lasts."""
    made: list[Made] = []

    def record(
        product: Product,
        a: QuantizedStorage,
        b: QuantizedStorage,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        result = gemm(product, a, b, dtype, bias)
        pairs = list(zip((a, b), product.value, strict=True))
        assert all(storage.has_columnwise or not columnwise for storage, columnwise in pairs), (
            f"an operand of the {product.title} lacks its columnwise copy"
        )
        operands = [dequantize(storage, columnwise=c).double() for storage, c in pairs]
        made.append(Made(product, *operands, result.detach().clone()))
        return result

    with monkeypatch.context() as patch:
        patch.setattr(layer_product, "gemm", record)
        yield made


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Equal within ``tolerance`` of the largest magnitude."""
    assert actual.shape == expected.shape, (what, actual.shape, expected.shape)
    actual, expected = actual.detach().double(), expected.detach()
    largest = expected.abs().max()
    assert largest > 0, f"{what} is all zeros"
    error = float((actual - expected).abs().max() / largest)
    assert error <= tolerance, f"{what}: relative error {error:.2e} over {tolerance:.0e}"


def two_backwards(
    kind: Callable[..., torch.nn.Module], recipe: Recipe, device: str, *, primary: bool
) -> dict[str, torch.Tensor]:
    """Output and gradients, on the CPU, of the second of two steps of a BF16 layer (256, 512) on
    128 tokens.
    """
    torch.manual_seed(0)
    options = {"recipe": recipe} if primary else {}
    layer = kind(256, 512, **options).to(torch.bfloat16).to(device)
    x = torch.randn(128, 256).bfloat16().to(device).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        layer.zero_grad()
        x.grad = None
        with zerocast.autocast(recipe=recipe):
            y = layer(x)
        # Of y itself every gradient would have the differences of y, several times enlarged.
        y.backward(torch.randn(y.shape, generator=generator).bfloat16().to(device))
    return {name: t.cpu() for name, t in gradients(layer, x, y).items()}


def assert_rounded_otherwise(
    recipe: Recipe, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    """Two results of :func:`two_backwards` differ by no more than the rounding of products, to
    whose sums terms were added in another order, or in another precision.

    Such sums, rounded to BF16, differ by delta = 2^-8 of themselves at most. Where they are
    quantized, they fall on two codes with the probability delta / step, of codes that lie a step
    apart, at most 2^-mantissa_bits of themselves: a mean square of delta * step. If the scale is
    made of an amax that differs, it moves all codes, and as many again fall apart.
    """
    roles: tuple[Role, ...] = ("input", "weight", "grad_output")
    step = max(2.0 ** -recipe.for_role(role).numerics.fmt.mantissa_bits for role in roles)
    bound = (2 * 2.0**-8 * step) ** 0.5
    if isinstance(recipe, NVFP4BlockScaling):
        step = bound = 0.3  # scales are codes, too: not derived
    for name, values in expected.items():
        exact = values.double()
        difference = float((actual[name].double() - exact).norm() / exact.norm())
        assert difference <= bound, f"{name}: {difference:.2e} of the norm, over {bound:.1e}"
        # Where one term is nearly all of a sum, the sum differs by a step of its code at most.
        assert_close(actual[name], exact, step, name)
