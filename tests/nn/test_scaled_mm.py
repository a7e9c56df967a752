"""The library's GEMMs get the operands they document; everything else is decoded, with a reason.

torch's tensorwise and rowwise GEMMs run on a CPU, too, so there the real call is made. The block
kinds need a GPU: there the arguments are checked by decoding them as torch's and cuBLAS's
documentation defines them, scale by scale.
"""

import pytest
import torch

from tests.support.layers import (
    RECIPES,
    assert_close,
    assert_rounded_otherwise,
    gradients,
    to_nearest,
    two_backwards,
)
from zerocast.nn import LayerNormMLP, Linear, engines, scaled_mm, unswizzle
from zerocast.nn.autocast import autocast
from zerocast.nn.engines import BLOCKWISE, MXFP8, NVFP4, ROWWISE, TENSORWISE, Kind, Product, engine
from zerocast.nn.engines import Side as Operand
from zerocast.nn.scaled_mm import GemmOperand, gemm
from zerocast.recipes import Recipe
from zerocast.tensors import QuantizedTensor, dequantize, quantize

T, K, M = 160, 192, 320

KINDS: dict[str, Kind] = {
    "delayed": TENSORWISE,
    "current": TENSORWISE,
    "rowwise": ROWWISE,
    "block": BLOCKWISE,
    "mxfp8": MXFP8,
    "mxfp8-2d": MXFP8,
    "nvfp4": NVFP4,
    "nvfp4-4over6": NVFP4,
}
every_kind = pytest.mark.parametrize("name", KINDS)
every_product = pytest.mark.parametrize("product", list(Product), ids=lambda p: p.title)
CPU = torch.device("cpu")


def role(recipe: Recipe, role: str) -> Recipe:
    """The recipe of a role; gradients rounded to nearest, which needs no state."""
    return to_nearest(recipe).for_role(role)


def operands(name: str, product: Product) -> list[QuantizedTensor]:
    """The two quantized tensors of a product, of wide ranges so that no two scales are the same."""
    torch.manual_seed(0)
    recipe = RECIPES[name]

    def wide(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols) * torch.exp(2 * torch.randn(rows, cols))

    x = quantize(wide(T, K), role(recipe, "input"))
    w = quantize(wide(M, K), role(recipe, "weight"))
    dy = quantize(wide(T, M), role(recipe, "grad_output"))
    return {
        Product.OUTPUT: [x, w],
        Product.INPUT_GRADIENT: [dy, w],
        Product.WEIGHT_GRADIENT: [dy, x],
    }[product]


def sides(product: Product, tensors: list[QuantizedTensor]) -> list[Operand]:
    """The operands that tensors are to a product."""
    return [
        Operand(t.recipe, (t.shape[0], t.shape[1]), columnwise)
        for t, columnwise in zip(tensors, product.value, strict=True)
    ]


