"""Activations for tests: what they are given, who quantizes them, how far they are from float64."""

from collections.abc import Iterator

import torch

import zerocast
from tests.support import recipes
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from tests.support.values import draw_values
from zerocast.nn.quantized_ops import apply_fused
from zerocast.nn.quantizer import Quantizer
from zerocast.nn.recipe_state import RecipeState
from zerocast.numerics import Backend, FusedOp, FusedOperand
from zerocast.recipes import Float8CurrentScaling, Recipe

ELEMENT_WISE = ("identity", "relu", "gelu", "gelu_tanh", "silu")
NORMS = ("layernorm", "rmsnorm")
FUNCTIONS = (*ELEMENT_WISE, "swiglu", *NORMS)

# Of inputs, unless the comment says otherwise; every way in which the kernels cut planes is here.
RECIPES: dict[str, Recipe] = {
    "delayed": recipes.RECIPES["delayed"],
    "current": Float8CurrentScaling(fp8_format="e5m2"),
    "rowwise": recipes.RECIPES["rowwise"],
    "blocks 1x128": recipes.RECIPES["block"].for_role("input"),
    "blocks 128x128": recipes.RECIPES["block"],  # of weights
    "mxfp8": recipes.RECIPES["mxfp8"].for_role("input"),
    "mxfp8 32x32": recipes.RECIPES["mxfp8-2d"],  # of weights
    "mxfp4": recipes.RECIPES["mxfp4"].for_role("input"),
    "nvfp4 1x16": recipes.RECIPES["nvfp4"].for_role("input"),
    "nvfp4 16x16": recipes.RECIPES["nvfp4"],  # of weights
}

USAGES = ((True, True), (True, False), (False, True))
"""Rowwise, columnwise."""


def quantizer_of(
    recipe: Recipe, usage: tuple[bool, bool] = (True, True), device: str = "cpu"
) -> Quantizer:
    """A quantizer with a memory of its own, where the recipe needs one; its scale is no 1."""
    if recipe.state:
        state = RecipeState.create(recipe, "forward", 1, device)
        if "scale" in state.tensors:
            state.tensors["scale"].fill_(37.5)
        quantizer = state.make_quantizers()[0]
        quantizer.set_usage(rowwise=usage[0], columnwise=usage[1])
        return quantizer
    return Quantizer(recipe, rowwise=usage[0], columnwise=usage[1])


def state_of(quantizer: Quantizer) -> RecipeState | None:
    """What :func:`quantizer_of` made for it to remember by."""
    return None if quantizer.slot is None else quantizer.slot.record.func.__self__


def parameters(function: str, cols: int, seed: int) -> dict[str, torch.Tensor]:
    """Weight and bias [cols] of a norm, of different dtypes."""
    g = torch.Generator().manual_seed(seed)
    if function not in NORMS:
        return {}
    given = {"weight": torch.randn(cols, generator=g).bfloat16()}
    if function == "layernorm":
        given["bias"] = torch.randn(cols, generator=g)
    return given


def source(function: str, shape: tuple[int, int], kind: str, seed: int) -> torch.Tensor:
    """FP32 [M, S] that a function of ``shape`` takes."""
    rows, cols = shape
    cols *= 2 if function == "swiglu" else 1
    return draw_values(kind, rows * cols, seed).view(rows, cols)


def assert_fused(
    backend: Backend, function: str, quantizer: Quantizer, x: torch.Tensor, what: str
) -> None:
    """One call gives the rounded result, and of it the codes that the reference gives."""
    cols = x.shape[1] // (2 if function == "swiglu" else 1)
    given = {key: t.to(x.device) for key, t in parameters(function, cols, 9).items()}
    state = state_of(quantizer)
    recorded = None if state is None else state.amaxes
    with zerocast.use_backend(backend):
        made = apply_fused(FusedOp(function), x, quantizer, output=True, **given)
    assert made.quantized is not None
    assert made.output is not None
    amax = None if recorded is None else recorded.clone()
    with zerocast.use_backend("reference"):
        expected = quantizer.quantize(made.output)
    assert_same_storage(made.quantized, expected, what)
    if amax is not None:
        assert_same_bytes(amax, recorded, f"recorded amax of {what}")
    with zerocast.use_backend(backend):  # the same codes where the result is not wanted
        alone = apply_fused(FusedOp(function), x, quantizer, **given)
    assert alone.output is None
    assert alone.quantized is not None
    assert_same_storage(alone.quantized, expected, f"{what}, no output")


def every_bfloat16() -> torch.Tensor:
    """[256, 256]: every BF16 value, NaNs and infinities included."""
    return torch.arange(65536).to(torch.int16).view(torch.bfloat16).view(256, 256)


def ulps(actual: torch.Tensor, exact: torch.Tensor, scale: torch.Tensor | None = None) -> float:
    """The largest error, in units of the last place of BF16 at ``exact`` (or at ``scale``); NaN and
    infinities must be where they are.
    """
    rounded = exact.to(actual.dtype)
    finite = rounded.isfinite()
    assert torch.equal(actual.isnan(), rounded.isnan())
    others = ~finite & ~rounded.isnan()
    assert torch.equal(actual[others], rounded[others])
    at = exact.abs() if scale is None else torch.maximum(exact.abs(), scale.double())
    unit = torch.exp2(torch.floor(torch.log2(at.clamp(min=2.0**-126))) - 7)
    errors = ((actual.double() - exact).abs() / unit)[finite & exact.isfinite()]
    return float(errors.max()) if errors.numel() else 0.0


def rows_of_every_kind(cols: int) -> Iterator[tuple[str, torch.Tensor]]:
    """FP32 [8, cols] for the norms, by what is hard about them."""
    g = torch.Generator().manual_seed(cols)
    x = torch.randn(8, cols, generator=g)
    yield "normal", x
    yield "far from zero", x * 0.01 + 1000.0
    outlier = x.clone()
    outlier[:, cols // 2] = 3e4
    yield "an outlier", outlier
    yield "first element an outlier", torch.cat((outlier[:, cols // 2 :], x[:, : cols // 2]), dim=1)
    yield "tiny", x * 1e-30
    yield "huge", x * 1e37
    largest = torch.finfo(torch.float32).max
    yield "FP32's largest", torch.full_like(x, largest).copysign(x)
    yield "wide", x * torch.exp2(torch.randint(-40, 41, x.shape, generator=g).float())
    yield "bfloat16", x.bfloat16().float()


def float64_target(
    op: FusedOp, x: torch.Tensor, round_to: torch.dtype, **given: torch.Tensor
) -> FusedOperand:
    """A target with an output of ``round_to``."""
    cols = x.shape[1] // (2 if op.function == "swiglu" else 1)
    output = torch.empty(x.shape[0], cols, dtype=round_to)
    return FusedOperand(op, x, output, **given)
