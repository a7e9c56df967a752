"""QuantizedTensor presents itself as the tensor that it stands for."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.same_bytes import assert_same_bytes
from tests.support.weights import EVERY_RECIPE, FP8, NVFP4, both_recipes, make
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
@pytest.mark.parametrize("name", ["delayed", "rowwise", "mxfp8-2d", "nvfp4-1x16", "nvfp4-drawn"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_forward_compiles_whatever_a_weight_holds(name, backend):
    """Also where a recipe remembers something, and after a cast; the output is eager's."""
    torch._dynamo.reset()
    compiled = torch.compile(F.linear, backend=backend, fullgraph=True)
    weight, x = quantize(torch.randn(32, 64), EVERY_RECIPE[name], name="w"), torch.randn(5, 64)
    for _ in range(2):
        assert_same_bytes(compiled(x, weight), F.linear(x, weight), "output")
        weight.copy_(torch.randn(32, 64))


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # inductor's, of torch.jit
@both_recipes
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_function_of_the_weight_compiles(recipe, backend):
    """Without a graph break; values and gradients are the eager ones, also after a copy_."""
    torch._dynamo.reset()

    def function(x, w):
        return F.linear(x, w).relu() + w[2].sum()

    compiled = torch.compile(function, backend=backend, fullgraph=True)
    x = torch.randn(5, 48)
    weight = torch.nn.Parameter(make(recipe))
    for _ in range(2):
        grads = []
        for f in (function, compiled):
            weight.grad = None
            out = f(x, weight)
            out.sum().backward()
            grads.append((out.detach(), weight.grad))
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            weight.copy_(torch.randn(17, 48))