@every_kind
@every_product
def test_every_recipe_has_its_kind_of_gemm(name, product):
    """All three products of each."""
    assert engines.kind_of(*sides(product, operands(name, product))) is KINDS[name]


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decode(given: GemmOperand, rows: int, contraction: int) -> torch.Tensor:
    """What an operand means to the library, [rows, contraction] in float64."""
    codes = given.codes
    assert codes.is_contiguous()
    if codes.dtype == torch.float4_e2m1fn_x2:
        data = codes.view(torch.uint8)
        nibbles = torch.stack((data & 15, data >> 4), -1).flatten(-2).long()
        values = E2M1[nibbles & 7] * torch.where(nibbles > 7, -1, 1)
    else:
        values = codes.float()
    values = values.double()
    assert values.shape == (rows, contraction)
    scale, *matrix_scale = given.scales
    if given.scalings[0] in ("TensorWise", "RowWise"):
        assert scale.shape == (() if given.scalings[0] == "TensorWise" else (rows, 1))
        return values * scale
    if given.scalings[0] == "BlockWise1x128":
        blocks = -(-contraction // 128)
        assert scale.shape == (rows, blocks)
        assert scale.stride() == (1, rows)
        return values * scale.repeat_interleave(128, 1)[:, :contraction]
    if given.scalings[0] == "BlockWise128x128":
        blocks = -(-contraction // 128)
        padded = -(-blocks // 4) * 4
        assert scale.shape == (padded, -(-rows // 128))
        assert scale.stride() == (1, padded)
        tall = scale.t().repeat_interleave(128, 0)[:rows, :blocks]
        return values * tall.repeat_interleave(128, 1)[:, :contraction]
    width = {"BlockWise1x32": 32, "BlockWise1x16": 16}[given.scalings[0]]
    plane = -(-rows // 128) * 128, -(-contraction // width // 4) * 4
    assert scale.is_contiguous()
    assert scale.numel() == plane[0] * plane[1]
    compact = unswizzle(scale.view(torch.uint8), plane)[:rows, : contraction // width]
    blocks_scale = compact.contiguous().view(scale.dtype).float().double()
    values = values * blocks_scale.repeat_interleave(width, 1)
    if given.scalings[0] == "BlockWise1x16":
        assert given.scalings[1] == "TensorWise"
        assert matrix_scale[0].shape == ()
        return values * matrix_scale[0]
    return values


@every_kind
@every_product
def test_arguments_mean_what_the_operands_mean(name, product):
    """Read by the library's documented layout they decode to the dequantized operand."""
    tensors = operands(name, product)
    for tensor, side in zip(tensors, sides(product, tensors), strict=True):
        given = scaled_mm.arguments(KINDS[name], side, tensor.quantized_storage)
        expected = dequantize(tensor.quantized_storage, columnwise=side.columnwise)
        expected = expected.t() if side.columnwise else expected
        actual = decode(given, side.rows, side.contraction)
        torch.testing.assert_close(actual, expected.double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise"])
@every_product
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_real_call_gives_the_product_of_the_dequantized_operands(name, product, dtype):
    """torch._scaled_mm on the CPU, with a bias where there is one."""
    if name == "rowwise" and torch.__version__ < "2.13":
        pytest.skip("needs torch 2.13: torch._scaled_mm on the CPU with a scale for each row")
    kind = KINDS[name]
    tensors = operands(name, product)
    given = [
        scaled_mm.arguments(kind, side, tensor.quantized_storage)
        for side, tensor in zip(sides(product, tensors), tensors, strict=True)
    ]
    bias = torch.randn(M, dtype=dtype) if product is Product.OUTPUT else None
    out = scaled_mm.multiply(kind, *given, dtype, bias, fast_accumulation=False)
    expected = gemm(product, *(t.quantized_storage for t in tensors), torch.float32, None).double()
    expected = expected if bias is None else expected + bias.double()
    assert out.dtype == dtype
    assert_close(out, expected, 1e-2 if dtype == torch.bfloat16 else 1e-4, "product")


# --- who is chosen, and why ---


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> torch.device:
    """A CUDA device of this capability."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    return torch.device("cuda")


CAPABLE = {
    TENSORWISE: {(8, 9), (9, 0), (10, 0), (12, 0)},
    ROWWISE: {(8, 9), (9, 0), (10, 0), (12, 0)},
    BLOCKWISE: {(9, 0)},
    MXFP8: {(10, 0), (12, 0)},
    NVFP4: {(10, 0), (12, 0)},
}


@every_kind
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_each_kind_runs_where_hardware_has_it(name, capability, monkeypatch):
    """And elsewhere the reason names both capabilities."""
    device = pretend(monkeypatch, capability)
    a, b = sides(Product.OUTPUT, operands(name, Product.OUTPUT))
    chosen = engine(a, b, torch.bfloat16, device)
    kind = KINDS[name]
    if capability in CAPABLE[kind]:
        assert chosen.kind is kind
        assert kind.name in str(chosen)
    else:
        assert chosen.kind is None
        assert f"{kind.name} GEMMs need compute capability" in chosen.reason
        assert f"a GPU has {capability[0]}.{capability[1]}" in chosen.reason


@every_kind
def test_a_cpu_decodes(name):
    """The reason says that its library would, too, or that torch has no product of the kind."""
    a, b = sides(Product.OUTPUT, operands(name, Product.OUTPUT))
    reason = engine(a, b, torch.bfloat16, CPU).reason
    on_cpus = name in ("current", "rowwise")
    assert ("slower than decoding" if on_cpus else "GEMM for cpu") in reason


def side(name: str, shape: tuple[int, int], columnwise: bool = False) -> Operand:
    """An input of this shape under the recipe of this name."""
    return Operand(role(RECIPES[name], "input"), shape, columnwise)


SQUARE = Operand(RECIPES["block"], (256, 256), False)
GRADIENT = Operand(RECIPES["current"].for_role("grad_output"), (64, 64), False)


@pytest.mark.parametrize(
    ("a", "b", "dtype", "reason", "capability"),
    [
        (side("current", (64, 40)), side("current", (32, 40)), torch.bfloat16,
         "contraction of a multiple of 16 and columns of a multiple of 16, got 40 and 32", (10, 0)),
        (side("current", (64, 32)), side("current", (40, 32)), torch.bfloat16, "got 32 and 40",
         (10, 0)),
        (side("nvfp4", (64, 48)), side("nvfp4", (32, 48)), torch.bfloat16, "multiple of 32",
         (10, 0)),
        (side("mxfp8", (64, 64)), side("mxfp8", (32, 64)), torch.float32,
         "mxfp8 GEMMs do not give torch.float32", (10, 0)),
        (side("current", (64, 32)), side("nvfp4", (32, 32)), torch.bfloat16,
         "schemes that no GEMM multiplies", (10, 0)),
        (side("block", (64, 256)), side("rowwise", (32, 256)), torch.bfloat16,
         "FP8 in blocks of 1x128 by FP8 in blocks of 1x256", (10, 0)),
        (side("block", (63, 256)), SQUARE, torch.bfloat16, "multiple of 4, got 63", (9, 0)),
        (side("block", (64, 256)), SQUARE, torch.bfloat16, None, (9, 0)),
        (GRADIENT, GRADIENT, torch.bfloat16, "no GEMM multiplies E5M2 by E5M2", (9, 0)),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_decoded(a, b, dtype, reason, capability, monkeypatch):
    """On a device that has the kind. No tensor core multiplies two gradients in E5M2 with each
    other, and scales of 1x128 stand in columns of whole fours: 64 rows are multiplied, 63 not.
    """
    chosen = engine(a, b, dtype, pretend(monkeypatch, capability))
    assert reason in chosen.reason if reason else chosen.kind is BLOCKWISE


# --- layers ---


def pretend_library(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> list[bool]:
    """From here on layers on the CPU multiply where those on a GPU of this capability do, by a
    library that decodes what it is given. Lists of each product whether it was to be summed fast.
    """
    asked: list[bool] = []
    device = pretend(monkeypatch, capability)

    def multiply(
        kind: Kind,
        a: GemmOperand,
        b: GemmOperand,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        *,
        fast_accumulation: bool,
    ) -> torch.Tensor:
        asked.append(fast_accumulation)
        width = 2 if a.codes.dtype == torch.float4_e2m1fn_x2 else 1
        a, b = (decode(each, each.codes.shape[0], each.codes.shape[1] * width) for each in (a, b))
        out = a @ b.t()
        return (out if bias is None else out + bias.double()).to(dtype)

    unavailable = engines._unavailable
    monkeypatch.setattr(scaled_mm, "multiply", multiply)
    monkeypatch.setattr(engines, "_unavailable", lambda kind, _: unavailable(kind, device))
    return asked


@pytest.mark.parametrize("shape", [(128, 256, 512), (256, 256, 256), (64, 128, 128)], ids=str)
@pytest.mark.parametrize("primary", [True, False])
@every_kind
def test_a_layer_by_the_library_does_what_it_does_decoded(name, primary, shape, monkeypatch):
    """Output and gradients, on the oldest device that has the kind: the library reads the operands
    that a layer keeps for its backward, which lack what the columnwise copy does not need, and of
    which a block may be as long as the contraction.
    """
    recipe, (tokens, cols, rows) = to_nearest(RECIPES[name]), shape

    def results() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        options = {"recipe": recipe} if primary else {}
        layer = Linear(cols, rows, dtype=torch.bfloat16, **options)
        x = torch.randn(tokens, cols).bfloat16().requires_grad_()
        with autocast(recipe=recipe):
            y = layer(x)
        # Of y itself a gradient would depend on how y was rounded.
        y.backward(torch.randn(tokens, rows).bfloat16())
        return gradients(layer, x, y)

    expected = results()
    fast = pretend_library(monkeypatch, max(KINDS[name].oldest, (9, 0)))
    actual = results()
    assert fast == [True, False, False]  # gradients are not
    for key, values in expected.items():
        assert_close(actual[key], values.double(), 1e-2, key)


@every_kind
def test_two_layers_differ_by_rounding_alone(name, monkeypatch):
    """The library's products and those of decoded operands, through a whole LayerNormMLP, lie as
    far apart as rounding explains: by the bound that a GPU is held to, on the CPU.
    """
    recipe = RECIPES[name]
    expected = two_backwards(LayerNormMLP, recipe, "cpu", primary=True)
    pretend_library(monkeypatch, max(KINDS[name].oldest, (9, 0)))
    actual = two_backwards(LayerNormMLP, recipe, "cpu", primary=True)
    assert_rounded_otherwise(recipe, actual, expected)
