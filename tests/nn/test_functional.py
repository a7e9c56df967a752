"""Operations of layers whose result is quantized as it is made: what a user is given."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zerocast
from tests.support.fused_ops import FUNCTIONS, RECIPES, USAGES, quantizer_of, state_of
from tests.support.same_bytes import assert_same_bytes, assert_same_storage
from zerocast.nn import functional as F
from zerocast.nn.quantizer import Quantizer
from zerocast.numerics import FusedOp
from zerocast.recipes import NVFP4BlockScaling
from zerocast.tensors import QuantizedTensor


@pytest.fixture(params=["reference", "cpu"], autouse=True)
def backend(request: pytest.FixtureRequest) -> None:
    """All of this file on the backends of the CPU."""
    with zerocast.use_backend(request.param):
        yield


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT, BIAS = draw(64, seed=1), draw(64, seed=2)
CALLS = {
    "relu": lambda x, q, **k: F.relu(x, q, **k),
    "gelu": lambda x, q, **k: F.gelu(x, q, **k),
    "gelu, tanh": lambda x, q, **k: F.gelu(x, q, approximate="tanh", **k),
    "silu": lambda x, q, **k: F.silu(x, q, **k),
    "swiglu": lambda x, q, **k: F.swiglu(torch.cat((x, -x), dim=-1), q, **k),
    "layernorm": lambda x, q, **k: F.layernorm(x, WEIGHT, BIAS, 1e-5, q, **k),
    "rmsnorm": lambda x, q, **k: F.rmsnorm(x, WEIGHT, 1e-5, q, zero_centered_gamma=True, **k),
    "linear": lambda x, q, **k: F.linear(x, draw(64, 64, seed=3), BIAS, q, **k),
}
TORCH = {
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu, tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "swiglu": lambda x: torch.nn.functional.silu(x) * -x,
    "layernorm": lambda x: torch.nn.functional.layer_norm(
        x, (64,), WEIGHT.to(x.dtype), BIAS.to(x.dtype), 1e-5
    ),
    "rmsnorm": lambda x: torch.nn.functional.rms_norm(x, (64,), 1 + WEIGHT.to(x.dtype), 1e-5),
    "linear": lambda x: x @ draw(64, 64, seed=3).to(x.dtype).t() + BIAS.to(x.dtype),
}


@pytest.mark.parametrize("name", CALLS)
def test_without_a_quantizer_it_is_torchs(name):
    """Near torch's function in float64, in the dtype and shape of the input."""
    x = draw(3, 5, 64)
    made = CALLS[name](x, None)
    assert (made.dtype, made.shape) == (x.dtype, x.shape)
    torch.testing.assert_close(made.double(), TORCH[name](x.double()), rtol=2**-7, atol=2**-8)


CAST_AFTERWARDS = {
    "4-over-6": NVFP4BlockScaling(nvfp4_4over6="weights"),
    "stochastic rounding": NVFP4BlockScaling().for_role("grad_output"),
}
"""Recipes that cast the rounded result as weights are cast."""
ALL_RECIPES = RECIPES | CAST_AFTERWARDS


INFINITE = draw(48, 64).index_fill(0, torch.tensor([3]), torch.inf)


# Each call under each recipe; both copies, and each alone, in turn.
CASES = [
    (name, recipe, USAGES[(i + j) % 3])
    for i, name in enumerate(CALLS)
    for j, recipe in enumerate(ALL_RECIPES)
]


@pytest.mark.parametrize(("name", "recipe", "usage"), CASES)
def test_codes_are_those_of_the_rounded_result(name, recipe, usage):
    """One call gives the bytes that quantizing the rounded result gives, and that result where it
    is asked for; it leaves the amaxes that quantizing leaves, over several calls and of what is not
    finite, too; and what it made shares no memory with what the recipe remembers.
    """
    first, second, alone = (quantizer_of(ALL_RECIPES[recipe], usage) for _ in range(3))
    for x in (draw(48, 64), INFINITE, draw(48, 64, seed=5) * 2):
        quantized, output = CALLS[name](x, first, output=True)
        assert_same_bytes(output, CALLS[name](x, None), f"output of {name}")
        assert_same_storage(quantized, second.quantize(output), f"{name}, {recipe}")
        quantized_alone = CALLS[name](x, alone)
        assert isinstance(quantized_alone, QuantizedTensor)
        assert_same_storage(quantized_alone, quantized, f"{name}, {recipe}, alone")
        places = {buffer.data_ptr() for buffer in quantized.quantized_storage.buffers.values()}
        for quantizer in (first, alone):
            remembered, expected = map(state_of, (quantizer, second))
            if remembered is not None:
                assert_same_bytes(remembered.amaxes, expected.amaxes, f"amaxes of {name}")
                assert places.isdisjoint(t.data_ptr() for t in remembered.tensors.values())


