"""QuantizedTensor presents itself as the tensor that it stands for."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.recipes import each
from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import FP8, NVFP4, both_recipes, make
from zerocast.errors import MissingDataError
from zerocast.tensors import quantize

# --- what it presents ---


@both_recipes
def test_it_presents_the_nominal_shape_and_dtype(recipe):
    """Shape, dtype, strides and device are those of a plain tensor; its repr prints no bytes."""
    weight = make(recipe, dtype=torch.bfloat16)
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.stride(), weight.dtype) == ((17, 48), (48, 1), torch.bfloat16)
    assert weight.is_contiguous()
    assert weight.recipe is recipe
    assert repr(weight) == (
        f"QuantizedTensor(shape=(17, 48), dtype=torch.bfloat16, recipe={recipe})"
    )
    assert "requires_grad=True" in repr(torch.nn.Parameter(weight))
    assert "tensor(" not in str(weight)


def test_data_that_a_weight_lacks_is_named():
    """The amax of FP8 and the columnwise copy of columnwise=False raise, and hasattr says False."""
    weight = quantize(torch.randn(4, 16), FP8, columnwise=False)
    with pytest.raises(MissingDataError, match="Float8CurrentScaling does not"):
        _ = weight.amax
    for name in ("columnwise_data", "columnwise_scale_inv"):
        with pytest.raises(
            MissingDataError, match=f"{name} is not there: .*without its columnwise"
        ):
            getattr(weight, name)
        assert not hasattr(weight, name)
    assert hasattr(make(NVFP4), "amax")


@both_recipes
def test_dequantize_gives_a_plain_tensor_of_any_dtype(recipe):
    """By default of the nominal dtype; other dtypes are the FP32 value rounded once."""
    weight = make(recipe, dtype=torch.bfloat16)
    value = weight.dequantize()
    assert type(value) is torch.Tensor
    assert value.dtype == torch.bfloat16
    exact = weight.dequantize(torch.float32)
    assert_same_bytes(value, exact.bfloat16(), "bfloat16")
    assert_same_bytes(weight.dequantize(torch.float64), exact.double(), "float64")


# --- autograd and torch.compile ---


@both_recipes
def test_it_works_in_inference_mode_and_under_autocast(recipe):
    """Made and used in inference mode; autocast casts it as it casts any weight."""
    with torch.inference_mode():
        weight = make(recipe)
        assert_same_bytes(weight.sum(), weight.dequantize().sum(), "sum")
        assert weight.copy_(torch.ones(17, 48)) is weight
    weight, x = torch.nn.Parameter(make(recipe)), torch.randn(2, 48)
    with torch.autocast("cpu", torch.bfloat16):
        y = F.linear(x, weight)
        assert_same_bytes(y, F.linear(x, weight.dequantize()), "output")
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


VIEWS = {
    "detach": lambda w: w.detach(),
    "view_as": lambda w: w.view_as(w),
    "as_strided": lambda w: torch.as_strided(w, (17, 48), (48, 1)),
    "to": lambda w: w.to(torch.bfloat16),
    "t": lambda w: w.t(),
    "rows": lambda w: w[3:5].narrow(1, 0, 7),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_weight_made_outside_is_the_same_in_inference_mode(view):
    """Aliases, copies and views are of the classes and values that they have outside, and views
    can be used there.
    """
    weight = torch.nn.Parameter(make(NVFP4))
    outside = VIEWS[view](weight)
    with torch.inference_mode():
        inside = VIEWS[view](weight)
    assert type(inside) is type(outside)
    assert_same_bytes(inside.clone(), outside.detach().clone(), view)
    if view != "to":
        (inside * torch.ones(1, requires_grad=True)).sum().backward()


@both_recipes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_full_shape_reaches_the_weight(recipe, dtype):
    """Straight-through: it is the gradient of the dequantized value, in the nominal dtype."""
    x = torch.randn(5, 48, dtype=dtype)
    weight = torch.nn.Parameter(make(recipe, dtype=dtype))
    plain = weight.dequantize().requires_grad_()
    for w in (weight, plain):
        (F.linear(x, w).tanh().sum() + w[3:5].square().sum() + w.t()[1].sum()).backward()
        F.linear(x, w).sum().backward()  # accumulates
    assert type(weight.grad) is torch.Tensor
    assert_same_bytes(weight.grad, plain.grad, "grad")
    with torch.no_grad():
        assert not (weight + 1).requires_grad
    weight.grad.zero_()
    assert not weight.detach().requires_grad


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's, of torch.jit
@each("delayed", "current", "rowwise", "mxfp8-2d", "nvfp4", "nvfp4-1x16", "nvfp4-drawn")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_function_of_the_weight_compiles(recipe, backend):
    """Without a graph break, whatever a weight holds, also where a recipe remembers something and
    after a copy_; outputs and gradients are the eager ones.
    """
    torch._dynamo.reset()

    def function(x, w):
        y = F.linear(x, w)
        return y, y.relu() + w[2].sum()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.randn(5, 64)
    weight = torch.nn.Parameter(quantize(torch.randn(32, 64), recipe, name="w"))
    for _ in range(2):
        results = []
        for f in (function, compiled):
            weight.grad = None
            product, out = f(x, weight)
            out.sum().backward()
            results.append((product.detach(), out.detach(), weight.grad))
        assert_same_bytes(results[1][0], results[0][0], "product")
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            weight.copy_(torch.randn(32, 64))