class Matrices(TorchDispatchMode):
    """Keeps the floating-point tensors of ``numel`` elements that torch's operations make."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.made = numel, dict[int, torch.Tensor]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if (
            isinstance(made, torch.Tensor)
            and made.is_floating_point()
            and made.numel() == self.numel
        ):
            self.made[made.untyped_storage().data_ptr()] = made
        return made


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_result_is_made_once(function):
    """Beside the codes a call makes one matrix, of the rounded dtype, on the native backend."""
    x, quantizer = draw(48, 128), quantizer_of(RECIPES["current"], (True, False))
    made = Matrices(48 * 64 if function == "swiglu" else 48 * 128)
    with zerocast.use_backend("cpu"), made:
        F.apply_fused(FusedOp(function), x, quantizer, dtype=torch.float16)
    own = [tensor.dtype for place, tensor in made.made.items() if place != x.data_ptr()]
    assert own == [torch.float16]


def test_straight_from_fp32():
    """With ``round_master=False`` codes come from the result as it was computed."""
    x = draw(32, 64)
    quantizer = Quantizer(zerocast.Float8CurrentScaling(round_master=False))
    quantized, output = F.gelu(x, quantizer, output=True)
    assert output.dtype == quantized.dtype == torch.bfloat16
    exact = F.apply_fused(FusedOp("gelu"), x, dtype=torch.float32).output
    assert_same_bytes(
        quantized.rowwise_data, quantizer.quantize(exact).rowwise_data, "codes of FP32 values"
    )


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tensor_is_overwritten(recipe):
    """``out`` receives codes, scales and nothing of what it held; its buffers stay where they are,
    and its version changes.
    """
    quantizer = quantizer_of(RECIPES[recipe])
    out = F.cast(draw(48, 64, seed=5) * 100, quantizer)
    places = {key: b.data_ptr() for key, b in out.quantized_storage.buffers.items()}
    version = out.quantized_storage.version
    x = draw(48, 64)
    made = F.apply_fused(FusedOp("silu"), x, quantizer, out=out)
    assert made.quantized is out
    assert_same_storage(out, F.silu(x, quantizer), recipe)
    assert {key: b.data_ptr() for key, b in out.quantized_storage.buffers.items()} == places
    assert out.quantized_storage.version != version


# --- the rest ---


def test_quantized_operands():
    """``linear`` takes codes, and other functions the value of a quantized tensor."""
    quantizer = quantizer_of(RECIPES["mxfp8"])
    x, w = quantizer.quantize(draw(32, 64)), quantizer.quantize(draw(96, 64, seed=1))
    made = F.linear(x, w)
    expected = x.dequantize(torch.float64) @ w.dequantize(torch.float64).t()
    torch.testing.assert_close(made.double(), expected, rtol=2**-6, atol=2**-6)
    assert_same_bytes(F.relu(x), F.relu(x.dequantize()), "relu of a quantized tensor")


def test_no_rows():
    """A tensor without rows has a result without rows."""
    made = F.apply_fused(FusedOp("layernorm"), draw(0, 64), statistics=True)
    assert made.output.shape == (0, 64)
    assert made.mean.shape == made.rstd.shape == (0,)


def test_no_gradient_flows():
    """Results are cut off from their inputs: layers write the backward."""
    x = draw(4, 64).requires_grad_()
    for name, call in CALLS.items():
        assert not call(x, None).requires_grad, name
        assert not call(x, quantizer_of(RECIPES["current"])).requires_grad, name
